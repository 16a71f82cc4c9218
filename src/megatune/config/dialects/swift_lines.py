"""What is said of a Megatron-SWIFT command line before it runs: a line for each flag that is not simply a setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatune.config.dialects.swift import SwiftRun
from megatune.config.dialects.table import table
from megatune.config.load import Loaded
from megatune.config.settings import all_settings, setting_value
from megatune.config.values import shown

_WIDEST = 44  # of the first column
_SECRET = ("hub_token",)


def swift_lines(run: SwiftRun, loaded: Loaded) -> list[str]:
    """Say for each flag that has another name, value or no effect here what it is, and for each default.

    Args:
        loaded: the settings, in their world.
    """
    rows = [_version(run), *_flags(run, loaded), *_defaults(run, loaded)]
    rows += [
        (f"({name})", run.command.whys[name]) for name in ("finetune", "add_version", "hub") if name in run.command.whys
    ]
    width = min(_WIDEST, max(len(left) for left, _ in rows))
    return [f"swift      {left:<{width}}  {right}" for left, right in rows]


def _version(run: SwiftRun) -> tuple[str, str]:
    rows = table("swift")
    old = [f"--{entry.key}" for entry in run.typed if entry.key in rows and rows[entry.key].version == 3]
    if not old:
        return "version 4", "its defaults: no flag is of version 3 alone"
    few = ", ".join(old[:3]) + (", ..." if len(old) > 3 else "")
    return "version 3", f"its defaults, those of 3.4: {few} {'are' if len(old) > 1 else 'is'} not of version 4"


def _flags(run: SwiftRun, loaded: Loaded) -> Iterator[tuple[str, str]]:
    for entry in run.typed:
        left = f"--{entry.key} {'***' if entry.key in _SECRET else entry.value.text or _words(entry.value.data)}"
        why = run.command.whys.get(entry.where, "")
        if entry.where in run.command.ignored:
            yield left, f"ignored: {run.command.ignored[entry.where]}"
            continue
        said = _said(loaded, [path for path, each in loaded.entries.items() if each.where == entry.where])
        if said == [f"{entry.key}: {_words(entry.value.data)}"] and not why:
            continue
        if not said and not why and (row := table("swift").get(entry.key)) is not None and row.unsupported:
            yield left, "ignored: that is how it is"
        elif said or why:
            yield left, ", ".join(said) + (f" ({why})" if said and why else why)
        else:
            yield left, "ignored: another flag says it"


def _defaults(run: SwiftRun, loaded: Loaded) -> Iterator[tuple[str, str]]:
    for key, entry in run.command.defaults.items():
        paths = [path for path, each in loaded.entries.items() if each is entry]
        others = [path for path in paths if setting_value(loaded.settings, path) != all_settings()[path].default]
        said, why = _said(loaded, others), run.command.whys.get(entry.where, "")
        if said and key != "stage":
            is_variable = "=" in entry.origin  # NPROC_PER_NODE=2
            left = entry.origin if is_variable else f"({key} {_words(entry.value.data)})"
            yield left, ", ".join(said) + (f" ({why})" if why else "")


def _said(loaded: Loaded, paths: list[str]) -> list[str]:
    named = {path.partition(".")[2]: setting_value(loaded.settings, path) for path in paths}
    return [f"{name}: {'***' if name in _SECRET else _words(value)}" for name, value in named.items()]


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return shown(value)
