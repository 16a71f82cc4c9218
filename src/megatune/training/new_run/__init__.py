"""A new run from a few answers: model, data, goal and machine. Nothing here prints or asks."""

from megatune.training.new_run.answers import Answers, WrongAnswersError
from megatune.training.new_run.draft import NewRun, draft
from megatune.training.new_run.files import write_settings
from megatune.training.new_run.folder import GOALS, Goal, find_data, find_models

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
