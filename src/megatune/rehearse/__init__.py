"""Tries a run as it will be, with a small model of the same family, on CPU processes of this machine."""
