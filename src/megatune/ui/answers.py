"""The queries of the page by name, both for the server and for reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from megatune.launch.devices import nvidia_smi
from megatune.ui import details
from megatune.ui.runs import METRICS, RUN_YAML, Runs
from megatune.ui.series import Series

_MOST_OPEN = 12  # runs whose metrics are kept in memory


class BadQuestionError(ValueError):
    """A query with an invalid or missing parameter."""


class Answers:
    """Answers queries about the runs below a folder.

    A query has a name and string parameters; an answer is a JSON value.
    """

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root)
        self._series = lru_cache(_MOST_OPEN)(Series)
        self._by_name: dict[str, Callable[[Path, Mapping[str, str]], Any]] = {
            "series": self._curves,
            "settings": lambda folder, asked: details.settings_of(folder),
            "plan": lambda folder, asked: details.plan_of(folder),
            "checkpoints": lambda folder, asked: details.checkpoints_of(folder),
            "logs": lambda folder, asked: details.logs_of(folder),
            "log": lambda folder, asked: details.log_text(folder, _text(asked, "name"), _number(asked, "start", None)),
            "samples": lambda folder, asked: details.samples_of(folder, _number(asked, "step", None)),
            "rows": _rows,
        }

    def answer(self, name: str, asked: Mapping[str, str]) -> Any:
        """Answer one query.

        Raises:
            KeyError: there is no such query, run, log or checkpoint.
            BadQuestionError: a parameter is missing or invalid.
            MegatuneError: files cannot be read, or settings do not match the data.
        """
        if name == "runs":
            return self.runs.changes(_number(asked, "since", 0) or 0)
        if name == "machine":
            return machine_of(self.runs.root)
        return self._by_name[name](self.runs.folder(_text(asked, "run")), asked)

    def _curves(self, folder: Path, asked: Mapping[str, str]) -> dict[str, Any]:
        numbers = (
            _number(asked, key, otherwise) for key, otherwise in (("first", 0), ("level", -1), ("generation", -1))
        )
        keys = [key for key in asked.get("keys", "").split(",") if key]
        series = self._series(folder / METRICS)
        series.read()
        return series.answer(keys, *(number or 0 for number in numbers))


def _rows(folder: Path, asked: Mapping[str, str]) -> dict[str, Any]:
    from megatune.config.load import load
    from megatune.config.rules import DATA_RULES
    from megatune.ui.rows import rows_of  # slow imports

    settings = load(str(folder / RUN_YAML)).require_valid(rules=DATA_RULES)
    first, count = _number(asked, "first", 1) or 1, _number(asked, "count", 3) or 3
    return rows_of(settings, max(1, first), max(1, count), evaluation=asked.get("eval") == "1")


def _text(asked: Mapping[str, str], key: str) -> str:
    if key not in asked:
        raise BadQuestionError(f"{key} is missing")
    return asked[key]


def _number(asked: Mapping[str, str], key: str, otherwise: int | None) -> int | None:
    if key not in asked:
        return otherwise
    try:
        return int(asked[key])
    except ValueError:
        raise BadQuestionError(f"{key}: expected a whole number, got {asked[key][:40]!r}") from None


_GPU = ("index", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")


def machine_of(root: Path) -> dict[str, Any]:
    """Return the use of CPUs (percent), memory and the disk of `root` (bytes), and GPUs (percent, MiB, °C, W)."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(root))
    return {
        "host": os.uname().nodename,
        "cpus": psutil.cpu_percent(percpu=True),
        "memory": {"used": memory.total - memory.available, "total": memory.total},
        "disk": {"used": disk.used, "total": disk.total},
        "gpus": list(_gpus()),
    }


def _gpus() -> list[dict[str, Any]]:
    table = nvidia_smi(f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits") or ""
    found = []
    for line in table.splitlines():
        index, name, *numbers = (cell.strip() for cell in line.split(","))
        values = dict(zip(("use", "used", "total", "heat", "power"), map(_gpu_number, numbers), strict=False))
        found.append({"index": index, "name": name, **values})
    return found


def _gpu_number(text: str) -> float | None:
    """Parse a number; None if the GPU does not report it ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return None
