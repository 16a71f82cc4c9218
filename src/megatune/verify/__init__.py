"""The proof: what the engine computes in a layout, against what plain Transformers computes."""
