"""Core attention: packed rows, context parallelism, and the choice of kernels."""
