"""Settings of reinforcement learning, by the names that ROLL's files have."""
