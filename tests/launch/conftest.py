"""The fixture that starts a run."""

from launch_run import launch as launch
