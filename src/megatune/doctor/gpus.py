"""GPUs as their driver reports them: number, driver, errors, throttling, memory that others hold, links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from megatune.config.kernels import c_compiler
from megatune.doctor.check import Check, Verdict, check
from megatune.launch.devices import nvidia_smi

_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "compute_cap", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active", "mig.mode.current",
)  # fmt: skip
# Bits of clocks_throttle_reasons.active that slow a run (NVML's nvmlClocksThrottleReasons): software power cap is not
# among them, since a GPU under load is at its power limit.
_THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
_HELD_BY_OTHERS = 2 * 1024  # MiB: more than a context
_check = partial(check, "gpu")


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
    found = [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]
    names = sorted({gpu["name"] for gpu in found})
    text = f"{len(found)} × {', '.join(names)}, driver {found[0]['driver_version']}" if found else "none"
    if len(found) < wanted:
        yield _check("GPUs", text, False, f"{wanted} processes need one each", f"num_processes: {len(found)}")
    else:
        why = "a step takes as long as on the slowest"
        yield _check("GPUs", text, len(names) < 2, why, "CUDA_VISIBLE_DEVICES", Verdict.WARN)
    for gpu in found:
        yield from _state(gpu)
    why = "Triton, which compiles the fused operators, needs one: without it they run operator by operator, slower"
    compiler = c_compiler()
    found_compiler = compiler or "neither gcc nor clang is here"
    yield _check("C compiler", found_compiler, compiler is not None, why, "apt-get install gcc", Verdict.WARN)
    old = [gpu["name"] for gpu in found if (capability := _number(gpu["compute_cap"])) and capability < 8]
    if bf16 and old:
        why = "bfloat16 is emulated before compute capability 8.0"
        yield _check("bf16", old[0], False, why, "fp16: true", Verdict.WARN)
    yield from _links()


def _state(gpu: Mapping[str, str]) -> Iterator[Check]:
    name, used, heat = f"GPU {gpu['index']}", gpu["memory.used"], gpu["temperature.gpu"]
    memory = f"{used} of {gpu['memory.total']} MiB"
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    reasons = [text for bit, text in _THROTTLED.items() if int(_number(gpu["clocks_throttle_reasons.active"])) & bit]
    why, fix = (
        "its memory returned wrong values since the driver was loaded",
        "reset or drain it: `nvidia-smi -q -d ECC`",
    )
    checks = [
        _check(name, f"{errors:.0f} uncorrected ECC errors", not errors, why, fix),
        _check(name, f"{memory} are in use", _number(used) <= _HELD_BY_OTHERS, "the run will have that much less",
               "`nvidia-smi` names the processes: end them", Verdict.WARN),
        _check(name, f"{', '.join(reasons)} at {heat} °C", not reasons,
               "it computes at lower clocks, and all others wait for it", "check its cooling and power", Verdict.WARN),
        _check(name, "MIG is on", gpu["mig.mode.current"] != "Enabled",
               "a process sees a slice of it, and slices cannot communicate over NVLink", "nvidia-smi -mig 0",
               Verdict.WARN),
    ]  # fmt: skip
    wrong = [each for each in checks if each.verdict is not Verdict.PASS]
    yield from wrong or [_check(name, f"{memory} in use, {heat} °C")]


def _number(text: str) -> float:
    """Return a number that nvidia-smi prints, 0x... included; 0 for [N/A]."""
    try:
        return int(text, 16) if text.startswith("0x") else float(text)
    except ValueError:
        return 0


def _links() -> Iterator[Check]:
    """Check how GPUs reach each other: NVLink (NV18), a switch of PCIe (PIX, PXB), the processors (PHB, NODE, SYS)."""
    rows = re.findall(r"^GPU\d+.*$", nvidia_smi("topo", "-m") or "", re.MULTILINE)
    kinds = re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", "\n".join(rows))
    if kinds:
        found = ", ".join(f"{kind} ({kinds.count(kind) // 2})" for kind in sorted(set(kinds)))
        why = "pairs of GPUs communicate over the link between the CPUs, at a fraction of NVLink's rate"
        fix = "tensor_model_parallel_size within GPUs that NVLink joins, or 1"
        yield _check("links", found, not {"SYS", "NODE"} & set(kinds), why, fix, Verdict.WARN)
