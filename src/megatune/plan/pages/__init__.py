"""Prints plans as text and tables for a terminal or a file, and as one JSON document."""
