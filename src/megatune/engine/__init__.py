"""The only room that imports megatron. Importing it prepares the process for Megatron-Core: see device and quiet."""

from megatune.engine.device import install
from megatune.engine.quiet import quiet

quiet()
install()
