"""What one rank does for all: its answer, or its refusal, reaches every rank, so that none waits for it in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatune.engine import groups
from megatune.errors import MegatuneError

T = TypeVar("T")


def on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its answer everywhere. Collective.

    Raises:
        MegatuneError: on every rank, what `action` raised on rank 0.
    """
    answer: T | None = None
    refusal: MegatuneError | None = None
    if groups.rank() == 0:
        try:
            answer = action()
        except MegatuneError as error:
            refusal = error
    answer, refusal = groups.broadcast((answer, refusal))
    if refusal is not None:
        raise refusal
    return answer  # type: ignore[return-value]
