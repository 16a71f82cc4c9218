"""Regular expressions that users and adapters' files write; matching them has a limit of time."""

from __future__ import annotations

import regex

from megatune.errors import ExitCode, Finding, MegatuneError

_SECONDS = 1.0  # of one match: of nested repetitions some backtrack for ages, and all others take microseconds


def is_whole_match(pattern: str, text: str) -> bool:
    """Return whether a regular expression, valid for Python's re, matches the whole text, as `re.fullmatch`.

    Raises:
        MegatuneError: SETTINGS, where that takes longer than a second.
    """
    try:
        return bool(regex.fullmatch(pattern, text, timeout=_SECONDS))
    except TimeoutError as error:
        what = f"the regular expression {pattern!r:.100} does not come to an end on {text!r:.60}"
        why = f"after {_SECONDS:g} s it was still trying: repetitions in repetitions have too many ways to match"
        finding = Finding(what, "", why, "write each repetition once, such as .* in place of (.*)*")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
