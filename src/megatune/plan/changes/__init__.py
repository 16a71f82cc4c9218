"""A case with other settings, and which of them help."""
