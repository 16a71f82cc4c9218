"""Bytes of a rank, by part, from the numbers of the model and the settings alone."""
