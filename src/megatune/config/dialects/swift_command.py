"""A Megatron-SWIFT command line on its way to settings: its flags, its defaults, and what was made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatune.config.dialects.table import table
from megatune.config.entry import SettingEntry
from megatune.config.values import as_read, shown
from megatune.errors import Finding


@dataclass(slots=True)
class Command:
    """The flags of one command line, as far as they are read.

    Attributes:
        verb: sft, pt or rlhf.
        generation: whose names and defaults: 3 or 4.
        flags: what was typed, by version 4's name of it, and what follows from it, by our name.
        defaults: what is said by nobody.
        config: the model's config.json; {} where it is not known.
        env: environment variables.
        on_cpu: whether this machine has no GPU.
        whys: by the place of a flag: why it became what it became.
        variables: environment variables that the command line asks for.
        ignored: by the place of a flag: why it changes nothing.
        rollouts: flags of grpo, which `swift_rl` reads.
    """

    verb: str
    generation: int
    flags: dict[str, SettingEntry]
    config: Mapping[str, Any]
    env: Mapping[str, str]
    on_cpu: bool
    defaults: dict[str, SettingEntry] = field(default_factory=dict)
    whys: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, SettingEntry] = field(default_factory=dict)

    @property
    def default_origin(self) -> str:
        return f"Megatron-SWIFT {self.generation}'s default"

    @property
    def stage(self) -> str:
        """Our stage, or grpo, as far as the verb and rlhf_type say it."""
        if "rlhf_type" in self.rollouts:
            return "grpo"
        return str(self.value("rlhf_type", "dpo")) if self.verb == "rlhf" else self.verb

    @property
    def model_config(self) -> Mapping[str, Any]:
        """config.json's part of the language model."""
        text = self.config.get("text_config")
        return {**self.config, **text} if isinstance(text, dict) else self.config

    @property
    def has_experts(self) -> bool:
        return any(self.model_config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

    def given(self, name: str) -> bool:
        """Whether a flag was typed."""
        return name in self.flags

    def value(self, name: str, otherwise: Any = None) -> Any:
        """Return a flag's value as it was read, or its default."""
        entry = self.flags.get(name) or self.defaults.get(name)
        return otherwise if entry is None or entry.value.data is None else entry.value.data

    def number(self, name: str) -> float:
        """Return a flag's number, 0 where there is none: one that is wrong is found elsewhere."""
        value = self.value(name, 0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return value if is_number else 0

    def typed(self, name: str) -> str:
        """Return a flag as it was typed, by version 4's name of it."""
        return f"--{self.flags[name].key}" if name in self.flags else f"--{name}"

    def becomes(self, name: str, data: Any, why: str = "") -> None:
        """Give a flag, or its default, another value."""
        for entries in (self.flags, self.defaults):
            if name in entries:
                entry = entries[name]
                entries[name] = SettingEntry(entry.key, as_read(data), entry.where, entry.origin)
                if why:
                    self.whys[entry.where] = why
                return

    def sets(self, name: str, key: str, data: Any, why: str = "") -> None:
        """Let a flag, or its default, set one of our settings, beside what it sets itself."""
        entries = self.flags if name in self.flags else self.defaults
        where = entries[name].where if name in entries else self.default_origin
        origin = entries[name].origin if name in entries else self.default_origin
        entries[key] = SettingEntry(key, as_read(data), where, origin)
        if why:
            self.whys[where] = why

    def default(self, key: str, data: Any, why: str = "") -> None:
        """Say what a flag, or one of our settings, is where nobody says it."""
        where = f"{self.default_origin} of {key}"
        self.defaults[key] = SettingEntry(key, as_read(data), where, self.default_origin)
        if why:
            self.whys[where] = why

    def ignore(self, name: str, why: str) -> None:
        """Leave out a flag, or its default, that changes nothing."""
        if (entry := self.flags.pop(name, None)) is not None:
            self.ignored[entry.where] = why
        self.defaults.pop(name, None)

    def refuse(self, name: str, why: str, fix: str) -> None:
        """Refuse what a flag asks for."""
        if (entry := self.flags.pop(name, None)) is not None:
            what = f"{entry.key}: {shown(entry.value.data)} is not supported"
            self.findings.append(Finding(what, entry.where, why, fix))


def by_current_name(name: str) -> str:
    """Return version 4's name of a flag, where version 3 had another one that means the same."""
    row = table("swift").get(name)
    return row.now or name if row is not None else name
