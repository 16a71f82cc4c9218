"""The tables of texts of this folder: YAML files of entries, which may lend each other what one does not give."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the entries of NAME.yaml as they are written."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return entries


def entry_of(table: str, name: str, *, in_3: bool = False) -> dict[str, Any]:
    """Return an entry with what it takes from the one that it is `like`; lists are tuples.

    Args:
        in_3: with what ms-swift 3 writes otherwise.
    """
    own = dict(read_table(table)[name])
    like, changed = own.pop("like", None), own.pop("in_3", {})
    lent = {} if like is None else entry_of(table, like, in_3=in_3)
    own |= changed if in_3 else {}
    return lent | {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
