"""The keys of all dialects together, for messages on a key that one of them does not know."""

from __future__ import annotations

from functools import cache

from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.dialects.swift import dialect_of, kinds
from megatune.config.rl.pages import rl_keys


@cache
def foreign_keys() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return each key that some dialect knows: what it is there, and "group.name" of the settings that it sets."""
    of_rl = "a key of ROLL, whose files `megatune rl` runs"
    keys: dict[str, tuple[str, tuple[str, ...]]] = {dotted.rpartition(".")[2]: (of_rl, ()) for dotted in rl_keys()}
    keys |= {key: ("a flag of Megatron-SWIFT", _paths(dialect_of(4), key)) for key in kinds()}
    return keys | {key: ("a key of LLaMA-Factory", _paths(LLAMAFACTORY, key)) for key in LLAMAFACTORY.names}


def _paths(dialect: Dialect, key: str) -> tuple[str, ...]:
    meaning = dialect.meaning_of(key)
    return meaning.paths if meaning is not None else ()
