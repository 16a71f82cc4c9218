"""Explains settings: what they are, how they work, when to change them, and what they cost."""
