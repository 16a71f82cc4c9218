"""A new run from a few answers: model, data, goal and machine. Nothing here prints or asks."""

from megatune.training.new_run.draft import Answers, NewRun, WrongAnswersError, draft
from megatune.training.new_run.files import GOALS, Goal, find_data, find_models, write_settings

__all__ = [
    "GOALS",
    "Answers",
    "Goal",
    "NewRun",
    "WrongAnswersError",
    "draft",
    "find_data",
    "find_models",
    "write_settings",
]
