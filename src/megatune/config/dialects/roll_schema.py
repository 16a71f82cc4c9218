"""Where ROLL's keys stand in a file, and what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from megatune.config.dialects.dialect import Refused
from megatune.config.dialects.roll_ignored import (
    DATA_IGNORED,
    DATA_REFUSED,
    FSDP,
    GENERATING_IGNORED,
    GENERATING_REFUSED,
    REWARD_IGNORED,
    REWARD_REFUSED,
    ROLE_IGNORED,
    ROLE_REFUSED,
    TOP_IGNORED,
    TOP_REFUSED,
)
from megatune.config.rl.keys.algorithm import AlgorithmKeys, CorrectionFilterKeys, IsWeightKeys
from megatune.config.rl.keys.data import GroupFilterKeys, PromptDataKeys, RewardKeys
from megatune.config.rl.keys.role import PackingKeys, RoleKeys, RouterReplayKeys, SamplerKeys, StrategyKeys
from megatune.config.rl.keys.rollout import DatasetFilterKeys, GeneratingKeys, RolloutKeys
from megatune.config.rl.keys.run import CheckpointKeys, RolloutMockKeys, RunKeys
from megatune.config.setting import Group, SettingInfo, describe


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a file.

    Attributes:
        groups: of which keys it has.
        inner: mappings in it; those that are None are read by who needs them.
        lists: keys whose items are mappings of one group.
        ignored: keys that do nothing, and why.
        refused: keys, or values of them, that are not built.
    """

    groups: tuple[type[Group], ...] = ()
    inner: Mapping[str, Section | None] = field(default_factory=dict)
    lists: Mapping[str, type[Group]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)

    @property
    def infos(self) -> dict[str, SettingInfo]:
        return _infos(self.groups)

    @property
    def names(self) -> list[str]:
        """Every key that is known here."""
        return [*self.infos, *self.inner, *self.lists, *self.ignored, *self.refused]


@cache
def _infos(groups: tuple[type[Group], ...]) -> dict[str, SettingInfo]:
    return {info.name: info for group in groups for info in describe(group.__name__, group)}


PROMPT_DATA = Section((PromptDataKeys,), ignored=DATA_IGNORED, refused=DATA_REFUSED)
GENERATING = Section((GeneratingKeys,), ignored=GENERATING_IGNORED, refused=GENERATING_REFUSED)
STRATEGY = Section(
    (StrategyKeys,),
    {"strategy_config": None},
    refused={
        "strategy_name": Refused(
            FSDP,
            values=("fsdp2_train", "fsdp2_infer"),
            fix="write strategy_name: megatron_train, or megatron_infer, and its strategy_config",
        )
    },
)
_ROLE_PARTS: dict[str, Section | None] = {
    "model_args": None,
    "training_args": None,
    "data_args": PROMPT_DATA,
    "generating_args": GENERATING,
    "strategy_args": STRATEGY,
    "sequence_packing_args": Section((PackingKeys,)),
    "router_replay": Section((RouterReplayKeys,)),
}
ROLE = Section(
    (RoleKeys,),
    _ROLE_PARTS,
    ignored=ROLE_IGNORED,
    refused=ROLE_REFUSED,
)
REWARD = Section(
    (RoleKeys, RewardKeys),
    {**_ROLE_PARTS, "query_filter_config": Section((GroupFilterKeys,))},
    ignored={**ROLE_IGNORED, **REWARD_IGNORED},
    refused={**ROLE_REFUSED, **REWARD_REFUSED},
)
_OF_ROLES = (*ROLE_IGNORED, *_infos((RoleKeys,)), "model_args", "strategy_args", "training_args")
VALIDATION = Section(
    (),
    {"data_args": PROMPT_DATA, "generating_args": GENERATING},
    ignored={
        **dict.fromkeys(_OF_ROLES, "validation is sampled by actor_infer"),
        "eval_steps": "the top level's eval_steps is meant, as in ROLL",
    },
)
ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward_model", "student_train", "student_infer")
TOP = Section(
    (RunKeys, RolloutKeys, AlgorithmKeys),
    {
        **dict.fromkeys(ROLES, ROLE),
        "validation": VALIDATION,
        "rewards": None,
        "teacher": None,
        "checkpoint_config": Section(
            (CheckpointKeys,), ignored={"async_upload": "copies are made beside training, and are whole or not there"}
        ),
        "rollout_mock": Section((RolloutMockKeys,)),
        "dataset_filter": Section(
            (DatasetFilterKeys,),
            ignored=dict.fromkeys(("min_difficulty", "max_difficulty"), "it has no effect in ROLL either"),
        ),
        "train_infer_correction": Section(
            (), {"is_weight": Section((IsWeightKeys,))}, {"filters": CorrectionFilterKeys}
        ),
    },
    ignored=TOP_IGNORED,
    refused=TOP_REFUSED,
)
SAMPLER = Section((SamplerKeys,))
