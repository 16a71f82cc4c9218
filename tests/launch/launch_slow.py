"""A module whose import hangs, as on a file system that does not answer."""

import time

from launch_targets import PATIENCE

time.sleep(PATIENCE)
