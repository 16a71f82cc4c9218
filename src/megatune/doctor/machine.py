"""The machine itself: cores, memory, limits of processes, shared memory."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from megatune.doctor.check import Check, Verdict, check
from megatune.launch.devices import count_cpus, free_memory
from megatune.plan.pages.words import size

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20  # a rank: gloo's and NCCL's buffers, batches of its data loader
_LEAST_FILES = 4096  # sockets and files: a rank has one to every other, and maps its shards
_LEAST_FREE = 2 * 2**30  # a rank: Python, torch and what reads the shards
_check = partial(check, "machine")


def machine(ranks: int, workers: int) -> Iterator[Check]:
    """Check what `ranks` processes of this machine share, each with `workers` processes that load its data."""
    cores, processes = count_cpus(), ranks * (1 + workers)
    found = f"{cores} cores, {ranks} ranks" + (f" with {workers} data workers each" if workers else "")
    why = f"{processes} processes on {cores} cores wait for each other; a container's quota counts, too"
    fix = "fewer dataloader_num_workers, or more cores" if workers else "give the container more cores"
    yield _check("cores", found, processes <= 2 * cores, why, fix, Verdict.WARN)

    free, needed = free_memory(), ranks * _LEAST_FREE
    why = f"{ranks} ranks need about {size(needed)} to start; the kernel ends what takes more than there is"
    fix = "end what else uses it, or fewer processes"
    yield _check("main memory", f"{size(free)} free, limits of containers included", free >= needed, why, fix)

    swap = psutil.swap_memory()
    fix = "end what else uses memory; `swapoff -a` shows what is short"
    why = "pages that a step needs may have to come from a disk"
    found = f"{size(swap.used)} of {size(swap.total)} in use"
    yield _check("swap", found, swap.used < 2**30, why, fix, Verdict.WARN)

    yield _shared_memory(ranks)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    fix = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}"
    why = "sockets to all other ranks, shards and data files are open at the same time"
    yield _check("open files", f"{soft} at most", most >= _LEAST_FILES, why, fix, Verdict.WARN)

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    passes = unlimited or not any(Path("/sys/class/infiniband").glob("*"))
    why, fix = "InfiniBand registers the memory that it sends from", "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    yield _check("locked memory", "unlimited" if unlimited else f"{size(soft)} at most", passes, why, fix)


def _shared_memory(ranks: int) -> Check:
    if not _SHARED_MEMORY.is_dir():
        return _check("/dev/shm", "missing", False, "ranks and data workers hand over memory there", "mount it")
    free, needed = shutil.disk_usage(_SHARED_MEMORY).free, ranks * _LEAST_SHARED
    why = f"{ranks} ranks with their data workers need {size(needed)}; containers get 64 MiB by default"
    return _check("/dev/shm", f"{size(free)} free", free >= needed, why, "docker run --shm-size=16g, or --ipc=host")
