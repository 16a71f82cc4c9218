"""Tables of other systems' keys: one YAML file a system, one row a key, with everything that is known about the key.

A row is "group.name" of the setting that the key sets, or a mapping of these columns:

    target         "group.name", or a list of them, that get the value
    values         a value as the system writes it -> ours; any other stays as it is
    factor         what a number is multiplied by: 60 for minutes that set seconds
    choices        a value -> "group.name" -> value: each value sets several settings
    global_batch   true: rows of a step, from which gradient_accumulation_steps follows
    pooled_loss    true: the weight of Transformers' balancing loss, from which moe_aux_loss_coeff follows
    ignored        why the key changes nothing; `passes` has the values that need no line
    unsupported    why the key is refused, or of its values those in `refuses`; `passes` has the values that ask for
                   nothing, the first of them is named as the fix where `fix` is not given
    default        what the system takes where nothing is written; `defaults` has it by version. It is applied, unless
                   `kept` says why ours stays
    kind           bool, int, float, str, list or dict: the type of a value, where no setting or value tells it
    negatable      true: a boolean that is true by itself, which `--no_KEY` turns off
    of             what the key belongs to, for the functions that read several keys together: lora, rlhf, rollouts
    version        the only version that has the key
    now            the name that the key has in later versions

Reasons that several keys share are YAML anchors. Blocks of other names hold them and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from megatune.config.dialects.dialect import Accepted, Alias, GlobalBatchSize, PooledLoss, Refused, Resolved, ValueMap
from megatune.config.settings import all_settings, setting_paths

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known about one key; the columns are those of the file."""

    target: str | list[str] = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    factor: int = 1
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    global_batch: bool = False
    pooled_loss: bool = False
    ignored: str = ""
    unsupported: str = ""
    refuses: list[Any] | None = None
    passes: list[Any] = field(default_factory=list)
    fix: str = ""
    default: Any = ...  # ... where the file has none: null is a default
    defaults: Mapping[int, Any] = field(default_factory=dict)
    kept: str = ""
    kind: str = ""
    negatable: bool = False
    of: str = ""
    version: int | None = None
    now: str = ""

    @property
    def meaning(self) -> Resolved | None:
        """What the key sets; None where it sets nothing by itself."""
        if self.global_batch:
            return GlobalBatchSize()
        if self.pooled_loss:
            return PooledLoss()
        if self.choices:
            return ValueMap(self.choices)
        if not self.target:
            return None
        paths = (self.target,) if isinstance(self.target, str) else tuple(self.target)
        return Alias(paths, self.values, self.factor)

    @property
    def type(self) -> type:
        """The type of the key's value: that of its first setting, where no column tells it."""
        if self.kind:
            return _TYPES[self.kind]
        if (meaning := self.meaning) is not None:
            kinds = all_settings()[meaning.paths[0]].kinds
            return next((kind for kind in (list, dict, float, int, str) if kind in kinds), bool)
        return type(self.passes[0]) if self.passes else str

    def default_in(self, version: int) -> Any:
        """Return the system's default in a version; ... where the table has none."""
        return self.defaults.get(version, ...) if self.defaults else self.default


@dataclass(frozen=True)
class Table:
    """All keys of one system."""

    rows: Mapping[str, Row]

    @cached_property
    def keys(self) -> dict[str, Resolved]:
        """The keys that set something."""
        return {key: meaning for key, row in self.rows.items() if (meaning := row.meaning) is not None}

    @cached_property
    def refused(self) -> dict[str, Refused]:
        """The keys that are refused, with all of their values or some."""
        return {
            key: Refused(row.unsupported, tuple(row.refuses) if row.refuses else None, tuple(row.passes), row.fix)
            for key, row in self.rows.items()
            if row.unsupported
        }

    @cached_property
    def accepted(self) -> dict[str, Accepted]:
        """The keys that change nothing."""
        return {key: Accepted(row.ignored, tuple(row.passes)) for key, row in self.rows.items() if row.ignored}


@cache
def table(system: str) -> Table:
    """Read the table of a system, `SYSTEM.yaml` beside this file."""
    text = Path(__file__).with_name(f"{system}.yaml").read_text(encoding="utf-8")
    found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["keys"]
    return Table({key: Row(target=row) if isinstance(row, str) else Row(**row) for key, row in found.items()})


@cache
def foreign_keys() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return each key of any system: what it is there, and "group.name" of the settings that it sets.

    It is for messages on a key that the system in use does not know.
    """
    from megatune.config.rl.pages import rl_keys  # builds hundreds of fields, for a suggestion

    of_roll = "a key of ROLL, whose files `megatune rl` runs"
    found: dict[str, tuple[str, tuple[str, ...]]] = {key.rpartition(".")[2]: (of_roll, ()) for key in rl_keys()}
    for system, what in (("swift", "a flag of Megatron-SWIFT"), ("llamafactory", "a key of LLaMA-Factory")):
        meanings = {key: row.meaning for key, row in table(system).rows.items()}
        found |= {key: (what, meaning.paths if meaning else ()) for key, meaning in meanings.items()}
    return found | {name: ("a key of LLaMA-Factory", (path,)) for name, path in setting_paths().items()}
