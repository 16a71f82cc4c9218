"""GPUs, CPU cores and memory of this machine, found without importing torch."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_SECONDS = 30  # the first call after boot initialises the driver
OOM_SECONDS = 5.0  # maximum time from the kernel's decision to the end of the process
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Count the visible GPUs (CUDA_VISIBLE_DEVICES); 0 on a CPU machine."""
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
        # CUDA stops at the first invalid entry.
        if not (name := entry.strip()) or (name.lstrip("-").isdigit() and not 0 <= int(name) < installed):
            break
        count += 1
    return min(count, installed)


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, None if it is missing or fails."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine: the driver's name for it ("NVIDIA H100 80GB HBM3"), and its total memory in bytes."""

    name: str
    memory: int


def list_gpus(env: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """List the visible GPUs (CUDA_VISIBLE_DEVICES); () if nvidia-smi does not list them."""
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
        # As in CUDA, a UUID may be abbreviated, and the first invalid entry ends the list.
        named = [key for key in found if key == entry.strip() or (entry[:4] == "GPU-" and key.startswith(entry))]
        if not named:
            break
        chosen.append(found[named[0]])
    return tuple(chosen)


def compute_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of this machine's GPUs, (9, 0) for Hopper; None if unknown."""
    table = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or ""
    found = [tuple(map(int, line.split("."))) for line in table.split() if re.fullmatch(r"\d+\.\d+", line)]
    return min(((major, minor) for major, minor in found), default=None)


def free_memory() -> int:
    """Return the available host memory in bytes, within the limits of the machine and of all cgroups of this process
    (v1 and v2; reclaimable file cache counts as available)."""
    meminfo = (_PROC / "meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available, *_cgroup_available()]))


# Mount points and file names of cgroup v2 and v1: limit, usage, file cache in memory.stat, kills.
_GROUP_FILES = (
    ("", ("memory.max", "memory.current", "inactive_file", "memory.events")),
    ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")),
)


def _memory_groups() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders of this process's memory cgroups, with the names of their files."""
    for mount, names in _GROUP_FILES:
        root, own = _CGROUPS / mount, _cgroup_of(mount)
        # In a container, the root of the mount is often the process's group, whatever path the kernel reports.
        yield from ((folder, names) for folder in {root, *(root / part for part in (own, *own.parents))})


def _cgroup_available() -> Iterator[int]:
    """Yield the available memory of each memory cgroup that has a limit."""
    for folder, (limit, usage, cache, _) in _memory_groups():
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        yield most - used + int(stat.get(cache, 0))


def _cgroup_of(controller: str) -> Path:
    """Return this process's group below the mount of a controller; "" for cgroup v2."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or controllers == controller:
            return Path(path.lstrip("/"))
    return Path()


def count_cpus() -> int:
    """Return the number of CPU cores that this process may use, by its affinity and quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    match _text(Path("/sys/fs/cgroup/cpu.max")).split():
        case [quota, period] if quota != "max":
            return max(1, min(cores, int(quota) // int(period)))
    return cores


def count_oom_kills() -> int:
    """Sum the OOM kills in each memory cgroup of this process and on the machine. Only an increase is meaningful."""
    files = [folder / name for folder, names in _memory_groups() for name in names[-1:]]
    counts = (re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE) for file in [*files, _PROC / "vmstat"])
    return sum(int(found[1]) for found in counts if found)


class OomKills:
    """Detects recent kills by the kernel's OOM killer; a kill hours ago is not the cause of a rank's death now."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._before = self._latest = count_oom_kills()

    def update(self, now: float) -> None:
        """Forget kills older than OOM_SECONDS to twice as long."""
        if now - self._looked > OOM_SECONDS:
            self._looked, self._before, self._latest = now, self._latest, count_oom_kills()

    def happened(self) -> bool:
        """Return whether there were recent kills."""
        return count_oom_kills() > self._before


def _text(file: Path) -> str:
    """Read a kernel file, "" if it does not exist."""
    try:
        return file.read_text()
    except OSError:
        return ""
