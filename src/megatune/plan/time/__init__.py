"""Predicts the seconds of a step, by part, from the model, the settings and the machine."""

from megatune.plan.time.estimate import TIME_PARTS, FixedTime, StepTime, answers, step_time

__all__ = ["TIME_PARTS", "FixedTime", "StepTime", "answers", "step_time"]
