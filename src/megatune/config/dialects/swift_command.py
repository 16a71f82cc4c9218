"""A Megatron-SWIFT command line while it is translated to settings: its flags, its defaults, and their meaning.

The syntax is that of argparse with typed fields, after an optional file of flags: bare booleans, lists until the next
flag, dashes as underscores, `--key=value`, unique prefixes of flags, `--no_X` for booleans that default to true, and a
YAML or JSON file whose ENV holds environment variables.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatune.config.dialects.checks import checks
from megatune.config.dialects.dialect import Row, table
from megatune.config.entry import SETTINGS_FILES, SettingEntry, read_file
from megatune.config.flags import match_flags, parse_words, split_flags
from megatune.config.settings import setting_paths
from megatune.config.values import Value, is_number, is_variable, shown, to_value
from megatune.errors import Finding, did_you_mean

COUNT = re.compile("[0-9]{1,9}")
# Attributes of Command that conditions of checks may use.
_ATTRIBUTES = ("version", "verb", "stage", "on_cpu", "has_shared_experts", "epochs")
# Keys of config.json with the number or width of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_EXPERTS = (
    "shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
)  # fmt: skip


@cache
def kinds() -> dict[str, type]:
    """Return the types of all known flags and of our names of settings."""
    own = {name: Row(target=path) for name, path in setting_paths().items()}
    return {name: row.type for name, row in {**own, **table("swift")}.items()}


@cache
def _flags_by_setting() -> dict[str, str]:
    """Map our names of settings to version 4's flag with the same meaning, if there is exactly one."""
    rows = {key: row for key, row in table("swift").items() if row.version != 3 and row.of != "stage"}
    setters = Counter(path for row in rows.values() for path in row.paths)
    alike = {
        row.target.partition(".")[2]: key
        for key, row in rows.items()
        if isinstance(row.target, str) and setters[row.target] == 1 and not (row.values or row.items or row.factor != 1)
    }
    return {name: key for name, key in alike.items() if name not in table("swift")}


@dataclass(slots=True)
class Command:
    """The flags of one command line.

    Attributes:
        verb: sft, pt or rlhf.
        config: the model's config.json; {} if it is unknown.
        env: environment variables.
        on_cpu: whether this machine has no GPU.
        typed: flags by their names as typed, in their order; the last of each flag counts.
        version: the version whose defaults are used: 3 (those of 3.4), 3.12 or 4.
        flags: typed flags by version 4's names, and settings derived from them, by our names.
        defaults: flags and settings that were not typed.
        whys: by the place of a flag: why it has another value or name.
        variables: environment variables that the command line sets.
        ignored: by the place of a flag: why it has no effect.
        changed: by the place of a flag: its value before `becomes` gave it another.
        rollouts: flags of grpo and gkd, which `swift_rl` reads.
        extra: further values for checks.
    """

    verb: str
    config: Mapping[str, Any]
    env: Mapping[str, str]
    on_cpu: bool
    typed: dict[str, SettingEntry] = field(default_factory=dict)
    version: float = 4
    flags: dict[str, SettingEntry] = field(default_factory=dict)
    defaults: dict[str, SettingEntry] = field(default_factory=dict)
    whys: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, SettingEntry] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def read(self, words: Sequence[str]) -> None:
        """Read the arguments after the verb.

        Raises:
            MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
        """
        rest, rows = list(words), table("swift")
        if rest and rest[0].endswith(SETTINGS_FILES):
            self._read_file(rest.pop(0))
        for flag in split_flags(rest, lambda key: kinds().get(key, bool) is not bool):
            key, values = _known(flag.key), flag.values
            if not flag.typed:
                fix = "write --flag VALUE; a file of flags is the first word, and ends in .yaml, .yml or .json"
                self.findings += [Finding(f"{word!r} is not a flag", fix=fix) for word in values]
            elif isinstance(key, Finding):
                self.findings.append(key)
            elif key not in kinds():  # --no_X
                self._type(SettingEntry(key.removeprefix("no_"), Value(False, "false"), f"--{key}", "flag"))
                if values:
                    self.findings.append(Finding(f"{key} takes no value", f"--{key}", fix=f"write --{key[3:]} VALUE"))
            elif (value := parse_words(values, kinds()[key])) is None:
                self.findings.append(Finding(f"{key} has no value", f"--{key}", fix=f"write --{key} VALUE"))
            else:
                self._type(SettingEntry(key, value, f"--{key}", "flag"))
        typed = [rows[key] for key in self.typed if key in rows]
        if any(row.version == 3 for row in typed):
            self.version = max(row.since or 3 for row in typed)
        names = {**_flags_by_setting(), **{key: row.renamed_to for key, row in rows.items() if row.renamed_to}}
        self.flags = {names.get(key, key): entry for key, entry in self.typed.items()}
        self.env = {**self.variables, **self.env}

    def _type(self, entry: SettingEntry) -> None:
        self.typed.pop(entry.key, None)  # the last one wins, and moves to the end
        self.typed[entry.key] = entry

    def _read_file(self, source: str) -> None:
        entries, findings = read_file(source)
        self.findings += findings
        for entry in entries:
            if entry.key == "ENV":
                self.variables = read_variables(entry, self.findings)
                continue
            key = _known(entry.key.replace("-", "_"), negates=False)
            if isinstance(key, Finding):
                self.findings.append(Finding(key.what, entry.where, key.why, key.fix))
            elif entry.value.data is not None:
                self._type(SettingEntry(key, _of_file(entry.value, kinds()[key]), entry.where, entry.where))

    @property
    def generation(self) -> int:
        """The major version, which decides the names of flags: 3 or 4."""
        return int(self.version)

    @property
    def machines(self) -> int:
        """The number of machines; 1 if NNODES is invalid, which is reported when the world size is resolved."""
        text = self.env.get("NNODES") or "1"
        return int(text) or 1 if COUNT.fullmatch(text) else 1

    @property
    def processes(self) -> int:
        """The number of processes on all machines; 0 if a launcher decides it."""
        return int(self.number("num_processes")) or int(self.number("NPROC_PER_NODE")) * self.machines

    @property
    def epochs(self) -> str:
        """The flag with the number of epochs."""
        return "max_epochs" if self.generation == 3 else "num_train_epochs"

    @property
    def default_origin(self) -> str:
        return f"Megatron-SWIFT {self.generation}'s default"

    @property
    def stage(self) -> str:
        """Our stage, or grpo or gkd, from the verb and rlhf_type."""
        if "rlhf_type" in self.rollouts:
            return str(self.rollouts["rlhf_type"].value.data)
        return str(self.value("rlhf_type", "dpo")) if self.verb == "rlhf" else self.verb

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The config of the language model in config.json."""
        text = self.config.get("text_config")
        return {**self.config, **text} if isinstance(text, dict) else self.config

    @property
    def has_experts(self) -> bool:
        return any(self.model_config.get(name) for name in _EXPERTS)

    @property
    def has_shared_experts(self) -> bool:
        return any(self.model_config.get(name) for name in _SHARED_EXPERTS)

    def given(self, name: str) -> bool:
        """Whether a flag was typed."""
        return name in self.flags

    def value(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of a flag, or its default."""
        entry = self.flags.get(name) or self.defaults.get(name)
        return otherwise if entry is None or entry.value.data is None else entry.value.data

    def number(self, name: str) -> float:
        """Return the number of a flag; 0 if it has none or is invalid, which is reported elsewhere."""
        value = self.value(name, 0)
        return value if is_number(value) and math.isfinite(value) else 0

    def becomes(self, name: str, data: Any, why: str = "") -> None:
        """Give a flag, or its default, another value."""
        for entries in (self.flags, self.defaults):
            if name in entries:
                entry = entries[name]
                self.changed.setdefault(entry.where, entry.value.data)
                entries[name] = SettingEntry(entry.key, to_value(data), entry.where, entry.origin)
                if why:
                    self.whys[entry.where] = why
                return

    def sets(self, name: str, key: str, data: Any, why: str = "") -> None:
        """Let a flag, or its default, also set one of our settings."""
        entries = self.flags if name in self.flags else self.defaults
        where = entries[name].where if name in entries else self.default_origin
        origin = entries[name].origin if name in entries else self.default_origin
        entries[key] = SettingEntry(key, to_value(data), where, origin)
        if why:
            self.whys[where] = why

    def default(self, key: str, data: Any, why: str = "") -> None:
        """Set the default of a flag or of one of our settings."""
        where = f"{self.default_origin} of {key}"
        self.defaults[key] = SettingEntry(key, to_value(data), where, self.default_origin)
        if why:
            self.whys[where] = why

    def ignore(self, name: str, why: str) -> None:
        """Drop a flag, or its default, that has no effect."""
        if (entry := self.flags.pop(name, None)) is not None:
            self.ignored[entry.where] = why
        self.defaults.pop(name, None)

    def check(self, kind: str, **extra: Any) -> None:
        """Apply a part of the table's checks of several flags.

        Args:
            kind: name of the part.
            extra: further values for conditions and texts.
        """
        self.extra |= extra
        for row in checks("swift", kind, self):
            if "what" in row:
                self.findings.append(Finding(row["what"], why=row["why"], fix=row["fix"]))
            named = row.get("flag", [])
            of_parts = [name for name, each in table("swift").items() if each.of in row.get("of", ())]
            for flag in [*([named] if isinstance(named, str) else named), *of_parts]:
                self._apply(flag, row)

    def __getitem__(self, key: str) -> Any:
        """Return a value for checks: an attribute, a flag, or with "given FLAG" whether it was written."""
        if key.startswith("given "):
            return self.given(key.removeprefix("given "))
        if key in _ATTRIBUTES:
            return getattr(self, key)
        return self.extra[key] if key in self.extra else self.value(key)

    def _apply(self, flag: str, row: Mapping[str, Any]) -> None:
        """Apply a check's action to a flag."""
        why = row.get("why", "")
        if "ignored" in row:
            self.ignore(flag, row["ignored"])
        elif "unsupported" in row:
            self.refuse(flag, row["unsupported"], row["fix"])
        elif "becomes" in row:
            self.becomes(flag, row["becomes"], why)
        elif "sets" in row:
            for key, value in row["sets"].items():
                self.sets(flag, key, value, why)
            self.flags.pop(flag, None)
        elif not self.given(flag):
            self.default(flag, row["default"], why)

    def refuse(self, name: str, why: str, fix: str) -> None:
        """Report a flag's value as unsupported, and drop the flag."""
        if (entry := self.flags.pop(name, None)) is not None:
            what = f"{entry.key}: {shown(entry.value.data)} is not supported"
            # A check names the flags of version 4.
            self.findings.append(Finding(what, entry.where, why, fix.replace(f"--{name}", f"--{entry.key}")))


def _known(name: str, *, negates: bool = True) -> str | Finding:
    """Return the flag that a name or prefix means, or a finding."""
    known = kinds()
    negated = [f"no_{each}" for each, row in table("swift").items() if row.negatable] if negates else []
    meant = match_flags(name, (*known, *negated))
    if len(meant) == 1:
        return meant[0]
    if meant:
        few = ", ".join(f"--{each}" for each in sorted(meant)[:4])
        return Finding(f"--{name} could be {few}" + (" or others" if len(meant) > 4 else ""), fix="write it out")
    otherwise = "remove it; docs/migrate-from-megatron-swift.md lists the supported flags"
    fix = did_you_mean(f"--{name.lower()}", (f"--{kind}" for kind in known), otherwise)
    return Finding(f"unknown flag --{name}", fix=fix)


def read_variables(entry: SettingEntry, findings: list[Finding]) -> dict[str, str]:
    """Return the environment variables in a file's ENV."""
    variables, fix = entry.value.data, "write a line for each variable below ENV:, `  NAME: value`"
    if not isinstance(variables, dict):
        findings.append(Finding("ENV is not a mapping", entry.where, fix=fix))
        return {}
    if wrong := [name for name in variables if not is_variable(name)]:
        findings.append(Finding(f"ENV: {wrong[0]!r} is not a valid name of a variable", entry.where, fix=fix))
        return {}
    return {name: shown(value).strip('"') for name, value in variables.items() if value is not None}


def _of_file(value: Value, kind: type) -> Value:
    """Convert a file's value to what the same text on a command line gives."""
    texts = [shown(item.data) if item.text is None else item.text for item in value.items]
    if kind is list:
        return parse_words(texts or [value.text or shown(value.data)], list) or value
    return value if value.text is None else parse_words([value.text], kind) or value
