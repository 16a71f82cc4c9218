"""A Megatron-SWIFT command line on its way to settings: its flags, its defaults, and what was made of them.

It is written as for argparse of typed fields, after a file of flags if there is one: bare booleans, lists until the
next flag, dashes as underscores, `--key=value`, prefixes that mean one flag alone, `--no_X` of booleans that are true
by themselves, and a YAML or JSON file whose ENV holds environment variables.
"""

from __future__ import annotations

import math
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

# Attributes that conditions of checks name.
_FACTS = ("version", "verb", "stage", "on_cpu", "has_shared_experts", "epochs")
# Keys of config.json that count them, or say how wide they are.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_EXPERTS = (
    "shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
)  # fmt: skip


@cache
def kinds() -> dict[str, type]:
    """Return every flag that is known, and our own names, with the type of its value."""
    own = {name: Row(target=path) for name, path in setting_paths().items()}
    return {name: row.type for name, row in {**own, **table("swift")}.items()}


@cache
def _flags_by_setting() -> dict[str, str]:
    """Return the flag of version 4 that means the same as one of our names, where there is one such flag."""
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
    """The flags of one command line, as far as they are read.

    Attributes:
        verb: sft, pt or rlhf.
        config: the model's config.json; {} where it is not known.
        env: environment variables.
        on_cpu: whether this machine has no GPU.
        typed: the last of each flag, by its name as it was typed, in the order of writing.
        version: whose defaults: 3 (those of 3.4), 3.12 or 4.
        flags: what was typed, by version 4's name of it, and what follows from it, by our name.
        defaults: what is said by nobody.
        whys: by the place of a flag: why it became what it became.
        variables: environment variables that the command line asks for.
        ignored: by the place of a flag: why it changes nothing.
        rollouts: flags of grpo and gkd, which `swift_rl` reads.
        facts: what checks name beside flags.
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
    findings: list[Finding] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, SettingEntry] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def read(self, words: Sequence[str]) -> None:
        """Read the words behind the verb.

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
                self.findings.append(Finding(f"{key} is given no value", f"--{key}", fix=f"write --{key} VALUE"))
            else:
                self._type(SettingEntry(key, value, f"--{key}", "flag"))
        typed = [rows[key] for key in self.typed if key in rows]
        if any(row.version == 3 for row in typed):
            self.version = max(row.since or 3 for row in typed)
        names = {**_flags_by_setting(), **{key: row.now for key, row in rows.items() if row.now}}
        self.flags = {names.get(key, key): entry for key, entry in self.typed.items()}
        self.env = {**self.variables, **self.env}

    def _type(self, entry: SettingEntry) -> None:
        self.typed.pop(entry.key, None)  # the last one wins, and is the last in order
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
        """Whose names of flags: 3 or 4."""
        return int(self.version)

    @property
    def epochs(self) -> str:
        """The flag that says how many epochs are trained."""
        return "max_epochs" if self.generation == 3 else "num_train_epochs"

    @property
    def default_origin(self) -> str:
        return f"Megatron-SWIFT {self.generation}'s default"

    @property
    def stage(self) -> str:
        """Our stage, or grpo or gkd, as far as the verb and rlhf_type say it."""
        if "rlhf_type" in self.rollouts:
            return str(self.rollouts["rlhf_type"].value.data)
        return str(self.value("rlhf_type", "dpo")) if self.verb == "rlhf" else self.verb

    @property
    def model_config(self) -> Mapping[str, Any]:
        """config.json's part of the language model."""
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
        """Return a flag's value as it was read, or its default."""
        entry = self.flags.get(name) or self.defaults.get(name)
        return otherwise if entry is None or entry.value.data is None else entry.value.data

    def number(self, name: str) -> float:
        """Return a flag's number, 0 where there is none: one that is wrong is found elsewhere."""
        value = self.value(name, 0)
        return value if is_number(value) and math.isfinite(value) else 0

    def becomes(self, name: str, data: Any, why: str = "") -> None:
        """Give a flag, or its default, another value."""
        for entries in (self.flags, self.defaults):
            if name in entries:
                entry = entries[name]
                entries[name] = SettingEntry(entry.key, to_value(data), entry.where, entry.origin)
                if why:
                    self.whys[entry.where] = why
                return

    def sets(self, name: str, key: str, data: Any, why: str = "") -> None:
        """Let a flag, or its default, set one of our settings, beside what it sets itself."""
        entries = self.flags if name in self.flags else self.defaults
        where = entries[name].where if name in entries else self.default_origin
        origin = entries[name].origin if name in entries else self.default_origin
        entries[key] = SettingEntry(key, to_value(data), where, origin)
        if why:
            self.whys[where] = why

    def default(self, key: str, data: Any, why: str = "") -> None:
        """Say what a flag, or one of our settings, is where nobody says it."""
        where = f"{self.default_origin} of {key}"
        self.defaults[key] = SettingEntry(key, to_value(data), where, self.default_origin)
        if why:
            self.whys[where] = why

    def ignore(self, name: str, why: str) -> None:
        """Leave out a flag, or its default, that changes nothing."""
        if (entry := self.flags.pop(name, None)) is not None:
            self.ignored[entry.where] = why
        self.defaults.pop(name, None)

    def check(self, kind: str, **facts: Any) -> None:
        """Answer what the table says of flags together.

        Args:
            kind: the part of it.
            facts: what conditions and texts name beside flags.
        """
        self.facts |= facts
        for row in checks("swift", kind, self):
            if "what" in row:
                self.findings.append(Finding(row["what"], why=row["why"], fix=row["fix"]))
            named = row.get("flag", [])
            of_parts = [name for name, each in table("swift").items() if each.of in row.get("of", ())]
            for flag in [*([named] if isinstance(named, str) else named), *of_parts]:
                self._answer(flag, row)

    def __getitem__(self, key: str) -> Any:
        """Return what a check asks about: a fact, a flag, or with "given " before it whether it was written."""
        if key.startswith("given "):
            return self.given(key.removeprefix("given "))
        if key in _FACTS:
            return getattr(self, key)
        return self.facts[key] if key in self.facts else self.value(key)

    def _answer(self, flag: str, row: Mapping[str, Any]) -> None:
        """Do to a flag what a row of the table says."""
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
        """Refuse what a flag asks for."""
        if (entry := self.flags.pop(name, None)) is not None:
            what = f"{entry.key}: {shown(entry.value.data)} is not supported"
            self.findings.append(Finding(what, entry.where, why, fix))


def _known(name: str, *, negates: bool = True) -> str | Finding:
    """Return the flag that a name means, or what is wrong with it."""
    known = kinds()
    negated = [f"no_{each}" for each, row in table("swift").items() if row.negatable] if negates else []
    meant = match_flags(name, (*known, *negated))
    if len(meant) == 1:
        return meant[0]
    if meant:
        few = ", ".join(f"--{each}" for each in sorted(meant)[:4])
        return Finding(f"--{name} could be {few}" + (" or others" if len(meant) > 4 else ""), fix="write it out")
    otherwise = "remove it; docs/migrate-from-megatron-swift.md says what is read"
    fix = did_you_mean(f"--{name.lower()}", (f"--{kind}" for kind in known), otherwise)
    return Finding(f"unknown flag --{name}", fix=fix)


def read_variables(entry: SettingEntry, findings: list[Finding]) -> dict[str, str]:
    """Return the environment variables that a file's ENV says."""
    said, fix = entry.value.data, "write a line for each variable below ENV:, `  NAME: value`"
    if not isinstance(said, dict):
        findings.append(Finding("ENV is not a mapping", entry.where, fix=fix))
        return {}
    if wrong := [name for name in said if not is_variable(name)]:
        findings.append(Finding(f"ENV: {wrong[0]!r} is not a valid name of a variable", entry.where, fix=fix))
        return {}
    return {name: shown(value).strip('"') for name, value in said.items() if value is not None}


def _of_file(value: Value, kind: type) -> Value:
    """Make of a file's value what the same words on a command line are."""
    texts = [shown(item.data) if item.text is None else item.text for item in value.items]
    if kind is list:
        return parse_words(texts or [value.text or shown(value.data)], list) or value
    return value if value.text is None else parse_words([value.text], kind) or value
