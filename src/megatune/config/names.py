"""Names of settings in messages.

A message names a setting between backticks, with a value where it has one: `max_steps`, `max_steps 5`, and
`max_steps: 5` where it is to be written so. Who prints the message replaces them, by our own names or a dialect's.
Between backticks, what is not a setting stays as it is: a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatune.config.settings import setting_paths
from megatune.errors import Finding

_QUOTED = re.compile(r"`([^`]*)`")
_NAMED = re.compile(r"(\w+)(?:(: | )(.*))?", re.DOTALL)


def replace_names(text: str, say: Callable[[str, str, str, str], str]) -> str:
    """Replace every named setting by what `say` returns for its name, what joins it and its value, its value, and the
    text before it."""

    def said(quoted: re.Match[str]) -> str:
        named = _NAMED.fullmatch(quoted[1])
        if named is None or named[1] not in setting_paths():
            return quoted[0]
        return say(named[1], named[2] or "", named[3] or "", text[: quoted.start()])

    return _QUOTED.sub(said, text)


def plain_finding(finding: Finding) -> Finding:
    """Write settings in a finding by our own names."""
    return Finding(plain(finding.what), finding.where, plain(finding.why), plain(finding.fix))


def plain(text: str) -> str:
    """Write settings by our own names."""
    return replace_names(text, lambda name, between, value, _: name + between + value)
