"""The keys of a file of reinforcement learning, in the order that they are explained in, by where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.data import RewardSettings
from megatune.config.rl.role import RoleSettings, SamplerSettings
from megatune.config.rl.rollout import RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.setting import Group, SettingInfo, describe

# Headings -> groups by where they stand; ROLE and DOMAIN mean the name of a role and of a domain.
_GROUPS: dict[str, dict[str, type[Group]]] = {
    "run": {"": RLRunSettings},
    "rollouts": {"": RolloutSettings},
    "algorithm": {"": AlgorithmSettings},
    "roles": {"ROLE": RoleSettings, "ROLE.strategy_args.strategy_config": SamplerSettings},
    "rewards": {"rewards.DOMAIN": RewardSettings},
}


def keys_of(group: type[Group]) -> dict[str, SettingInfo]:
    """Describe the keys of a group that have a value of their own, by name."""
    nested = (*mappings_of(group), *lists_of(group))
    return {info.name: info for info in describe(group.__name__, group) if info.name not in nested}


def mappings_of(group: type[Group]) -> dict[str, type[Group]]:
    """Return the groups that stand below keys of a group."""
    found: dict[str, Any] = {name: field.annotation for name, field in group.model_fields.items()}
    return {name: kind for name, kind in found.items() if _is_group(kind)}


def lists_of(group: type[Group]) -> dict[str, type[Group]]:
    """Return the groups that stand in lists below keys of a group."""
    found = {name: get_args(field.annotation) for name, field in group.model_fields.items()}
    return {name: kinds[0] for name, kinds in found.items() if kinds and _is_group(kinds[0])}


@cache
def rl_pages() -> dict[str, dict[str, SettingInfo]]:
    """Describe every key by its heading and where it stands: "ROLE.generating_args.top_p"."""
    return {
        heading: dict(found for above, group in groups.items() for found in _keys(above, group))
        for heading, groups in _GROUPS.items()
    }


@cache
def rl_keys() -> dict[str, SettingInfo]:
    """Describe every key by where it stands."""
    return {dotted: info for page in rl_pages().values() for dotted, info in page.items()}


def find_key(key: str) -> tuple[str, SettingInfo] | None:
    """Return a key by its name, or by its end with a role in front: top_p, "actor_infer.generating_args.top_p"."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for dotted, info in rl_keys().items():
            if dotted == end or dotted.endswith(f".{end}"):
                return dotted, info
    return None


def _keys(above: str, group: type[Group]) -> Iterator[tuple[str, SettingInfo]]:
    for name, info in keys_of(group).items():
        yield f"{above}.{name}" if above else name, info
    for name, inner in (mappings_of(group) | lists_of(group)).items():
        yield from _keys(f"{above}.{name}" if above else name, inner)


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Group)
