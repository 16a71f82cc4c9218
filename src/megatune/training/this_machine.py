"""The machine that a command runs on, as the planner sees machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.derived import Gpu

if TYPE_CHECKING:
    from megatune.plan.machine import Machine


def this_machine(
    processes: int, num_gpus: int, calibration: str | Path | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Machine | None, str]:
    """Describe this machine, with the factors that were fitted to it; or return None and why it cannot be planned for.

    Args:
        processes: of the run, on this machine.
        num_gpus: that it shows (`launch.devices.count_gpus`), 0 to compute on the CPU.
        calibration: a file of `megatune plan --calibrate`; None takes the one of this device.

    Raises:
        MegatuneError: INPUT, where the calibration cannot be read.
    """
    from megatune.launch.devices import count_cpus, free_memory, list_gpus
    from megatune.plan.catalogue import cpu_machine, device_by_driver_name, find_machine
    from megatune.plan.catalogue.own import calibration_for

    if not num_gpus:
        # As `launch.processes` gives them to ranks.
        threads = env.get("OMP_NUM_THREADS", "").strip()
        each = int(threads) if threads.isdigit() and int(threads) else max(1, count_cpus() // processes)
        cores = min(count_cpus(), processes * each)
        machine = cpu_machine(free_memory(), cores, processes)
    else:
        gpus = list_gpus(env)
        known = [device for gpu in gpus if (device := device_by_driver_name(gpu.name)) is not None]
        if not gpus or len(known) < len(gpus):
            names = ", ".join(sorted({gpu.name for gpu in gpus})) or "what nvidia-smi does not tell of"
            return None, f"the catalogue does not have {names}: give its numbers to megatune plan (docs/devices.md)"
        smallest = min(range(len(gpus)), key=lambda index: gpus[index].memory)
        machine = find_machine(known[smallest].name, gpus_per_node=processes)
        memory = min(machine.device.memory, gpus[smallest].memory)
        machine = replace(machine, device=replace(machine.device, memory=memory))
    return replace(machine, calibration=calibration_for(machine.device.name, calibration)), ""


_BF16_SINCE = (8, 0)


def this_gpu(env: Mapping[str, str] = os.environ) -> Gpu:
    """Describe the GPUs of this machine by the first one."""
    from megatune.launch.devices import compute_capability, list_gpus
    from megatune.plan.catalogue import device_by_driver_name

    gpus = list_gpus(env)
    name = gpus[0].name if gpus else "this GPU"
    if (known := device_by_driver_name(name)) is not None:
        return replace(known.gpu, name=name)
    capability = compute_capability()
    return Gpu(name, None if capability is None else capability >= _BF16_SINCE)
