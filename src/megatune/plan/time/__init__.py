"""Seconds of a step, by part, from the numbers of the model, the settings and the machine alone."""

from megatune.plan.time.estimate import TIME_PARTS, FixedTime, StepTime, answers, step_time

__all__ = ["TIME_PARTS", "FixedTime", "StepTime", "answers", "step_time"]
