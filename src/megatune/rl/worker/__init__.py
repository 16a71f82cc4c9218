"""What trainer ranks do with the engine: log-probabilities, updates, values, weights."""
