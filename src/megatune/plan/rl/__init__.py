"""Reinforcement learning: what each role holds, what shares a device, and the seconds of a step's phases."""
