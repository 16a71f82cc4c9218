"""Plans the memory, time and layout of runs, without GPUs or weights."""
