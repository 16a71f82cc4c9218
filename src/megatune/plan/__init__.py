"""Closed-form answers from the numbers of a model: parameters and floating-point operations."""
