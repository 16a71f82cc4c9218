"""Settings as a user wrote them, with their places in a YAML file, and groups that are built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from megatune.config.setting import G, SettingInfo, validate_group
from megatune.config.values import TooLarge, Value, coerce, compose, nearest_valid, quoted, read_text, shown, value_of
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.dialects.dialect import Row

SETTINGS_FILES = (".yaml", ".yml", ".json")
RL_ROLES = ("actor_train", "student_train", "actor_infer")  # every reinforcement-learning file has one of them
_ROLL_KEYS = (*RL_ROLES, "defaults", "sft_train", "student_pretrain")  # with those of ROLL's other files
# A default that old versions wrote to run.yaml, where it did not mean LLaMA-Factory's template.
_OLD_TEMPLATE = re.compile(r"^template: default(?= +# default$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One key and its value.

    Attributes:
        where: its place in error messages: "run.yaml:7", "learning_rate=abc" or "--learning_rate".
        origin: its place in run.yaml: "run.yaml:7", "override" or "flag".
    """

    key: str
    value: Value
    where: str
    origin: str

    @property
    def is_given(self) -> bool:
        """Whether a user wrote it; otherwise it is a default of another system."""
        return self.origin in ("flag", "override", self.where)

    @property
    def name(self) -> str:
        """The key as the user wrote it: a flag may set a setting with another name."""
        return self.where[2:].replace("-", "_") if self.origin == "flag" else self.key

    def written(self, value: Any = ...) -> str:
        """Format the key as the user wrote it, with a value if given; a nested key as in a file."""
        is_nested = "." in self.where.partition("=")[0]
        prefix, joint = {"flag": ("--", " "), "override": ("", ": " if is_nested else "=")}.get(self.origin, ("", ": "))
        name = prefix + re.split(r"\.|: ", self.name)[-1]
        joint = "=" if name.isupper() else joint  # an environment variable
        if value is ...:
            return name
        words = value if isinstance(value, list) and self.origin == "flag" else [value]
        return f"{name}{joint}{' '.join(map(shown, words))}"


def read_file(source: str | Path) -> tuple[list[SettingEntry], list[Finding]]:
    """Read a YAML file; invalid YAML gives no entries and one finding, its first error.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    node, findings = read_mapping(Path(source), str(source))
    return ([], findings) if node is None else _mapping(node, str(source))


def read_mapping(path: Path, name: str) -> tuple[yaml.MappingNode | None, list[Finding]]:
    """Return the YAML mapping of a file; None if it is empty, and with a finding if it is not a mapping.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    try:
        text = read_text(path)
    except TooLarge as error:
        return None, [yaml_finding(error, name)]
    except FileNotFoundError:
        fix = "check the path; it is relative to the working directory"
        raise MegatuneError(Finding(f"there is no settings file {name}", fix=fix), ExitCode.INPUT) from None
    except IsADirectoryError:
        finding = Finding(f"{name} is a folder, not a settings file", fix="name the YAML file in it")
        raise MegatuneError(finding, ExitCode.INPUT) from None
    except UnicodeDecodeError as error:
        return None, [Finding(f"not UTF-8 text (byte {error.start})", name, fix="save the file as UTF-8")]
    except OSError as error:
        raise MegatuneError(Finding(f"cannot read {name}", why=error.strerror or ""), ExitCode.INPUT) from None
    try:
        node = compose(_OLD_TEMPLATE.sub("template: null", text))
    except yaml.YAMLError as error:
        return None, [yaml_finding(error, name)]
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return None, []
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "one value"
        where = f"{name}:{node.start_mark.line + 1}"
        return None, [Finding(f"the file contains {kind}, not settings", where, fix="write one `key: value` per line")]
    return node, []


def is_rl_file(source: str | Path) -> bool:
    """Return whether a YAML file is a reinforcement-learning file in ROLL's format: it has roles, or names a file that
    may have them. False if it cannot be read."""
    try:
        node = compose(read_text(Path(source)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []  # some may be lists
    return any(key in keys for key in _ROLL_KEYS)


def _mapping(node: yaml.MappingNode, name: str) -> tuple[list[SettingEntry], list[Finding]]:
    entries: dict[str, SettingEntry] = {}
    findings: list[Finding] = []
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            findings.append(Finding("a key must be text", where, fix="write `key: value`"))
            continue
        key = key_node.value
        if key in entries:
            what = f"{key} is written twice, first at {entries[key].where}"
            findings.append(Finding(what, where, fix="keep one of the two lines"))
            continue
        try:
            entries[key] = SettingEntry(key, value_of(value_node), where, where)
        except yaml.YAMLError as error:
            findings.append(yaml_finding(error, name))
    return list(entries.values()), findings


def yaml_finding(error: yaml.YAMLError, name: str) -> Finding:
    """Convert a parser error to a finding with its line and fix."""
    if isinstance(error, TooLarge):
        where = name if error.problem_mark is None else f"{name}:{error.problem_mark.line + 1}"
        return Finding(
            f"not a settings file: {error.problem}", where, fix="write only settings, a `key: value` per line"
        )
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        reason = getattr(error, "reason", None) or str(error)
        return Finding("not readable as YAML", name, why=str(reason), fix="remove the characters that are not text")
    mark = error.problem_mark
    where = f"{name}:{mark.line + 1}"
    problem = error.problem or "not readable as YAML"
    if "\\t" in problem:
        return Finding("a tab where YAML allows only spaces", where, fix="indent with spaces")
    if "expected a single document" in (error.context or ""):
        return Finding("a second document starts here", where, fix="remove the line `---`, or split the file")
    if "could not find expected ':'" in problem and error.context_mark is not None:
        where = f"{name}:{error.context_mark.line + 1}"
        fix = "write `key: value`, and put a space after the colon: `max_steps: 2`"
        return Finding("this line is not a key and its value", where, "no colon with a space after it was found", fix)
    why = f"{error.context}, {problem}" if error.context else problem
    fix = error.note or 'write one `key: value` per line; quote text with other signs than letters: key: "TEXT"'
    if "undefined alias" in problem:
        fix = "quote text that starts with *, or write its anchor, &NAME, in an earlier line"
    return Finding("not readable as YAML", where, why, fix)


class Written(NamedTuple):
    """The value of one field of a group, and the setting that it should fit; None for a value that is already valid."""

    entry: SettingEntry
    value: Any
    info: SettingInfo | None
    name: str  # in `Builder.refused`
    expected: str = ""  # if `info` does not describe it


@dataclass(slots=True)
class Builder:
    """Collects findings while groups are built.

    Attributes:
        ignored: reason -> keys without effect.
        refused: names of settings without a valid value, whose defaults should not be checked.
    """

    findings: list[Finding] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def add(self, finding: Finding, refused: str = "") -> None:
        """Add a finding once: a key may set several settings."""
        self.refused.add(refused)
        if finding not in self.findings:
            self.findings.append(finding)

    def passes(self, entry: SettingEntry, row: Row | None, value: Any, name: str) -> bool:
        """Return whether an entry may set something; record one that is refused or has no effect.

        Args:
            value: of the entry, converted by `coerce`.
        """
        if row is None:
            return True
        if row.is_refused(value):
            off = f", or write {entry.written(row.passes[0])}" if row.passes else ""
            said = shown(entry.value.data) if entry.value.text is None else entry.value.text
            said = "***" if entry.key.endswith(("_token", "_secret", "_key")) else said
            fix = f"remove {entry.written()}" + (f"; {row.fix}" if row.fix else off)
            if entry.key in re.split(r"\W+", row.fix) or row.fix.startswith("remove "):
                fix = row.fix  # to write it with another value, or another reason to remove it
            self.add(Finding(f"{entry.name}: {said} is not supported", entry.where, row.unsupported, fix), name)
            return False
        if row.ignored and not row.has_no_effect(value):
            self.ignored.setdefault(row.ignored, []).append(entry.key)
        return not row.ignored

    def group(self, model: type[G], written: Mapping[str, Written]) -> G:
        """Build a group from the valid values."""
        built, wrong = validate_group(model, {name: each.value for name, each in written.items()})
        for name, items in wrong.items():
            self.wrong(written[name], items)
        return built

    def wrong(self, written: Written, items: Sequence[Any] = ()) -> None:
        """Add a finding for an invalid value, or for the invalid items of a list, with a valid one as the fix."""
        entry, info = written.entry, written.info
        assert info is not None
        value, expected = coerce(entry.value, info), info.expected
        nearest = nearest_valid(value, info)
        if items and info.choices:
            near = [nearest_valid(item, info) if item in items else item for item in value]
            nearest = None if None in near else near
        if nearest is not None:
            fix = f"write {entry.written(nearest)}" + (", or null" if info.optional else "")
        elif info.default in (None, [], {}):
            fix = f"remove {entry.written()}, or give it {expected.removesuffix(', or null')}"
        else:
            fix = f"write {entry.written(info.default)}, the default"
        why = f"expected {written.expected or expected}"
        if items and len(value) > 1:
            why += f"; {', '.join(map(quoted, items))} {'does' if len(items) == 1 else 'do'} not fit"
        self.add(Finding(f"{entry.name} is {quoted(entry.value.data)}", entry.where, why, fix), written.name)
