"""Where ROLL's keys stand in a file."""

from __future__ import annotations

from megatune.config.dialects.roll_reader import Section
from megatune.config.dialects.table import table
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.data import RewardSettings
from megatune.config.rl.pages import keys_of
from megatune.config.rl.role import RoleSettings, SamplerSettings, Validation
from megatune.config.rl.rollout import RolloutSettings
from megatune.config.rl.run import RLRunSettings

_ENGINE = ("model_args", "training_args")
ROLE = Section((RoleSettings,), ("ROLE",), dict.fromkeys(_ENGINE))
REWARD = Section((RoleSettings, RewardSettings), ("ROLE", "rewards.DOMAIN"), dict.fromkeys(_ENGINE))
SAMPLER = Section((SamplerSettings,))
_IGNORED = [key.removeprefix("ROLE.") for key, row in table("roll").items() if row.ignored]
_OF_ROLES = (*_IGNORED, *keys_of(RoleSettings), *_ENGINE)
VALIDATION = Section(
    (Validation,),
    ("ROLE",),
    others={
        **dict.fromkeys((*_OF_ROLES, "strategy_args"), "validation is sampled by actor_infer"),
        "eval_steps": "the top level's eval_steps is meant, as in ROLL",
    },
)
TOP = Section(
    (RLRunSettings, RolloutSettings, AlgorithmSettings),
    ("",),
    {
        **dict.fromkeys(("actor_train", "actor_infer", "reference", "critic", "reward_model"), ROLE),
        **dict.fromkeys(("student_train", "student_infer"), ROLE),
        "validation": VALIDATION,
        "rewards": None,
        "teacher": None,
    },
)
