"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_SECONDS = 30  # the first call after boot initialises the driver
OOM_SECONDS = 5.0  # from the kernel's decision to a process's end, at most
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs that a process here can use, CUDA_VISIBLE_DEVICES applied; 0 on a CPU machine."""
    listing = nvidia_smi("-L")
    if listing is None:
        installed = sum(1 for device in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
    else:
        installed = sum(line.startswith("GPU ") for line in listing.splitlines())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    count = 0
    for entry in visible.split(","):
        # CUDA stops at the first entry that names no device.
        if not (name := entry.strip()) or (name.lstrip("-").isdigit() and not 0 <= int(name) < installed):
            break
        count += 1
    return min(count, installed)


def nvidia_smi(*arguments: str) -> str | None:
    """Return what nvidia-smi prints, None where there is none or it fails."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine: the driver's name for it ("NVIDIA H100 80GB HBM3"), and all its memory in bytes."""

    name: str
    memory: int


def list_gpus(env: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """List the GPUs that a process here can use, CUDA_VISIBLE_DEVICES applied; () where nvidia-smi does not tell."""
    table = nvidia_smi("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
    found = {}
    for line in (table or "").splitlines():
        match [cell.strip() for cell in line.split(",")]:
            case [index, uuid, name, memory] if memory.isdigit():
                found[index] = found[uuid] = Gpu(name, int(memory) * 2**20)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpu for key, gpu in found.items() if key.isdigit())
    chosen = []
    for entry in visible.split(","):
        # As CUDA: a name may be cut short, and the first entry that names no device ends the list.
        named = [key for key in found if key == entry.strip() or (entry[:4] == "GPU-" and key.startswith(entry))]
        if not named:
            break
        chosen.append(found[named[0]])
    return tuple(chosen)


def compute_capability() -> tuple[int, int] | None:
    """Return the least that a GPU of this machine has, (9, 0) for Hopper; None where nvidia-smi does not tell."""
    table = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or ""
    found = [tuple(map(int, line.split("."))) for line in table.split() if re.fullmatch(r"\d+\.\d+", line)]
    return min(((major, minor) for major, minor in found), default=None)


def free_memory() -> int:
    """Return bytes of main memory that processes here can still take: what the machine has free, and what its
    container and each group above it leaves (cgroup v1 and v2; a file cache that can be given up counts as free)."""
    meminfo = (_PROC / "meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available, *_cgroup_rooms()]))


# Where cgroup v2 and v1 are mounted, and what their files are called: limit, usage, file cache in memory.stat, kills.
_GROUP_FILES = (
    ("", ("memory.max", "memory.current", "inactive_file", "memory.events")),
    ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")),
)


def _memory_groups() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders of the memory groups that this process may be in, with the names of their files."""
    for mount, names in _GROUP_FILES:
        root, own = _CGROUPS / mount, _cgroup_of(mount)
        # Inside a container the root of the mount is often its own group, whatever path the kernel says.
        yield from ((folder, names) for folder in {root, *(root / part for part in (own, *own.parents))})


def _cgroup_rooms() -> Iterator[int]:
    """Yield what each memory group of this process leaves, those that have a limit."""
    for folder, (limit, usage, cache, _) in _memory_groups():
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit: "max"
            continue
        yield most - used + int(stat.get(cache, 0))


def _cgroup_of(controller: str) -> Path:
    """This process's group below the mount of a controller; "" is that of cgroup v2."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or controllers == controller:
            return Path(path.lstrip("/"))
    return Path()


def count_cpus() -> int:
    """Return the number of CPU cores this process may use: its affinity, and its container's quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    match _text(Path("/sys/fs/cgroup/cpu.max")).split():
        case [quota, period] if quota != "max":
            return max(1, min(cores, int(quota) // int(period)))
    return cores


def count_oom_kills() -> int:
    """Count the out-of-memory killer's victims so far, as far as is known: in each memory group of this process
    (cgroup v1 and v2), and on the machine. A number that only grows, of no meaning by itself."""
    files = [folder / name for folder, names in _memory_groups() for name in names[-1:]]
    counts = (re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE) for file in [*files, _PROC / "vmstat"])
    return sum(int(found[1]) for found in counts if found)


class OomKills:
    """Whether the kernel's out-of-memory killer has struck lately: a kill of hours ago, or of another container of the
    machine, says nothing about a rank that dies now."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._before = self._latest = count_oom_kills()

    def update(self, now: float) -> None:
        """Forget what was OOM_SECONDS to twice as long ago."""
        if now - self._looked > OOM_SECONDS:
            self._looked, self._before, self._latest = now, self._latest, count_oom_kills()

    def happened(self) -> bool:
        """Return whether it has since."""
        return count_oom_kills() > self._before


def _text(file: Path) -> str:
    """Read a file of the kernel's, "" where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
