"""LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter), and our own beside them."""

from __future__ import annotations

from megatune.config.dialects.dialect import Dialect, Meaning
from megatune.config.dialects.table import table

_TABLE = table("llamafactory")
# Messages name a setting by its own name: it comes first.
_KEYS: dict[str, Meaning] = {path.partition(".")[2]: path for each in _TABLE.keys.values() for path in each.paths}

LLAMAFACTORY = Dialect(
    name="LLaMA-Factory", keys={**_KEYS, **_TABLE.keys}, not_built=_TABLE.refused, accepted=_TABLE.accepted
)
