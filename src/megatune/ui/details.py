"""The files of one run as JSON values: settings, plan and measurements, checkpoints, logs, generated answers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.run.record import PLAN_NAME, read_rank_memory
from megatune.plan.run.trouble import diagnose
from megatune.plan.time.estimate import TIME_PARTS
from megatune.training.storage.manifest import added_files, problems_of, read_manifest
from megatune.training.storage.store import list_checkpoints
from megatune.ui.runs import GENERATIONS, RUN_YAML, read_json

_STEP = re.compile(rb'\{"step": ([0-9]+),')  # the start of lines in generations.jsonl
_LOG_BYTES = 1 << 17  # sent at once of a log
_MOST_SAMPLES = 200
_MOST_YAML = 1 << 22


def settings_of(folder: Path) -> list[dict[str, Any]]:
    """Return the settings of a run.yaml in its order: group, key, value as written, and origin.

    In reinforcement learning, settings of roles have dotted keys.

    Raises:
        MegatuneError: INPUT, if the file cannot be read.
    """
    path = folder / RUN_YAML
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_YAML)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from error
    lines, groups, group = text.splitlines(), list[str](), ""
    for line in lines:
        group = line[2:].strip() if line.startswith("# ") else group
        groups.append(group)
    return [
        {"group": groups[place], "key": key, "value": value, "origin": lines[place].partition("  # ")[2].strip()}
        for key, place, value in _scalars(node, "")
    ]


def _scalars(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int, str]]:
    """Yield dotted key, line and value of all entries of a mapping that are not mappings themselves."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{getattr(key, 'value', '?')}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _scalars(value, f"{name}.")
        elif isinstance(value, yaml.ScalarNode):
            yield name, key.start_mark.line, value.value
        else:
            yield name, key.start_mark.line, yaml.serialize(value).strip()


def plan_of(folder: Path) -> dict[str, Any]:
    """Return planned and measured memory by stage and part, and the time of a step by part.

    The plan is that for the actual rows once some are trained, and before that for the rows that the settings allow.
    """
    runs = read_json(folder / PLAN_NAME).get("runs") or [{}]
    last: dict[str, Any] = runs[-1] if isinstance(runs, list) and isinstance(runs[-1], dict) else {}
    measured = (last.get("record") or {}).get("measured") or {}
    memory, step = (
        last.get(name) or last.get("planned") or {} for name in ("planned_for_longest_row", "planned_for_mean_row")
    )
    try:
        said = diagnose(folder)
    except MegatuneError as error:
        said = [str(error)]
    ranks = read_rank_memory(folder / "launch")
    return {
        "memory_parts": list(MEMORY_PARTS),
        "stages": memory.get("memory_bytes", []),
        "counted": measured.get("counted", ""),
        "measured_stages": measured.get("stages", []),
        "ranks": [{"rank": each.rank, "stage": each.stage, "peak": each.peak} for each in ranks],
        "time_parts": list(TIME_PARTS),
        "step_seconds": step.get("step_seconds", {}),
        "uncertainty": step.get("uncertainty"),
        "measured_seconds": measured.get("step_seconds"),
        "said": said,
    }


def checkpoints_of(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, newest first, from their manifests only."""
    return [_checkpoint(path) for path in reversed(list_checkpoints(folder))]


def _checkpoint(path: Path) -> dict[str, Any]:
    entry = {"name": path.name, "changed": path.stat().st_mtime}
    try:
        manifest = read_manifest(path)
    except MegatuneError as error:
        return {**entry, "problem": str(error)}
    return {
        **entry,
        "step": manifest.step,
        "bytes": sum(file.size for file in manifest.files),
        "files": len(manifest.files),
        "resumable": manifest.resumable,
        "problem": "",
    }


def verify_checkpoint(folder: Path, name: str) -> list[str]:
    """Compare every file of a checkpoint with its manifest, and return the problems.

    Raises:
        KeyError: the run has no such checkpoint.
    """
    path = next((each for each in list_checkpoints(folder) if each.name == name), None)
    if path is None:
        raise KeyError(name)
    try:
        manifest = read_manifest(path)
    except MegatuneError as error:
        return [str(error)]
    return [*problems_of(path, manifest), *added_files(path, manifest)]


def logs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the logs of a run: their names, for `log_text`, and sizes in bytes."""
    paths = [*sorted((folder / "launch" / "logs").glob("*.log"), key=_by_number), *sorted(folder.glob("*.log"))]
    return [{"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size} for path in paths]


def _by_number(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition("-")
    return (name, int(number)) if number.isdigit() else (path.stem, -1)


def log_text(folder: Path, name: str, start: int | None = None) -> dict[str, Any]:
    """Return a part of a log: its end, or the content from byte `start` on.

    Raises:
        KeyError: the run has no such log.
    """
    if name not in {each["name"] for each in logs_of(folder)}:
        raise KeyError(name)
    with (folder / name).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - _LOG_BYTES)
        if start is not None and begin <= start <= size:
            begin = start
        data = os.pread(file.fileno(), size - begin, begin)
    return {"start": begin, "end": begin + len(data), "text": data.decode("utf-8", "replace")}


def samples_of(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Return the samples of one step, by default the last one, and all steps with samples: generated answers
    (generations.jsonl), or samples of reinforcement learning (rollout_dump_dir)."""
    lines = _answers(folder / GENERATIONS) or _dumped(folder)
    chosen = max(lines, default=None) if step not in lines else step
    samples = [] if chosen is None else [json.loads(line) for line in islice(lines[chosen](), _MOST_SAMPLES)]
    return {"steps": sorted(lines), "step": chosen, "samples": samples}


_Lines = Callable[[], Iterable[bytes]]


def _answers(path: Path) -> dict[int, _Lines]:
    """Return functions that read the answers of each step. Lines begin with their step, so few need a JSON parser."""
    found: dict[int, list[bytes]] = {}
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            if (head := _STEP.match(line)) and line.endswith(b"\n"):
                found.setdefault(int(head[1]), []).append(line)
    return {step: partial(iter, lines) for step, lines in found.items()}


def _dumped(folder: Path) -> dict[int, _Lines]:
    """Return functions that read the samples of each step of reinforcement learning."""
    settings = {each["key"]: each["value"] for each in settings_of(folder)}
    dumps = _dump_dir(folder, settings.get("rollout_dump_dir", ""))
    files = sorted(dumps.glob("step-*.jsonl")) if dumps else []
    return {number: partial(_lines, path) for path in files if (number := _by_number(path)[1]) >= 0}


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _dump_dir(folder: Path, written: str) -> Path | None:
    """Find the folder of rollout_dump_dir, which is relative to where the run was started, or was moved with it."""
    if written in ("", "null", "~"):
        return None
    path = Path(written)
    return next((each for each in (path, folder / path.name) if each.is_dir()), None)


def _unreadable(path: Path, error: Exception) -> MegatuneError:
    return MegatuneError(Finding("cannot be read", str(path), " ".join(str(error).split())), ExitCode.INPUT)
