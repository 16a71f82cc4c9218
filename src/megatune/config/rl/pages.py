"""The keys of a file of reinforcement learning, in the order that they are explained in, by where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from megatune.config.rl.keys.algorithm import AlgorithmKeys, CorrectionFilterKeys, IsWeightKeys
from megatune.config.rl.keys.data import GroupFilterKeys, PromptDataKeys, RewardKeys
from megatune.config.rl.keys.role import PackingKeys, RoleKeys, RouterReplayKeys, SamplerKeys, StrategyKeys
from megatune.config.rl.keys.rollout import DatasetFilterKeys, GeneratingKeys, RolloutKeys
from megatune.config.rl.keys.run import CheckpointKeys, RolloutMockKeys, RunKeys
from megatune.config.setting import Group, SettingInfo, describe


class Place(NamedTuple):
    """Keys of one group, below `prefix`, where ROLE and DOMAIN stand for the name of a role and of a domain."""

    prefix: str
    group: type[Group]


# Headings -> the keys below each.
PAGES: dict[str, tuple[Place, ...]] = {
    "run": (Place("", RunKeys), Place("checkpoint_config", CheckpointKeys), Place("rollout_mock", RolloutMockKeys)),
    "rollouts": (Place("", RolloutKeys), Place("dataset_filter", DatasetFilterKeys)),
    "algorithm": (
        Place("", AlgorithmKeys),
        Place("train_infer_correction.is_weight", IsWeightKeys),
        Place("train_infer_correction.filters", CorrectionFilterKeys),
    ),
    "roles": (
        Place("ROLE", RoleKeys),
        Place("ROLE.strategy_args", StrategyKeys),
        Place("ROLE.strategy_args.strategy_config", SamplerKeys),
        Place("ROLE.sequence_packing_args", PackingKeys),
        Place("ROLE.router_replay", RouterReplayKeys),
        Place("ROLE.generating_args", GeneratingKeys),
        Place("ROLE.data_args", PromptDataKeys),
    ),
    "rewards": (Place("rewards.DOMAIN", RewardKeys), Place("rewards.DOMAIN.query_filter_config", GroupFilterKeys)),
}


@cache
def rl_keys() -> dict[str, SettingInfo]:
    """Describe every key by where it stands: "ROLE.generating_args.top_p"."""
    return dict(_keys())


def find_key(key: str) -> tuple[str, SettingInfo] | None:
    """Return a key by its name, or by its end with a role in front: top_p, "actor_infer.generating_args.top_p"."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for dotted, info in rl_keys().items():
            if dotted == end or dotted.endswith(f".{end}"):
                return dotted, info
    return None


def _keys() -> Iterator[tuple[str, SettingInfo]]:
    for places in PAGES.values():
        for prefix, group in places:
            for info in describe(group.__name__, group):
                yield f"{prefix}.{info.name}" if prefix else info.name, info
