"""Tiny random checkpoints with real tokenizers, for trying and testing."""
