"""Seconds of a step, by part, from the numbers of the model, the settings and the machine alone."""

from megatune.plan.time.estimate import TIME_PARTS, StepTime, micro_batch_seconds, step_time
from megatune.plan.time.pipeline import ChunkTime

__all__ = ["TIME_PARTS", "ChunkTime", "StepTime", "micro_batch_seconds", "step_time"]
