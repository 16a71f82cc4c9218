"""Settings of reinforcement learning, under the names of ROLL's files."""
