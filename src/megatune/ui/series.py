"""Curves of a run: read metrics.jsonl incrementally, and downsample it for a screen."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

MOST_POINTS = 1500  # points of a curve; each bucket has at most two
_MOST_NOTICES = 100
_BOOKKEEPING = {"step", "total_steps", "epoch", "num_steps", "elapsed_seconds", "eta_seconds"}
_NUMBERS = (int, float)
_CHUNK = 1 << 22


class Series:
    """The metrics of one run by name, with the indices of their records.

    Attributes:
        generation: counts how often the file was replaced, which a resumed run does, and which makes sent data invalid.
        steps, times: for every record the step, and the seconds of training so far, over all restarts of the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self.generation = -1
        self._inode = 0
        self._reset()

    def _reset(self) -> None:
        self.generation += 1
        self._offset, self._before, self._elapsed = 0, 0.0, 0.0
        self.steps, self.times = array("d"), array("d")
        self.places: dict[str, array[int]] = {}
        self.values: dict[str, array[float]] = {}
        self.notices: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the records added since the last call."""
        with self._lock:
            try:
                with self._path.open("rb", buffering=0) as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != self._inode or found.st_size < self._offset:
                        self._inode = found.st_ino
                        self._reset()
                    file.seek(self._offset)
                    self._take_all(file)
            except OSError:
                return

    def _take_all(self, file: Any) -> None:
        rest = b""
        while data := file.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("step"), (int, float)):
                    self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        elapsed = record.get("elapsed_seconds")
        if isinstance(elapsed, (int, float)):
            if elapsed < self._elapsed:  # the run was restarted, and its clock begins at zero
                self._before += self._elapsed
            self._elapsed = elapsed
        if "notice" in record:
            self.notices = [*self.notices[1 - _MOST_NOTICES :], {"step": record["step"], "text": record["notice"]}]
            return
        place = len(self.steps)
        self.steps.append(record["step"])
        self.times.append(self._before + self._elapsed)
        for key, value in record.items():
            if type(value) in _NUMBERS and key not in _BOOKKEEPING and value - value == 0:  # it is finite
                if key not in self.values:
                    self.places[key], self.values[key] = array("q"), array("d")
                self.places[key].append(place)
                self.values[key].append(value)

    def answer(self, keys: Iterable[str], first: int = 0, level: int = -1, generation: int = -1) -> dict[str, Any]:
        """Return curves, or the points added to them.

        A bucket has 2^level records, and contributes its lowest and highest value to a curve. The level grows with the
        run, so that curves have at most MOST_POINTS points; all points are sent again only if it changes.

        Args:
            first: the number of records in the last answer.
            level, generation: those of the last answer; -1 for the first one.

        Returns:
            `from`: the record from which points replace those of earlier answers; `curves`: for each key columns of
            records, steps, seconds and values.
        """
        with self._lock:
            return self._answer(keys, first, level, generation)

    def _answer(self, keys: Iterable[str], first: int, level: int, generation: int) -> dict[str, Any]:
        count = len(self.steps)
        own = max(0, math.ceil(math.log2(max(1, count) / (MOST_POINTS / 2))))
        is_next = (own, self.generation) == (level, generation) and 0 < first <= count
        start = (max(0, first - 1) >> own) << own if is_next else 0
        return {
            "generation": self.generation,
            "level": own,
            "count": count,
            "from": start,
            "names": sorted(self.values),
            "notices": self.notices,
            "curves": {key: self._thinned(key, start, own) for key in keys if key in self.values},
        }

    def _thinned(self, key: str, start: int, level: int) -> list[list[float]]:
        places, values = np.array(self.places[key]), np.array(self.values[key])
        first = int(np.searchsorted(places, start))
        chosen = first + _extremes(values[first:], places[first:] >> level)
        records = places[chosen]
        columns = (records, np.array(self.steps)[records], np.array(self.times)[records].round(3), values[chosen])
        return [column.tolist() for column in columns]


def _extremes(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the indices of the first lowest and the first highest value of each bucket: int64, ascending.

    Args:
        parts: int64, the bucket of each value, ascending.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.diff(parts, prepend=parts[0] - 1))
    sizes = np.diff(starts, append=len(values))
    found = []
    for extreme in (np.minimum, np.maximum):
        at = np.flatnonzero(values == np.repeat(extreme.reduceat(values, starts), sizes))
        found.append(at[np.unique(parts[at], return_index=True)[1]])
    return np.unique(np.concatenate(found))
