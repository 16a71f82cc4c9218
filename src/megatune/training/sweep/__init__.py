"""Several runs of one file with other values of some settings, and which of them is best."""

from megatune.training.sweep.run import Sweep
from megatune.training.sweep.space import grid, read_space

__all__ = ["Sweep", "grid", "read_space"]
