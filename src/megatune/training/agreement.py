"""What one rank does for all: its result, or its exception, reaches every rank, so that none waits for it in vain."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from megatune.engine import groups
from megatune.launch.failure import describe_failure, mark_relayed

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], *, is_long: bool = False) -> T:
    """Run `action` on rank 0 and return its result everywhere. Collective.

    Args:
        is_long: it may take longer than any collective operation may, such as deleting terabytes: the other ranks wait
            for it as long as the beat before this call allows.

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
            relayed = _relayed(raised)
    result, relayed = (groups.relay if is_long else groups.broadcast)((result, relayed))
    if error is not None:
        raise error
    if relayed is not None:
        raise mark_relayed(*relayed)
    return result  # type: ignore[return-value]


def post_outcome(key: str, token: str, outcome: object) -> None:
    """Leave what this rank's part came to, a result or an exception, for `posted_outcomes`.

    No collective operation, so a thread may do it beside training.

    Args:
        token: tells it from what was left under `key` before, which it replaces.
    """
    relayed = _relayed(outcome) if isinstance(outcome, Exception) else None
    note = pickle.dumps((token, None if relayed else outcome, relayed))
    groups.post(f"{key}/{groups.rank()}", base64.b64encode(note).decode())


class Outcome(NamedTuple):
    """What a rank's part came to."""

    value: Any
    error: tuple[Exception, int] | None

    def result(self) -> Any:
        """Return it, or raise what it ended with."""
        if self.error is not None:
            raise mark_relayed(*self.error)
        return self.value


def find_outcome(key: str, token: str, rank: int) -> Outcome | None:
    """Return what a rank left with `post_outcome` of this token; None while it has not."""
    note = groups.posted(f"{key}/{rank}")
    its_token, result, relayed = pickle.loads(base64.b64decode(note)) if note else (None, None, None)
    return Outcome(result, relayed) if its_token == token else None


def posted_outcomes(key: str, token: str, world_size: int) -> list[Any]:
    """Wait for every rank's `post_outcome` of this token, and return the results by rank.

    Raises:
        Exception: what one of them left, as `on_rank_0` raises it elsewhere.
    """
    found: dict[int, Any] = {}
    for pause in groups.pauses():
        for rank in [rank for rank in range(world_size) if rank not in found]:
            if (outcome := find_outcome(key, token, rank)) is not None:
                found[rank] = outcome.result()
        if len(found) == world_size:
            break
        time.sleep(pause)
    return [found[rank] for rank in range(world_size)]


def _relayed(error: Exception) -> tuple[Exception, int]:
    return _portable(error), describe_failure(error).exit_code


def _portable(error: Exception) -> Exception:
    """Return the error, or where it does not survive pickling one that does."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # whatever its class does when it is pickled
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
