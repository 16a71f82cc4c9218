"""This machine, as it is now: processors, memory, disk and GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from megatune.launch.devices import nvidia_smi

_GPU = ("index", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")


def machine_of(root: Path) -> dict[str, Any]:
    """Return use of processors (percent), memory and the disk of `root` (bytes), and of GPUs (percent, MiB, °C, W)."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(root))
    return {
        "host": os.uname().nodename,
        "cpus": psutil.cpu_percent(percpu=True),
        "memory": {"used": memory.total - memory.available, "total": memory.total},
        "disk": {"used": disk.used, "total": disk.total},
        "gpus": list(_gpus()),
    }


def _gpus() -> list[dict[str, Any]]:
    table = nvidia_smi(f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits") or ""
    found = []
    for line in table.splitlines():
        index, name, *numbers = (cell.strip() for cell in line.split(","))
        values = dict(zip(("use", "used", "total", "heat", "power"), map(_number, numbers), strict=False))
        found.append({"index": index, "name": name, **values})
    return found


def _number(text: str) -> float | None:
    """Read a number; None of what a GPU does not report ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return None
