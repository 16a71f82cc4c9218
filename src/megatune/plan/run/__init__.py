"""What the planner says of a run before it starts, and after it ended."""
