"""The machine itself: cores, memory, limits of processes, shared memory."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatune.doctor.check import Check, Verdict
from megatune.launch.devices import count_cpus, free_memory
from megatune.plan.pages.words import size

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20  # a rank: gloo's and NCCL's buffers, batches of its data loader
_LEAST_FILES = 4096  # sockets and files: a rank has one to every other, and maps its shards
_LEAST_FREE = 2 * 2**30  # a rank: Python, torch and what reads the shards


def machine(ranks: int, workers: int) -> Iterator[Check]:
    """Check what `ranks` processes of this machine share, each with `workers` processes that load its data."""
    yield _cores(ranks, workers)
    yield _memory(ranks)
    yield _swap()
    yield _shared_memory(ranks)
    yield _files()
    yield _locked()


def _cores(ranks: int, workers: int) -> Check:
    cores, processes = count_cpus(), ranks * (1 + workers)
    found = f"{cores} cores, {ranks} ranks" + (f" with {workers} data workers each" if workers else "")
    if processes <= 2 * cores:
        return Check("machine", "cores", Verdict.PASS, found)
    why = f"{processes} processes on {cores} cores wait for each other; a container's quota counts, too"
    fix = "give the container more cores" if not workers else "fewer dataloader_num_workers, or more cores"
    return Check("machine", "cores", Verdict.WARN, found, why, fix)


def _memory(ranks: int) -> Check:
    free = free_memory()
    found = f"{size(free)} free, limits of containers included"
    if free >= ranks * _LEAST_FREE:
        return Check("machine", "main memory", Verdict.PASS, found)
    why = (
        f"{ranks} ranks need about {size(ranks * _LEAST_FREE)} to start; the kernel ends what takes more than there is"
    )
    return Check("machine", "main memory", Verdict.FAIL, found, why, "end what else uses it, or fewer processes")


def _swap() -> Check:
    swap = psutil.swap_memory()
    found = f"{size(swap.used)} of {size(swap.total)} in use"
    if swap.used < 2**30:
        return Check("machine", "swap", Verdict.PASS, found)
    why = "pages that a step needs may have to come from a disk"
    return Check(
        "machine", "swap", Verdict.WARN, found, why, "end what else uses memory; `swapoff -a` shows what is short"
    )


def _shared_memory(ranks: int) -> Check:
    if not _SHARED_MEMORY.is_dir():
        return Check(
            "machine", "/dev/shm", Verdict.FAIL, "missing", "ranks and data workers hand over memory there", "mount it"
        )
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= ranks * _LEAST_SHARED:
        return Check("machine", "/dev/shm", Verdict.PASS, f"{size(free)} free")
    why = f"{ranks} ranks with their data workers need {size(ranks * _LEAST_SHARED)}; containers get 64 MiB by default"
    return Check(
        "machine", "/dev/shm", Verdict.FAIL, f"{size(free)} free", why, "docker run --shm-size=16g, or --ipc=host"
    )


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    if most >= _LEAST_FILES:
        return Check("machine", "open files", Verdict.PASS, f"{soft} at most")
    raised = "ulimit -n 65536" if hard in (resource.RLIM_INFINITY,) or hard >= 65536 else f"ulimit -n {hard}"
    why = "sockets to all other ranks, shards and data files are open at the same time"
    return Check("machine", "open files", Verdict.WARN, f"{soft} at most", why, raised)


def _locked() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = any(Path("/sys/class/infiniband").glob("*"))
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{size(soft)} at most"
    if soft == resource.RLIM_INFINITY or not infiniband:
        return Check("machine", "locked memory", Verdict.PASS, found)
    why = "InfiniBand registers the memory that it sends from"
    return Check(
        "machine", "locked memory", Verdict.FAIL, found, why, "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    )
