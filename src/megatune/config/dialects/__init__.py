"""Dialects of settings: tables that map other systems' keys to ours, and their readers."""
