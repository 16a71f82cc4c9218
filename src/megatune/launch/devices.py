"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

NVIDIA_SMI_SECONDS = 30  # the first call after boot initialises the driver


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """The number of GPUs that a process here can use, CUDA_VISIBLE_DEVICES applied; 0 on a CPU machine."""
    installed = _count_installed_gpus()
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


def _count_installed_gpus() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return sum(1 for device in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
    return sum(1 for line in listing.splitlines() if line.startswith("GPU "))


def count_cpus() -> int:
    """The number of CPU cores this process may use: its affinity, and its container's quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def count_oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck in this container (cgroup v2); 0 where unknown."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found.group(1)) if found else 0
