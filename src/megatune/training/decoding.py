"""How many processes decode a rank's pictures ahead of its steps."""

from __future__ import annotations

import multiprocessing
import os
import shutil

from megatune.config.settings import Settings
from megatune.data.processes import usable_processes
from megatune.launch.context import RankContext

MOST = 4  # processes of a rank, unless dataloader_num_workers says otherwise
_SHARED_MEMORY = "/dev/shm"  # through which they hand over what they decode
_LEAST_SHARED = 2**30  # bytes for each rank; containers often have 64 MiB


def loader_workers(settings: Settings, context: RankContext, has_pictures: bool) -> tuple[int, str | None]:
    """Return the processes that build batches for a rank, and what to say of them where they are not as written."""
    written = settings.data.dataloader_num_workers
    if written:
        usable, why = usable_processes(written, context.local_world_size)
        note = f"dataloader_num_workers {written}: {usable} of each rank are started, as {why} a rank"
        return usable, note if usable < written else None
    # Python refuses daemonic processes children.
    if written is not None or not has_pictures or multiprocessing.current_process().daemon:
        return 0, None
    cores = len(os.sched_getaffinity(0)) // context.local_world_size
    workers = max(0, min(MOST, cores - 1))
    why = f"{cores} cores a rank"
    if (
        os.path.isdir(_SHARED_MEMORY)
        and shutil.disk_usage(_SHARED_MEMORY).free < _LEAST_SHARED * context.local_world_size
    ):
        workers, why = 0, f"{_SHARED_MEMORY} is small"
    processes = f"{workers} process{'es' * (workers > 1)} of each rank, ahead of the steps"
    where = processes if workers else "each rank itself, between its steps"
    return workers, f"images and videos are decoded by {where} ({why}; dataloader_num_workers)"
