"""Settings as a user wrote them, each with its place: those of a YAML file; `arguments` reads command lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from megatune.config.values import Value, compose, value_of
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One key and its value.

    Attributes:
        where: what an error message points at: "run.yaml:7", "learning_rate=abc" or "--learning_rate".
        origin: what run.yaml records: "run.yaml:7", "override" or "flag".
    """

    key: str
    value: Value
    where: str
    origin: str


def read_file(source: str | Path) -> tuple[list[SettingEntry], list[Finding]]:
    """Read a YAML file; one that is not YAML gives its first fault as the one finding, and no entries.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    name = str(source)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        fix = "check the path; it is taken from the folder that the command runs in"
        raise MegatuneError(Finding(f"there is no settings file {name}", fix=fix), ExitCode.INPUT) from None
    except IsADirectoryError:
        finding = Finding(f"{name} is a folder, not a settings file", fix="name the YAML file in it")
        raise MegatuneError(finding, ExitCode.INPUT) from None
    except UnicodeDecodeError as error:
        return [], [Finding(f"not UTF-8 text (byte {error.start})", name, fix="save the file as UTF-8")]
    except OSError as error:
        raise MegatuneError(Finding(f"cannot read {name}", why=error.strerror or ""), ExitCode.INPUT) from None
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        return [], [_yaml_finding(error, name)]
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return [], []
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "one value"
        where = f"{name}:{node.start_mark.line + 1}"
        return [], [Finding(f"the file holds {kind}, not settings", where, fix="write one `key: value` a line")]
    return _mapping(node, name)


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
            findings.append(_yaml_finding(error, name))
    return list(entries.values()), findings


def _yaml_finding(error: yaml.YAMLError, name: str) -> Finding:
    """Turn a parser's complaint into a finding with its line and what to change."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        reason = getattr(error, "reason", None) or str(error)
        return Finding("not readable as YAML", name, why=str(reason), fix="remove the characters that are not text")
    mark = error.problem_mark
    where = f"{name}:{mark.line + 1}"
    problem = error.problem or "not readable as YAML"
    if "\\t" in problem:
        return Finding("a tab where YAML takes only spaces", where, fix="indent with spaces")
    if "expected a single document" in (error.context or ""):
        return Finding("a second document starts here", where, fix="remove the line `---`, or split the file")
    why = f"{error.context}, {problem}" if error.context else problem
    return Finding(
        "not readable as YAML", where, why=why, fix="write one `key: value` a line; quote text that holds `: `"
    )
