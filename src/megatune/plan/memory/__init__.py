"""Predicts the memory of a rank, by part, from the model, the settings and the machine."""
