"""One key that sets several: the published settings of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.config.dialects.roll_reader import Reader
from megatune.config.dialects.roll_tree import Tree
from megatune.config.entry import SettingEntry
from megatune.config.values import Value, shown

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {  # arXiv 2503.14476, section 3 and table 1
        "adv_estimator": "grpo",
        "use_pg_clip_range": True,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.28,
        "loss_agg_mode": "token-mean",
        "use_kl_loss": False,
        "add_token_level_kl": False,
        "max_len_mask": True,
        "is_use_additional_prompts": True,
    },
}
_FILTER = {"type": "std_filter", "filter_args": {"std_threshold": 0.0}}


def with_preset(tree: Tree, reader: Reader) -> Tree:
    """Return the tree with what algorithm_preset sets, and say what that is. A key that was written with another value
    is a finding; a filter of a reward that was written stays."""
    asked = tree.get("algorithm_preset")
    if not isinstance(asked, SettingEntry) or asked.value.data not in _PRESETS:
        return tree
    name = f"algorithm_preset {asked.value.data}"
    preset = _PRESETS[str(asked.value.data)]
    for key, value in preset.items():
        own = tree.get(key)
        if isinstance(own, SettingEntry) and own.value.data != value:
            what = f"{key} is {shown(own.value.data)}, and {name} sets {shown(value)}"
            reader.find(what, own.where, "the preset would not be what was published", f"remove {key}, or the preset")
    rewards = tree.get("rewards")
    if isinstance(rewards, dict):
        added = _entries("query_filter_config", _FILTER, asked.where, name)
        rewards = {key: {**added, **own} if isinstance(own, dict) else own for key, own in rewards.items()}
        tree = {**tree, "rewards": rewards}
    said = ", ".join(f"{key} {shown(value)}" for key, value in preset.items())
    reader.lines.append(f"{name} sets {said}, and query_filter_config std_filter above 0 for rewards without one")
    missing = {key: value for key, value in preset.items() if key not in tree}
    return {
        **tree,
        **{key: node for each in missing.items() for key, node in _entries(*each, asked.where, name).items()},
    }


def _entries(key: str, value: Any, where: str, origin: str) -> Tree:
    """Return a key as if it had been written."""
    if isinstance(value, dict):
        return {key: {name: node for each in value.items() for name, node in _entries(*each, where, origin).items()}}
    return {key: SettingEntry(key, Value(value, str(value)), where, origin)}
