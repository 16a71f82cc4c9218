"""Native modules for what Megatron-Core's local layers lack."""
