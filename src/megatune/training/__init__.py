"""The training loop, its callbacks, and atomic checkpoints."""
