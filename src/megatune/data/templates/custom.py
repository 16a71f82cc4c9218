"""A template of the user's own, in a YAML file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from megatune.config.entry import SettingEntry, read_file
from megatune.data.templates.named import TEXTS, NamedTemplate
from megatune.data.templates.tools import TOOL_FORMATS
from megatune.errors import ExitCode, Finding, MegatuneError

_SUFFIXES = (".yaml", ".yml")
_KEYS = ("name", "user", "assistant", "system", "observation", "observation_separator", "prefix", "default_system",
         "tools", "thinks", "special_tokens")  # fmt: skip
_WITH_CONTENT = ("user", "assistant", "system", "observation")
_REQUIRED = {  # with an example of each
    "user": '"<|im_start|>user\\n{content}<|im_end|>\\n<|im_start|>assistant\\n"',
    "assistant": '"{content}<|im_end|>\\n"',
    "system": '"<|im_start|>system\\n{content}<|im_end|>\\n"',
}
# {name}, or {{name}} as LLaMA-Factory writes it; in {"content": {content}} the outer braces are text.
_PLACEHOLDER = re.compile(r"\{\{[A-Za-z_]+\}\}|\{[A-Za-z_]+\}")


def is_template_file(name: str) -> bool:
    """Tell whether a value of `template` is a path, not a name."""
    return name.endswith(_SUFFIXES)


def read_template(path: str) -> NamedTemplate:
    """Read the template in a YAML file; the path is taken from the working directory.

    Raises:
        MegatuneError: every fault of the file at once (exit code 64), or there is no such file (exit code 66).
    """
    if not Path(path).is_file():
        fix = "check the path; it is taken from the folder that the command runs in"
        raise MegatuneError(Finding(f"template: there is no file {path}", fix=fix), ExitCode.INPUT)
    entries, findings = read_file(path)
    fields: dict[str, Any] = {"name": Path(path).stem}
    for entry in entries:
        value = _field(entry, findings)
        if value is not None:
            fields["tool_format" if entry.key == "tools" else entry.key] = value
    given = {entry.key for entry in entries}
    if entries or not findings:
        missing = {key: example for key, example in _REQUIRED.items() if key not in given}
        findings += [Finding(f"{key} is missing", path, fix=f"for example {key}: {missing[key]}") for key in missing]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    written = "".join(fields.get(key, "") for key in TEXTS)
    own = tuple(token for token in ("{bos}", "{eos}") if token in written)
    fields["special_tokens"] = tuple(dict.fromkeys((*own, *fields.get("special_tokens", ()))))
    return NamedTemplate(**fields)


def _field(entry: SettingEntry, findings: list[Finding]) -> Any:
    """Return the value of one key, None where it is wrong; what is wrong is added to `findings`."""
    key, value = entry.key, entry.value
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
        fix = f"nearest: {near[0]}" if near else f"one of {', '.join(_KEYS)}"
        findings.append(Finding(f"{key} is no key of a template", entry.where, fix=fix))
        return None
    found = len(findings)
    result: Any = value.text
    if key == "special_tokens":
        result = tuple(item.text for item in value.items)
        if not isinstance(value.data, list) or not all(result):
            findings.append(Finding("special_tokens must be a list of texts", entry.where, fix='write ["<token>"]'))
    elif key == "thinks":
        result = value.data
        if not isinstance(result, bool):
            findings.append(Finding("thinks must be true or false", entry.where))
    elif value.text is None:
        findings.append(Finding(f"{key} must be text", entry.where, fix='write it in quotes: "..."'))
    elif key == "tools":
        result = TOOL_FORMATS.get(value.text)
        if result is None:
            fix = f"one of {', '.join(TOOL_FORMATS)}"
            findings.append(Finding(f"tools: {value.text!r} is no tool format", entry.where, fix=fix))
    else:
        findings += _faults(key, value.text, entry.where)
    return result if len(findings) == found else None


def _faults(key: str, text: str, where: str) -> list[Finding]:
    """Find what is wrong with a text to write."""
    if key in ("name", "default_system"):
        return []
    allowed = (*(("{content}",) if key in _WITH_CONTENT else ()), "{bos}", "{eos}")
    unknown = [match for match in _PLACEHOLDER.findall(text) if match not in allowed]
    if unknown:
        fix = f"write {' or '.join(allowed)}"
        return [Finding(f"{key}: {placeholder} stands for nothing", where, fix=fix) for placeholder in unknown]
    number = text.count("{content}")
    if key in _WITH_CONTENT and number != 1:
        times = "has no {content}" if number == 0 else "has {content} more than once"
        return [Finding(f"{key} {times}", where, "the message goes in its place", "write {content} once")]
    if key == "assistant" and not text.partition("{content}")[2].strip():
        fix = "write {eos} or a special token after {content}"
        return [Finding("assistant: nothing ends the answer", where, "the model would not learn to stop", fix)]
    return []
