"""Plans of reinforcement learning: the memory of each role on its devices, and the seconds of each phase of a step."""
