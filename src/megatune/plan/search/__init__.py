"""Which layouts a model can be trained in on a machine, the fastest that fits first."""

from megatune.plan.search.rank import search
from megatune.plan.search.request import TIGHT, Refusal, SearchRequest, SearchResult, is_tight

__all__ = ["TIGHT", "Refusal", "SearchRequest", "SearchResult", "is_tight", "search"]
