"""Checkpoints in Megatron-Core's torch_dist format, read and written without executing anything in them."""
