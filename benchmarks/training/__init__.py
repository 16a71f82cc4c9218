"""A whole training step, ours and Transformers', measured side by side: what gpu_training and cpu_training share."""
