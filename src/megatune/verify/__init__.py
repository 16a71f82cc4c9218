"""Compare the results of the engine in a parallel layout with those of plain Transformers."""
