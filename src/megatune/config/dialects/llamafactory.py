"""LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter), and our own beside them."""

from __future__ import annotations

from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.row import Row
from megatune.config.dialects.table import table

_ROWS = table("llamafactory")
# Messages name a setting by its own name: it comes first.
_OWN = {path.partition(".")[2]: Row(target=path) for row in _ROWS.values() for path in row.paths}

LLAMAFACTORY = Dialect(name="LLaMA-Factory", rows={**_OWN, **_ROWS})
