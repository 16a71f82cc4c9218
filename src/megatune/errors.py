"""Findings, errors and exit codes."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from megatune.references import Reference, Text, spell

# The line after a file name; text of a user may end in more digits, or in digits of another script.
_LINE = re.compile(r":([0-9]{1,9})\Z")
NO_LINE = 10**9
# Environment variables with secrets: HF_TOKEN, WANDB_API_KEY, MLFLOW_TRACKING_PASSWORD.
_SECRET = re.compile(r"(_|^)(KEY|APIKEY|TOKEN|PASSWORD|PASSWD|SECRET)S?(_|$)")
_LEAST_SECRET = 8  # characters; shorter values are switches or words
_CREDENTIALS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # https://user:password@host


class ExitCode(IntEnum):
    """Exit codes of every verb; `megatune --help` lists them."""

    DONE = 0
    DIFFERENT = 1  # `verify` found a difference
    SETTINGS = 64
    DATA = 65
    INPUT = 66  # an input is missing or invalid
    UNAVAILABLE = 69  # a service or a peer is missing
    INTERNAL = 70
    OUT_OF_MEMORY = 71
    CANNOT_WRITE = 73
    STOPPED = 75  # stopped on request; the run can be resumed
    PROCESS_DIED = 76  # a rank died or hung
    NOT_FINITE = 77  # numbers are not finite, or differ between ranks that must agree
    INTERRUPTED = 130  # Ctrl-C


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, in the four parts that a user needs to fix it; texts may have `references` to settings.

    Attributes:
        what: what is wrong, with the key, file or value.
        where: file and line ("run.yaml:7"), flag, or "" without a place.
        why: the reason, or "" if `what` is enough.
        fix: the change that fixes it.
    """

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        lines = [head, *(f"    {label}: {text}" for label, text in (("why", self.why), ("fix", self.fix)) if text)]
        return "\n".join(lines)

    def __post_init__(self) -> None:
        for name in ("what", "where", "why", "fix"):
            object.__setattr__(self, name, Text(getattr(self, name)))

    def spelled(self, say: Callable[[Reference], str] = str) -> Finding:
        """Return a copy whose references are replaced by what `say` returns for them, by default our own names."""
        return Finding(*(spell(text, say) for text in (self.what, self.where, self.why, self.fix)))


def line_of(where: str) -> int:
    """Return the line of a place, "run.yaml:7"; NO_LINE without a line, and more without a place."""
    found = _LINE.search(where)
    return int(found[1]) if found else NO_LINE if where else 2 * NO_LINE


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by the lines of their file, then those of a command line, then those without a place."""
    return sorted(findings, key=lambda finding: line_of(finding.where))


def nearest_names(word: str, names: Iterable[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the names most similar to a misspelt word, the best first."""
    return difflib.get_close_matches(word, list(names), n=count, cutoff=cutoff)


def names_with(word: str, names: Iterable[str]) -> list[str]:
    """Return the longer names with all parts of a name: num_train_epochs for epochs."""
    words = {*word.lstrip("-").replace("-", "_").split("_")}
    return [name for name in names if words < {*name.lstrip("-").split("_")}]


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name most similar to a misspelt word; None if none is similar."""
    return next(iter(nearest_names(word, names, 1, cutoff)), None)


def did_you_mean(word: str, names: Iterable[str], otherwise: str = "", count: int = 1, cutoff: float = 0.6) -> str:
    """Return the fix of a misspelt word: similar names, or `otherwise` if there are none."""
    near = nearest_names(word, names, count, cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


class MegatuneError(Exception):
    """An error that ends a command with a report and an exit code, without a traceback.

    Args:
        findings: all problems, not only the first; a string is one finding.
        exit_code: of the process.
    """

    def __init__(self, findings: str | Finding | Iterable[Finding], exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        if isinstance(findings, str):
            findings = [Finding(findings)]
        elif isinstance(findings, Finding):
            findings = [findings]
        self.findings: tuple[Finding, ...] = tuple(findings)
        self.exit_code = exit_code
        super().__init__("\n".join(map(str, self.findings)))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.findings, self.exit_code)


def without_secrets(text: str) -> str:
    """Remove secrets from a text: values of secret environment variables, the hub's stored token, and credentials in
    URLs."""
    for secret in _secrets():
        text = text.replace(secret, "***")
    return _CREDENTIALS.sub("://***@", text) if "@" in text else text


def _secrets() -> list[str]:
    """Return all secrets, longer ones first, as one may be a prefix of another."""
    found = {value.strip() for name, value in os.environ.items() if _SECRET.search(name)} | {_hub_token()}
    return sorted((value for value in found if len(value) >= _LEAST_SECRET), key=len, reverse=True)


@cache
def _hub_token() -> str:
    """Return the token that `hf auth login` stored; "" without one."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    try:
        with open(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))) as file:
            return file.read(1000).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def with_article(name: str) -> str:
    """Format a model type with its article: "a qwen3", "an internvl"."""
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"
