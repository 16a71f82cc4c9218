"""The training room: the loop, its callbacks, and checkpoints that are atomic."""
