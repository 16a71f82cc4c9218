"""Modules that Megatron-Core's local layers lack."""
