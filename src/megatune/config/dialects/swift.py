"""Megatron-SWIFT's command lines, of versions 3 and 4, as settings: `megatron sft | pt | rlhf` there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatune.config.dialects import swift_meaning, swift_run_meaning
from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.swift_command import Command, by_current_name
from megatune.config.dialects.swift_syntax import read_command_line
from megatune.config.dialects.table import Row, table
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded, load_entries
from megatune.config.settings import setting_paths
from megatune.config.values import shown
from megatune.errors import Finding

_COUNT = re.compile("[0-9]{1,9}")


@cache
def dialect_of(generation: int) -> Dialect:
    """Return the dialect; its messages name flags as version 3 or 4 does."""
    rows = table("swift")
    names = sorted(rows, key=lambda name: (rows[name].version == 3) is (generation == 4))
    # What a command line may name as a file does has values that are refused, too: do_train.
    own = {name: row for name, row in table("llamafactory").items() if row.refuses and name in setting_paths()}
    known = {name: rows[name] for name in names if not rows[name].ignored}  # `read_swift` says what is
    return Dialect(name=f"Megatron-SWIFT {generation}", rows={**known, **own}, prefix="--", separator=" ")


@cache
def kinds() -> dict[str, type]:
    """Return every flag that is known, and our own names, with the type of its value."""
    own = {name: Row(target=path) for name, path in setting_paths().items()}
    return {name: row.type for name, row in {**own, **table("swift")}.items()}


@cache
def negatable() -> tuple[str, ...]:
    """Return the booleans that are true by themselves: `--no_X` turns them off."""
    return tuple(name for name, row in table("swift").items() if row.negatable)


@dataclass(frozen=True, slots=True)
class SwiftRun:
    """What a command line asks for.

    Attributes:
        command: what was made of its flags.
        typed: its flags, in their order.
    """

    loaded: Loaded
    command: Command
    typed: tuple[SettingEntry, ...]


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
    line = read_command_line(words, kinds(), negatable())
    typed = tuple(line.flags.values())
    rows = table("swift")
    generation = 3 if any(entry.key in rows and rows[entry.key].version == 3 for entry in typed) else 4
    flags = {by_current_name(entry.key): entry for entry in typed}
    env = {**line.variables, **env}
    command = Command(verb, generation, flags, config or {}, env, on_cpu)
    command.findings, command.variables = list(line.findings), dict(line.variables)
    for key, row in rows.items():
        if (value := row.default_in(generation)) is not ... and not row.kept:
            command.default(key, value)
    _set_processes(command)
    _check_kinds(command)
    for meaning in (*swift_meaning.MEANINGS, *swift_run_meaning.MEANINGS):
        meaning(command)
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
    loaded = load_entries(places, dialect_of(generation), command.findings)
    return SwiftRun(loaded, command, typed)


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
    """Find flags without a setting of their own whose value is of another type."""
    expected = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping in JSON"}
    for name, entry in list(command.flags.items()):
        row, value = table("swift").get(entry.key), entry.value.data
        kind = row.type if row is not None and row.kind and not row.paths and not row.ignored else None
        fits = isinstance(value, kind) if kind else True
        if kind is float:
            fits = isinstance(value, int | float)
        if not fits or (kind in (int, float) and isinstance(value, bool)):
            assert kind is not None
            what = f"{entry.key} is {entry.value.text or shown(value)!r}"
            command.findings.append(Finding(what, entry.where, f"expected {expected.get(kind, 'one word')}"))
            del command.flags[name]
