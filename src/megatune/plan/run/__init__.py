"""Plans a run before it starts, and compares the plan with its measurements."""
