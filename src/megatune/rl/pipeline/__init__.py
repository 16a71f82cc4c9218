"""The driver of a run: its steps, reports and checkpoints."""
