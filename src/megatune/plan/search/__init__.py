"""Which layouts a model can be trained in on a machine, the fastest that fits first."""

from megatune.plan.search.candidate import (
    TIGHT,
    Refusal,
    SearchRequest,
    SearchResult,
    equal_within,
    is_tight,
    num_kinds,
    safe_bytes,
)
from megatune.plan.search.free import FREE, priced
from megatune.plan.search.rank import search

__all__ = [
    "FREE",
    "TIGHT",
    "Refusal",
    "SearchRequest",
    "SearchResult",
    "equal_within",
    "is_tight",
    "num_kinds",
    "priced",
    "safe_bytes",
    "search",
]
