"""Tables of other systems' keys: one YAML file a system, one row a key, whose columns are those of `Row`.

Reasons that several keys share are YAML anchors. Blocks of other names hold them and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from megatune.config.dialects.row import Row
from megatune.config.settings import setting_paths

# What people say in short, which no system takes.
SHORT_NAMES = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "num_processes",
    "lr": "learning_rate",
}


@cache
def table(system: str, part: str = "keys") -> Mapping[str, Row]:
    """Read the table of a system, a part of `SYSTEM.yaml` beside this file."""
    text = Path(__file__).with_name(f"{system}.yaml").read_text(encoding="utf-8")
    found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))[part]
    return {key: Row(target=row) if isinstance(row, str) else Row(**row) for key, row in found.items()}


@cache
def rows_below(above: str) -> dict[str, Row]:
    """Return the rows of ROLL's keys that stand in a mapping, "ROLE.model_args", by their own names."""
    places = ((key.rpartition("."), row) for key, row in table("roll").items())
    return {name: row for (place, _, name), row in places if place == above}


@cache
def training_rows() -> dict[str, Row]:
    """Return a row for each key of training, of LLaMA-Factory and Megatron-SWIFT, that ignores it: for other verbs."""
    names = (*setting_paths(), *table("llamafactory"), *table("swift"))
    return dict.fromkeys(names, Row(ignored="it is about training"))


@cache
def foreign_keys() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return each key of any system: what it is there, and "group.name" of the settings that it sets.

    It is for messages on a key that the system in use does not know.
    """
    from megatune.config.rl.pages import rl_keys  # builds hundreds of fields, for a suggestion

    of_roll = "a key of ROLL, whose files `megatune rl` runs"
    found: dict[str, tuple[str, tuple[str, ...]]] = {key.rpartition(".")[2]: (of_roll, ()) for key in rl_keys()}
    found |= {short: ("a short name", (setting_paths()[name],)) for short, name in SHORT_NAMES.items()}
    for system, what in (("swift", "a flag of Megatron-SWIFT"), ("llamafactory", "a key of LLaMA-Factory")):
        found |= {key: (what, row.paths) for key, row in table(system).items()}
    return found | {name: ("a key of LLaMA-Factory", (path,)) for name, path in setting_paths().items()}
