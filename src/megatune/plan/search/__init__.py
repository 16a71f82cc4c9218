"""Which layouts a model can be trained in on a machine, the fastest that fits first."""

from megatune.plan.search.rank import SearchResult, equal_within, num_kinds, search
from megatune.plan.search.space import SearchRequest

__all__ = ["SearchRequest", "SearchResult", "equal_within", "num_kinds", "search"]
