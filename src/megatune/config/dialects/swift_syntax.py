"""How Megatron-SWIFT's command line is written: argparse of typed fields, after a file of flags if there is one.

Bare booleans, lists until the next flag, dashes as underscores, `--key=value`, prefixes that mean one flag alone,
`--no_X` of booleans that are true by themselves, and a YAML or JSON file whose ENV holds environment variables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatune.config.entry import SettingEntry, read_file
from megatune.config.values import TRUTH, Value, is_variable, parse, shown
from megatune.errors import Finding, did_you_mean

_FILES = (".yaml", ".yml", ".json")


@dataclass(slots=True)
class CommandLine:
    """What was typed.

    Attributes:
        flags: the last of each, in the order of writing.
        variables: of the file's ENV.
        unread: words before the first flag that are no file.
    """

    flags: dict[str, SettingEntry] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_command_line(words: Sequence[str], kinds: Mapping[str, type], negatable: Collection[str]) -> CommandLine:
    """Read a command line.

    Args:
        kinds: every flag that is known -> bool, int, float, str, list or dict.
        negatable: booleans that are true by themselves, which `--no_X` turns off.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    line = CommandLine()
    rest = list(words)
    if rest and rest[0].endswith(_FILES):
        _read_flags_file(rest.pop(0), kinds, line)
    for flag, values in _grouped(rest, line.findings):
        name, equals, text = flag.removeprefix("--").partition("=")
        values = [text, *values] if equals else values
        key = _known(name.replace("-", "_"), kinds, negatable)
        if isinstance(key, Finding):
            line.findings.append(key)
        elif key not in kinds:  # --no_X
            _set(line, SettingEntry(key.removeprefix("no_"), Value(False, "false"), f"--{key}", "flag"))
            if values:
                line.findings.append(Finding(f"{key} takes no value", f"--{key}", fix=f"write --{key[3:]} VALUE"))
        elif (value := _value(values, kinds[key])) is None:
            line.findings.append(Finding(f"{key} is given no value", f"--{key}", fix=f"write --{key} VALUE"))
        else:
            _set(line, SettingEntry(key, value, f"--{key}", "flag"))
    return line


def _set(line: CommandLine, entry: SettingEntry) -> None:
    line.flags.pop(entry.key, None)  # the last one wins, and is the last in order
    line.flags[entry.key] = entry


def _grouped(words: Sequence[str], findings: list[Finding]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words behind it."""
    flag, values = "", []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            if not flag:
                fix = "write --flag VALUE; a file of flags is the first word, and ends in .yaml, .yml or .json"
                findings.append(Finding(f"{word!r} is not a flag", fix=fix))
            continue
        if flag:
            yield flag, values
        flag, values = word, []
    if flag:
        yield flag, values


def _known(name: str, kinds: Mapping[str, type], negatable: Collection[str]) -> str | Finding:
    """Return the flag that a name means, or what is wrong with it."""
    negated = [f"no_{each}" for each in negatable]
    if name in kinds or name in negated:
        return name
    meant = sorted({each for each in (*kinds, *negated) if name and each.startswith(name)})
    if len(meant) == 1:
        return meant[0]
    if meant:
        few = ", ".join(f"--{each}" for each in meant[:4])
        return Finding(f"--{name} could be {few}" + (" or others" if len(meant) > 4 else ""), fix="write it out")
    otherwise = "remove it; docs/migrate-from-megatron-swift.md says what is read"
    fix = did_you_mean(f"--{name.lower()}", (f"--{kind}" for kind in kinds), otherwise)
    return Finding(f"unknown flag --{name}", fix=fix)


def _value(words: Sequence[str], kind: type) -> Value | None:
    """Make the value of a flag from its words; None where there should be one."""
    if kind is list:
        items = tuple(Value(word, word) for word in words)
        return Value([item.data for item in items], items=items) if items else None
    if not words:
        return Value(True, "true") if kind is bool else None
    if len(words) > 1:  # one too many: what the setting expects is said where it is read
        return Value(list(words), items=tuple(map(parse, words)))
    return typed(words[0], kind)


def typed(text: str, kind: type) -> Value:
    """Read a word as its flag's type, as far as it is one."""
    if kind is bool and text.lower() in TRUTH:
        truth = TRUTH[text.lower()]
        return Value(truth, shown(truth))
    return Value(text, text) if kind is str else parse(text)


def _read_flags_file(source: str, kinds: Mapping[str, type], line: CommandLine) -> None:
    entries, findings = read_file(source)
    line.findings += findings
    for entry in entries:
        if entry.key == "ENV":
            line.variables = read_variables(entry, line.findings)
            continue
        key = _known(entry.key.replace("-", "_"), kinds, ())
        if isinstance(key, Finding):
            line.findings.append(Finding(key.what, entry.where, key.why, key.fix))
        elif entry.value.data is not None:
            _set(line, SettingEntry(key, _of_file(entry.value, kinds[key]), entry.where, entry.where))


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
        return _value(texts or [value.text or shown(value.data)], list) or value
    return value if value.text is None else typed(value.text, kind)
