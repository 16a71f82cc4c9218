"""Megatron-SWIFT's command lines, of versions 3 and 4, as settings: `megatron sft | pt | rlhf` there."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megatune.config.dialects.dialect import Dialect, Row, table
from megatune.config.dialects.swift_command import Command
from megatune.config.dialects.swift_meaning import MEANINGS, SAMPLED
from megatune.config.entry import Builder, Written
from megatune.config.load import Loaded, load_entries
from megatune.config.rules.rule import has_effect
from megatune.config.settings import Settings, is_default, setting_paths, setting_value
from megatune.config.values import is_number, shown
from megatune.errors import Finding

_COUNT = re.compile("[0-9]{1,9}")
_WIDEST = 44  # of the first column of lines
_SECRET = ("hub_token",)


@cache
def dialect_of(version: float) -> Dialect:
    """Return the dialect; its messages name flags and defaults as version 3, 3.12 or 4 does."""
    rows = table("swift")
    names = sorted(rows, key=lambda name: (rows[name].version == 3) is (version == 4))
    # What a command line may name as a file does has values that are refused, too: do_train.
    own = {name: row for name, row in table("llamafactory").items() if row.refuses and name in setting_paths()}
    known = {name: rows[name] for name in names if not rows[name].ignored}  # `read_swift` says what is
    known["loss_type"] = Row(target=["preference.pref_loss", "preference.kto_loss"])  # by the stage, for messages
    name = f"Megatron-SWIFT {int(version)}"
    return Dialect(name=name, rows={**known, **own}, prefix="--", separator=" ", version=version)


class SwiftRun(NamedTuple):
    """What a command line asks for, and what was made of its flags."""

    loaded: Loaded
    command: Command


def read_swift(
    verb: str,
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
    on_cpu: bool = False,
) -> SwiftRun:
    """Read a command line of Megatron-SWIFT.

    Args:
        verb: sft, pt or rlhf.
        words: behind the verb.
        config: the model's config.json, which decides what no flag says.
        env: NPROC_PER_NODE and its like, and bounds of pictures. It wins over ENV of the file of flags.

    Raises:
        MegatuneError: the file of flags is missing or unreadable (exit 66). Everything else is a finding of `loaded`.
    """
    rows, command = table("swift"), Command(verb, config or {}, env, on_cpu)
    command.read(words)
    for key, row in rows.items():
        if (value := row.default_in(command.version)) is not ... and not row.kept:
            command.default(key, value)
    _set_processes(command)
    _check_kinds(command)
    for meaning in MEANINGS:
        command.check(meaning) if isinstance(meaning, str) else meaning(command)
    if verb != "rlhf":
        command.default("stage", command.verb)
    for name, entry in list(command.flags.items()):
        known = rows.get(entry.key)
        if known is None or known.unsupported:
            continue
        if known.ignored:
            command.ignore(name, known.ignored)
        elif not known.paths:  # the functions above have read it
            command.flags.pop(name)
    places = (command.defaults.values(), command.flags.values())
    return SwiftRun(load_entries(places, dialect_of(command.version), command.findings), command)


def _set_processes(command: Command) -> None:
    """One process on each machine, or NPROC_PER_NODE; a launcher that started this process knows better."""
    env = command.env
    machines, each = env.get("NNODES") or "1", env.get("NPROC_PER_NODE") or "1"
    # Clusters set RANK and WORLD_SIZE for whole machines; only a launcher sets LOCAL_RANK.
    is_launched = all(env.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if is_launched or not (_COUNT.fullmatch(machines) and _COUNT.fullmatch(each)):
        return  # what is no number is found where the processes are decided
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    copy = math.prod(int(command.number(name)) or 1 for name in sizes)
    if not env.get("NPROC_PER_NODE") and int(machines) % copy:
        what = f"NPROC_PER_NODE is not set, and one process cannot hold what is spread over {copy}"
        why = "without it each machine has one process"
        fix = f"write NPROC_PER_NODE={max(copy // int(machines), 1)} before the command"
        command.findings.append(Finding(what, "environment", why, fix))
        return
    command.default("num_processes", int(machines) * int(each))
    if env.get("NPROC_PER_NODE"):
        said = f"NPROC_PER_NODE={each}"
        command.defaults["num_processes"] = replace(command.defaults["num_processes"], where=said, origin=said)


def _check_kinds(command: Command) -> None:
    """Find flags without a setting of their own whose value is of another type, or out of range."""
    found = Builder()
    for name, entry in list(command.flags.items()):
        row, value = table("swift").get(entry.key), entry.value.data
        if row is None or row.paths or row.ignored or not (row.kind or row.of in SAMPLED):
            continue
        kind = row.type
        if kind in (int, float):
            fits = is_number(value) and (kind is float or value % 1 == 0)
            fits = fits and all(getattr(operator, name)(value, limit) for name, limit in row.bounds.items())
        else:
            fits = isinstance(value, kind)
        if not fits:
            found.wrong(Written(entry, value, row.described_alone(entry.key), name))
            del command.flags[name]
    command.findings += found.findings


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
    old = [f"--{key}" for key in run.command.typed if key in rows and rows[key].version == 3]
    if not old:
        return "version 4", "its defaults: no flag is of version 3 alone"
    few = ", ".join(old[:3]) + (", ..." if len(old) > 3 else "")
    said = f"its defaults, those of {'3.4' if run.command.version == 3 else run.command.version}"
    return "version 3", f"{said}: {few} {'are' if len(old) > 1 else 'is'} not of version 4"


def _flags(run: SwiftRun, loaded: Loaded) -> Iterator[tuple[str, str]]:
    for entry in run.command.typed.values():
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
        others = [path for path in paths if _is_other(path, loaded.settings)]
        said, why = _said(loaded, others), run.command.whys.get(entry.where, "")
        if said and key != "stage":
            is_variable = "=" in entry.origin  # NPROC_PER_NODE=2
            left = entry.origin if is_variable else f"({key} {_words(entry.value.data)})"
            yield left, ", ".join(said) + (f" ({why})" if why else "")


def _is_other(path: str, settings: Settings) -> bool:
    """Tell whether a setting has another value than by itself, and takes effect."""
    return has_effect(settings, path) and not is_default(settings, path)


def _said(loaded: Loaded, paths: list[str]) -> list[str]:
    named = {path.partition(".")[2]: setting_value(loaded.settings, path) for path in paths}
    return [f"{name}: {'***' if name in _SECRET else _words(value)}" for name, value in named.items()]


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return shown(value)
