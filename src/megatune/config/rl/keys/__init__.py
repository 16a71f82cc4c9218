"""Keys of a file of reinforcement learning that are not of the engine: names and defaults are ROLL's."""
