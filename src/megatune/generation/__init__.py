"""Text from a checkpoint: one answer, or a chat."""
