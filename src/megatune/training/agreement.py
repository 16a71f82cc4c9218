"""What one rank does for all: its result, or its exception, reaches every rank, so that none waits for it in vain."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

from megatune.engine import groups
from megatune.launch.failure import describe_failure, mark_relayed

T = TypeVar("T")


def on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result everywhere. Collective.

    Raises:
        Exception: on every rank, what `action` raised on rank 0: the same type and text where it can be pickled, a
            RuntimeError that names both where it cannot. The launcher reports it as rank 0's.
    """
    result: T | None = None
    error: Exception | None = None
    relayed: tuple[Exception, int] | None = None
    if groups.rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
            relayed = _portable(raised), describe_failure(raised).exit_code
    result, relayed = groups.broadcast((result, relayed))
    if error is not None:
        raise error
    if relayed is not None:
        raise mark_relayed(*relayed)
    return result  # type: ignore[return-value]


def _portable(error: Exception) -> Exception:
    """Return the error, or where it does not survive pickling one that does."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # whatever its class does when it is pickled
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
