"""Starts and supervises the ranks of a run, and reports the first cause of a failure. Linux only; imports no torch."""
