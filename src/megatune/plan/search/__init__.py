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
from megatune.plan.search.rank import search

__all__ = [
    "TIGHT",
    "Refusal",
    "SearchRequest",
    "SearchResult",
    "equal_within",
    "is_tight",
    "num_kinds",
    "safe_bytes",
    "search",
]
