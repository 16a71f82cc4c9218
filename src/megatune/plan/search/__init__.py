"""Which layouts a model can be trained in on a machine, the fastest that fits first."""

from megatune.plan.search.rank import search
from megatune.plan.search.request import Refusal, Request, SearchResult, is_tight

__all__ = ["Refusal", "Request", "SearchResult", "is_tight", "search"]
