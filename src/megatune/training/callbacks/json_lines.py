"""A file of JSON lines that survives kill -9 and continues after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.training.storage import write_atomically


class JsonLines:
    """Appends records to `path`, each with the step it belongs to; every line is written out at once.

    Args:
        path: the file. Records of steps after `resume_step`, and a torn last line, are dropped from it.
        step_key: the key of a record that holds its step.
        resume_step: steps done before this process.
    """

    def __init__(self, path: Path, step_key: str, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [record for record in read_json_lines(path) if record.get(step_key, math.inf) <= resume_step]
            write_atomically(path, "".join(map(_line, kept)))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; a number that is not finite becomes null, as JSON has no other word for it."""
        self._file.write(_line(record))

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file; lines that are not whole are passed over, and a file that is not there has none."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
