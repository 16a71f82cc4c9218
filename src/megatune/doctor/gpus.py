"""GPUs as their driver tells of them: number, driver, errors, throttling, memory that others hold, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatune.doctor.check import Check, Verdict
from megatune.launch.devices import nvidia_smi

_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "compute_cap", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active", "mig.mode.current",
)  # fmt: skip
# Bits of clocks_throttle_reasons.active that slow a run (NVML's nvmlClocksThrottleReasons): software power cap is not
# among them, since a GPU under load is at its power limit.
_THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
_HELD_BY_OTHERS = 2 * 1024  # MiB: more than a context


@dataclass(frozen=True, slots=True)
class _Gpu:
    index: str
    name: str
    driver: str
    total: str
    used: str
    capability: str
    temperature: str
    errors: str
    throttle: str
    mig: str


def gpus(wanted: int, *, bf16: bool) -> Iterator[Check]:
    """Check this machine's GPUs.

    Args:
        wanted: processes of this machine, each of which needs one; 0 to compute on the CPU.
        bf16: whether the run computes in bfloat16.
    """
    table = nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    if table is None:
        yield Check("gpu", "GPUs", Verdict.SKIP, "nvidia-smi is not here, or fails: ranks compute on the CPU")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    found = [_Gpu(*row) for row in rows if len(row) == len(_FIELDS)]
    yield _number(found, wanted)
    for gpu in found:
        yield from _state(gpu)
    if bf16 and (
        old := [gpu.name for gpu in found if gpu.capability.replace(".", "").isdigit() and float(gpu.capability) < 8]
    ):
        why = "bfloat16 is emulated before compute capability 8.0"
        yield Check("gpu", "bf16", Verdict.WARN, old[0], why, "fp16: true")
    yield from _links()


def _number(found: list[_Gpu], wanted: int) -> Check:
    names = sorted({gpu.name for gpu in found})
    text = f"{len(found)} × {', '.join(names)}, driver {found[0].driver}" if found else "none"
    if len(found) < wanted:
        return Check(
            "gpu", "GPUs", Verdict.FAIL, text, f"{wanted} processes need one each", f"num_processes: {len(found)}"
        )
    if len(names) > 1:
        return Check(
            "gpu", "GPUs", Verdict.WARN, text, "a step takes as long as on the slowest", "CUDA_VISIBLE_DEVICES"
        )
    return Check("gpu", "GPUs", Verdict.PASS, text)


def _state(gpu: _Gpu) -> Iterator[Check]:
    name, checks = f"GPU {gpu.index}", []
    if gpu.errors.isdigit() and int(gpu.errors):
        why = "its memory returned wrong values since the driver was loaded"
        checks.append(
            (
                Verdict.FAIL,
                f"{gpu.errors} uncorrected ECC errors",
                why,
                "reset or drain it, and look at `nvidia-smi -q -d ECC`",
            )
        )
    if gpu.used.isdigit() and int(gpu.used) > _HELD_BY_OTHERS:
        why = "the run will have that much less"
        checks.append(
            (
                Verdict.WARN,
                f"{gpu.used} of {gpu.total} MiB are in use",
                why,
                "`nvidia-smi` names the processes: end them",
            )
        )
    reasons = [text for bit, text in _THROTTLED.items() if _bits(gpu.throttle) & bit]
    if reasons:
        why = "it computes at lower clocks, and all others wait for it"
        checks.append(
            (Verdict.WARN, f"{', '.join(reasons)} at {gpu.temperature} °C", why, "look at its cooling and power")
        )
    if gpu.mig == "Enabled":
        checks.append(
            (
                Verdict.WARN,
                "MIG is on",
                "a process sees a slice of it, and slices cannot communicate over NVLink",
                "nvidia-smi -mig 0",
            )
        )
    for verdict, found, why, fix in checks:
        yield Check("gpu", name, verdict, found, why, fix)
    if not checks:
        yield Check("gpu", name, Verdict.PASS, f"{gpu.used} of {gpu.total} MiB in use, {gpu.temperature} °C")


def _bits(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _links() -> Iterator[Check]:
    """How GPUs reach each other: NVLink (NV18), a switch of PCIe (PIX, PXB), or the processors (PHB, NODE, SYS)."""
    table = nvidia_smi("topo", "-m")
    kinds = re.findall(
        r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", "\n".join(re.findall(r"^GPU\d+.*$", table or "", re.MULTILINE))
    )
    if not kinds:
        return
    found = ", ".join(f"{kind} ({kinds.count(kind) // 2})" for kind in sorted(set(kinds)))
    if "SYS" in kinds or "NODE" in kinds:
        why = "pairs of GPUs communicate over the link between the CPUs, at a fraction of NVLink's rate"
        fix = "tensor_model_parallel_size within GPUs that NVLink joins, or 1"
        yield Check("gpu", "links", Verdict.WARN, found, why, fix)
    else:
        yield Check("gpu", "links", Verdict.PASS, found)
