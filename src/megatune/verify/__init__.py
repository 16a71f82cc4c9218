"""Proof that a layout computes what Transformers computes."""
