"""The flags of a verb, beside the settings that its command line may hold."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatune.errors import Finding

if TYPE_CHECKING:
    from megatune.config.dialects.dialect import Dialect
    from megatune.config.entry import Arguments


def add_flag(parser: Any, name: str, *others: str, **kwargs: Any) -> argparse.Action:
    """Declare a flag in both spellings, with underscores and dashes."""
    spellings = [f"--{each}" for name in (name, *others) for each in dict.fromkeys((name, name.replace("_", "-")))]
    action: argparse.Action = parser.add_argument(*spellings, **kwargs)
    return action


def split_words(
    words: list[str], add_options: Callable[[argparse.ArgumentParser], None], dialect: Dialect
) -> tuple[argparse.Namespace, Arguments, list[Finding]]:
    """Return a verb's own flags, the settings among the words, and flags that are neither and like one of the verb's.

    Args:
        add_options: declares the verb's flags.
        dialect: knows the keys of settings.
    """
    from megatune.config.entry import split_arguments

    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(options)
    own = sorted(set(re.findall(r"--[a-z][\w-]*", options.format_help())))
    known, rest = options.parse_known_args(words)
    arguments = split_arguments(rest, dialect)
    flags: list[str] = []
    wrong: list[Finding] = []
    passed_over = False  # the words of a wrong flag go with it
    for word in arguments.flags:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, [*own, *(f"--{key}" for key in dialect.names)], n=1)
            passed_over = not dialect.knows(flag[2:].replace("-", "_")) and bool(near) and near[0] in own
            if passed_over:
                wrong.append(Finding(f"{flag!r} is not known here", fix=f"did you mean {near[0]}?"))
        flags += [] if passed_over else [word]
    return known, replace(arguments, flags=flags), wrong
