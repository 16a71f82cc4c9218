"""Decides the world, starts ranks, watches them, and names the one that failed. Linux only; imports no torch."""
