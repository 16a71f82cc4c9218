"""Reinforcement learning with verifiable rewards, on Ray."""
