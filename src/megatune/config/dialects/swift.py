"""Translates command lines of Megatron-SWIFT 3 and 4 (`megatron sft | pt | rlhf`) to settings."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megatune.config.dialects.dialect import Dialect, Row, read_part, table
from megatune.config.dialects.swift_command import COUNT, Command
from megatune.config.dialects.swift_meaning import MEANINGS, SAMPLED
from megatune.config.entry import Builder, Written
from megatune.config.load import Loaded, load_entries
from megatune.config.rules.rule import has_effect
from megatune.config.settings import is_default, setting_paths, setting_value
from megatune.config.values import is_number, shown
from megatune.errors import Finding

_MAX_WIDTH = 44  # of the first column of lines
_SECRET = ("hub_token",)


@cache
def dialect_of(version: float, machines: int = 1) -> Dialect:
    """Return the dialect with the flags and defaults of version 3, 3.12 or 4.

    Args:
        machines: number of machines, each with NPROC_PER_NODE processes.
    """
    rows = table("swift")
    names = sorted(rows, key=lambda name: (rows[name].version == 3) is (version == 4))
    # Our names of settings keep the values that LLaMA-Factory's table refuses, for example of do_train.
    own = {name: row for name, row in table("llamafactory").items() if row.refuses and name in setting_paths()}
    known = {name: rows[name] for name in names if not rows[name].ignored}  # `read_swift` reports ignored flags
    known["loss_type"] = Row(target=["preference.pref_loss", "preference.kto_loss"])  # by the stage, for messages
    for name, row in read_part("swift", "environment").items():
        factor = machines if name == "NPROC_PER_NODE" else 1
        known[name] = Row(target=setting_paths()[row["key"]], variable=True, factor=factor)
    name = f"Megatron-SWIFT {int(version)}"
    return Dialect(name=name, rows={**known, **own}, prefix="--", separator=" ", version=version)


class SwiftRun(NamedTuple):
    """The settings of a command line, and its flags."""

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
        words: the arguments after the verb.
        config: the model's config.json, for what no flag sets.
        env: NPROC_PER_NODE and similar variables, and limits of image sizes. It wins over ENV in the file of flags.

    Raises:
        MegatuneError: the file of flags is missing or unreadable (exit 66). All else is a finding in `loaded`.
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
        elif not known.paths:  # MEANINGS have read it
            command.flags.pop(name)
    places = (command.defaults.values(), command.flags.values())
    return SwiftRun(load_entries(places, dialect_of(command.version, command.machines), command.findings), command)


def _set_processes(command: Command) -> None:
    """Default to one process per machine, or NPROC_PER_NODE, unless num_processes is given or a launcher started us."""
    env = command.env
    machines, each = command.machines, env.get("NPROC_PER_NODE") or "1"
    # Clusters set RANK and WORLD_SIZE for whole machines; only a launcher sets LOCAL_RANK.
    is_launched = all(env.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if is_launched or command.given("num_processes") or not COUNT.fullmatch(each):
        return  # an invalid number is reported when the world size is resolved
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    copy = math.prod(int(command.number(name)) or 1 for name in sizes)
    if not env.get("NPROC_PER_NODE") and machines % copy:
        what = f"NPROC_PER_NODE is not set, and the layout needs {copy} processes"
        why = "without it each machine has one process"
        fix = f"write NPROC_PER_NODE={math.lcm(copy, machines) // machines} before the command"
        command.findings.append(Finding(what, "environment", why, fix))
        return
    command.default("NPROC_PER_NODE", int(each))
    if env.get("NPROC_PER_NODE"):
        origin = f"NPROC_PER_NODE={each}"
        command.defaults["NPROC_PER_NODE"] = replace(command.defaults["NPROC_PER_NODE"], where=origin, origin=origin)


def _check_kinds(command: Command) -> None:
    """Report flags without a setting whose value has the wrong type or is out of range."""
    found = Builder()
    for name, entry in list(command.flags.items()):
        row, value = table("swift").get(entry.key), entry.value.data
        is_checked = row is not None and (command.stage in SAMPLED if row.of in SAMPLED else bool(row.kind))
        if row is None or row.paths or row.ignored or not is_checked:
            continue
        kind = row.type
        if kind in (int, float):
            fits = is_number(value) and (kind is float or value % 1 == 0)
            fits = fits and all(getattr(operator, name)(value, limit) for name, limit in row.bounds.items())
        else:
            fits = isinstance(value, kind)
        if not fits:
            found.wrong(Written(entry, value, row.describe_unmapped(entry.key), name))
            del command.flags[name]
    command.findings += found.findings


def ray_findings(run: SwiftRun) -> list[Finding]:
    """Return the findings on flags of ms-swift's Ray. Their file is not read, so other findings would be misleading."""
    rows = table("swift")
    places = {entry.where for key, entry in run.command.typed.items() if key in rows and rows[key].of == "ray"}
    return [finding for finding in run.loaded.findings if finding.where in places]


def swift_lines(run: SwiftRun, loaded: Loaded) -> list[str]:
    """Return a line for each flag with another name or value or no effect here, and for each default that differs.

    Args:
        loaded: the settings, for their world size.
    """
    rows = [_version(run), *_flags(run, loaded), *_defaults(run, loaded)]
    rows += [
        (f"({name})", run.command.whys[name]) for name in ("finetune", "add_version", "hub") if name in run.command.whys
    ]
    width = min(_MAX_WIDTH, max(len(left) for left, _ in rows))
    return [f"swift      {left:<{width}}  {right}" for left, right in rows]


def _version(run: SwiftRun) -> tuple[str, str]:
    rows = table("swift")
    old = [f"--{key}" for key in run.command.typed if key in rows and rows[key].version == 3]
    if not old:
        return "version 4", "its defaults are used: no flag belongs to version 3 only"
    few = ", ".join(old[:3]) + (", ..." if len(old) > 3 else "")
    version = "3.4" if run.command.version == 3 else run.command.version
    return "version 3", f"defaults of {version} are used: version 4 does not have {few}"


def _flags(run: SwiftRun, loaded: Loaded) -> Iterator[tuple[str, str]]:
    for entry in run.command.typed.values():
        left = f"--{entry.key} {'***' if entry.key in _SECRET else entry.value.text or _text(entry.value.data)}"
        why = run.command.whys.get(entry.where, "")
        if entry.where in run.command.ignored:
            yield left, f"ignored: {run.command.ignored[entry.where]}"
            continue
        named = _settings_text(loaded, [path for path, each in loaded.entries.items() if each.where == entry.where])
        if named == [f"{entry.key}: {_text(entry.value.data)}"] and not why:
            continue
        if not named and not why and (row := table("swift").get(entry.key)) is not None and row.unsupported:
            yield left, "ignored: it is always so"
        elif named or why:
            yield left, ", ".join(named) + (f" ({why})" if named and why else why)
        else:
            yield left, "ignored: another flag sets it"


def _defaults(run: SwiftRun, loaded: Loaded) -> Iterator[tuple[str, str]]:
    idle = read_part("swift", "grpo")["harmless"] if run.command.stage in SAMPLED else ()
    for key, entry in run.command.defaults.items():
        paths = [path for path, each in loaded.entries.items() if each is entry and path not in idle]
        settings = loaded.settings
        changed = [path for path in paths if has_effect(settings, path) and not is_default(settings, path)]
        named, why = _settings_text(loaded, changed), run.command.whys.get(entry.where, "")
        if named and key != "stage":
            is_variable = "=" in entry.origin  # NPROC_PER_NODE=2
            asked = run.command.changed.get(entry.where, entry.value.data)
            left = entry.origin if is_variable else f"({key} {_text(asked)})"
            yield left, ", ".join(named) + (f" ({why})" if why else "")


def _settings_text(loaded: Loaded, paths: list[str]) -> list[str]:
    named = {path.partition(".")[2]: setting_value(loaded.settings, path) for path in paths}
    return [f"{name}: {'***' if name in _SECRET else _text(value)}" for name, value in named.items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return shown(value)
