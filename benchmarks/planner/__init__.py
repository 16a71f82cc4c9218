"""Published measurements, and how they are planned: of `planner_accuracy.py`."""
