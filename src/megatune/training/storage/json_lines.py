"""Files of JSON lines, read as they are after any end of the process that wrote them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; lines that are not whole are passed over, and a file that is not there has none."""
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


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line; a number that is not finite becomes null, as JSON has no other word for it."""
    not_finite = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({**record, **not_finite}, ensure_ascii=False, allow_nan=False) + "\n"
