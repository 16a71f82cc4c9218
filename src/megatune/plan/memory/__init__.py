"""Bytes of a rank, by part, from the numbers of the model and the settings alone."""

from megatune.plan.memory.estimate import StageMemory, stage_memory

__all__ = ["StageMemory", "stage_memory"]
