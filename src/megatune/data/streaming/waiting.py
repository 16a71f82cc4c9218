"""Waiting for the producer, never without an end, and never for one that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from megatune.data.streaming.folder import BlockPlace, StreamFolder
from megatune.errors import ExitCode, Finding, MegatuneError

T = TypeVar("T")

_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5  # between looks at whether the producer lives


def wait_for(
    folder: StreamFolder,
    look: Callable[[], T | None],
    limit: float,
    wanted: str,
    meanwhile: Callable[[], None],
    *,
    patient: bool = False,
) -> T:
    """What `look` finds at last.

    Args:
        limit: seconds until the producer counts as too slow.
        wanted: what is waited for, in words.
        meanwhile: called now and then.
        patient: the limit is from one sign of progress to the next, not for all of it.

    Raises:
        MegatuneError: the producer failed (with its own exit code), died, or is too slow (76).
    """
    found = look()
    deadline = time.monotonic() + limit
    look_at = time.monotonic()
    doing = folder.doing()
    while found is None:
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK_SECONDS
            meanwhile()
            if patient and doing != (doing := folder.doing()):
                deadline = now + limit
            if not folder.is_alive():
                if (found := look()) is not None:
                    return found
                raise folder.failure() or died(folder, wanted)
        if now > deadline:
            why = f"{folder.doing()}; ddp_timeout is {limit:g} seconds"
            fix = "raise ddp_timeout, lower buffer_size, or give it more processes with preprocessing_num_workers"
            raise MegatuneError(
                Finding(f"{wanted} has not come from the process that reads the data", why=why, fix=fix),
                ExitCode.PROCESS_DIED,
            )
        time.sleep(_POLL_SECONDS)
        found = look()
    return found


def died(folder: StreamFolder, wanted: str, how: str = "died") -> MegatuneError:
    """The report of a producer that is gone without a word."""
    return MegatuneError(
        Finding(
            f"the process that reads the data {how}, and {wanted} is still to come",
            why=f"the last it said: {folder.doing()}",
            fix="if it was killed for its memory, lower preprocessing_num_workers; the same command goes on from the "
            "last checkpoint",
        ),
        ExitCode.PROCESS_DIED,
    )


def wait_for_row(folder: StreamFolder, row: int, limit: float, meanwhile: Callable[[], None]) -> BlockPlace:
    """The block that holds a row of the run; see `wait_for`."""

    def look() -> BlockPlace | None:
        blocks = folder.blocks()
        found = next((block for block in blocks if block.first_row <= row < block.end), None)
        folder.reach(found.number if found else blocks[-1].number + 1 if blocks else 0)
        return found

    return wait_for(folder, look, limit, "the next block of rows", meanwhile)
