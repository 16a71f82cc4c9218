"""Native modules that stand where Megatron-Core's local layers fall short of what fine-tuning needs."""
