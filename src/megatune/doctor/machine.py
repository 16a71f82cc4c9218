"""Checks of this machine: cores, memory, process limits, GPUs as reported by their driver, environment variables."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil

from megatune.config.kernels import c_compiler
from megatune.config.values import counted
from megatune.doctor.check import Check, Verdict, check
from megatune.launch.devices import count_cpus, free_memory, nvidia_smi
from megatune.plan.pages.words import size

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 64 * 2**20  # per rank: buffers of gloo and NCCL, batches of its data loader
_LEAST_FILES = 4096  # a rank has a socket to every other rank, and maps its shards
_LEAST_FREE = 2 * 2**30  # per rank: Python, torch and reading shards
_check = partial(check, "machine")


def machine(ranks: int, workers: int) -> Iterator[Check]:
    """Check what `ranks` processes of this machine share, each with `workers` data-loading processes."""
    cores, processes = count_cpus(), ranks * (1 + workers)
    found = f"{counted(cores, 'core')}, {counted(ranks, 'rank')}"
    found += f" with {counted(workers, 'data worker')} each" if workers else ""
    why = f"{processes} processes on {cores} cores slow each other down; a container's quota is included"
    fix = "use fewer dataloader_num_workers or more cores" if workers else "give the container more cores"
    yield _check("cores", found, processes <= 2 * cores, why, fix, Verdict.WARN)

    free, needed = free_memory(), ranks * _LEAST_FREE
    why = f"{ranks} ranks need about {size(needed)} to start; the kernel kills processes without free memory"
    fix = "end other processes, or use fewer ranks"
    yield _check("main memory", f"{size(free)} free, including container limits", free >= needed, why, fix)

    swap = psutil.swap_memory()
    fix = "end other processes; `swapoff -a` shows whether memory is short"
    why = "pages that a step needs may have to be read from disk"
    found = f"{size(swap.used)} of {size(swap.total)} in use" if swap.total else "none"
    yield _check("swap", found, swap.used < 2**30, why, fix, Verdict.WARN)

    yield _shared_memory(ranks)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    fix = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}"
    why = "sockets to other ranks, shards and data files are open at the same time"
    yield _check("open files", f"{soft} at most", most >= _LEAST_FILES, why, fix, Verdict.WARN)

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    passes = unlimited or not any(Path("/sys/class/infiniband").glob("*"))
    why, fix = "InfiniBand locks the memory that it sends from", "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    yield _check("locked memory", "unlimited" if unlimited else f"{size(soft)} at most", passes, why, fix)


def _shared_memory(ranks: int) -> Check:
    if not _SHARED_MEMORY.is_dir():
        return _check("/dev/shm", "missing", False, "ranks and data workers share memory there", "mount it")
    free, needed = shutil.disk_usage(_SHARED_MEMORY).free, ranks * _LEAST_SHARED
    why = f"{ranks} ranks with their data workers need {size(needed)}; containers get 64 MiB by default"
    return _check("/dev/shm", f"{size(free)} free", free >= needed, why, "docker run --shm-size=16g, or --ipc=host")


_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "compute_cap", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current",
)  # fmt: skip
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the name in new and in old drivers
# Bits of clocks_event_reasons.active that slow a run (NVML's nvmlClocksThrottleReasons). The software power cap is
# excluded, since a GPU under load is at its power limit.
_THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
_MAX_USED = 2 * 1024  # MiB: more than a CUDA context
_gpu_check = partial(check, "gpu")


def gpus(wanted: int, *, bf16: bool) -> Iterator[Check]:
    """Check this machine's GPUs.

    Args:
        wanted: processes of this machine, which need one GPU each; 0 to run on the CPU.
        bf16: whether the run computes in bfloat16.
    """
    for reasons in _REASONS:
        table = nvidia_smi(f"--query-gpu={','.join((*_FIELDS, reasons))}", "--format=csv,noheader,nounits")
        if table is not None:
            break
    else:
        yield Check("gpu", "GPUs", Verdict.SKIP, "nvidia-smi is missing or fails: ranks run on the CPU")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    fields = (*_FIELDS, "reasons")
    found = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    names = sorted({gpu["name"] for gpu in found})
    text = f"{len(found)} × {', '.join(names)}, driver {found[0]['driver_version']}" if found else "none"
    if len(found) < wanted:
        yield _gpu_check("GPUs", text, False, f"{wanted} processes need one each", f"num_processes: {len(found)}")
    else:
        why = "a step takes as long as on the slowest GPU"
        fix = "set CUDA_VISIBLE_DEVICES to GPUs of one kind"
        yield _gpu_check("GPUs", text, len(names) < 2, why, fix, Verdict.WARN)
    for gpu in found:
        yield from _state(gpu)
    why = "Triton needs one to compile fused kernels; without them steps are slower"
    compiler = c_compiler()
    found_compiler = compiler or "neither gcc nor clang is installed"
    yield _gpu_check("C compiler", found_compiler, compiler is not None, why, "apt-get install gcc", Verdict.WARN)
    old = [gpu["name"] for gpu in found if (capability := _gpu_number(gpu["compute_cap"])) and capability < 8]
    if bf16 and old:
        why = "bfloat16 is emulated before compute capability 8.0"
        yield _gpu_check("bf16", old[0], False, why, "fp16: true", Verdict.WARN)
    yield from _links()


def _state(gpu: Mapping[str, str]) -> Iterator[Check]:
    name, used, heat = f"GPU {gpu['index']}", gpu["memory.used"], gpu["temperature.gpu"]
    memory = f"{used} of {gpu['memory.total']} MiB"
    errors = _gpu_number(gpu["ecc.errors.uncorrected.volatile.total"])
    reasons = [text for bit, text in _THROTTLED.items() if int(_gpu_number(gpu["reasons"])) & bit]
    checks = [
        _gpu_check(name, f"{errors:.0f} uncorrected ECC errors", not errors,
                   "its memory returned wrong values since the driver was loaded",
                   "reset or drain it: `nvidia-smi -q -d ECC`"),
        _gpu_check(name, f"{memory} are in use", _gpu_number(used) <= _MAX_USED,
                   "the run has that much less memory", "end the processes that `nvidia-smi` lists", Verdict.WARN),
        _gpu_check(name, f"{', '.join(reasons)} at {heat} °C", not reasons,
                   "it runs at lower clocks, and all other GPUs wait for it", "check its cooling and power",
                   Verdict.WARN),
        _gpu_check(name, "MIG is on", gpu["mig.mode.current"] != "Enabled",
                   "a process sees one slice, and slices cannot communicate over NVLink", "nvidia-smi -mig 0",
                   Verdict.WARN),
    ]  # fmt: skip
    wrong = [each for each in checks if each.verdict is not Verdict.PASS]
    yield from wrong or [_gpu_check(name, f"{memory} in use, {heat} °C")]


def _gpu_number(text: str) -> float:
    """Return a number that nvidia-smi prints, 0x... included; 0 for [N/A]."""
    try:
        return int(text, 16) if text.startswith("0x") else float(text)
    except ValueError:
        return 0


def _links() -> Iterator[Check]:
    """Check the interconnect of the GPUs: NVLink (NV18), a PCIe switch (PIX, PXB), or the CPUs (PHB, NODE, SYS)."""
    rows = re.findall(r"^GPU\d+.*$", nvidia_smi("topo", "-m") or "", re.MULTILINE)
    kinds = re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", "\n".join(rows))
    if kinds:
        found = ", ".join(f"{kind} ({kinds.count(kind) // 2})" for kind in sorted(set(kinds)))
        why = "some pairs of GPUs communicate between CPU sockets, at a fraction of NVLink's bandwidth"
        fix = "use tensor parallelism only among GPUs that are connected by NVLink"
        yield _gpu_check("links", found, not {"SYS", "NODE"} & set(kinds), why, fix, Verdict.WARN)


_ON = ("1", "true", "True", "TRUE", "yes")
# Each variable with its harmful values, () for all, the consequence, and the fix.
_RULES = (
    ("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel: a step takes several times as long", "unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "collectives block the host, and nothing overlaps", "unset it"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "NCCL writes a lot to every rank's log", "NCCL_DEBUG=WARN"),
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a machine communicate through main memory, many times slower", "unset it"),
    ("NCCL_SHM_DISABLE", _ON, "ranks of a machine communicate through the network", "unset it"),
    ("NCCL_IB_DISABLE", _ON, "machines communicate over TCP, many times slower than over InfiniBand", "unset it"),
    ("NCCL_ALGO", (), "one algorithm for all sizes is slower than NCCL's own choice", "unset it"),
    ("NCCL_PROTO", (), "one protocol for all sizes is slower than NCCL's own choice", "unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "every tensor is allocated from the driver", "unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is verified first: steps are slower", "unset it"),
    ("PYTHONOPTIMIZE", ("1", "2"), "assertions are disabled", "unset it"),
    ("OMP_NUM_THREADS", ("0",), "it is not a valid number of threads", "OMP_NUM_THREADS=1"),
)
_FATAL = "OMP_NUM_THREADS"


def variables(env: Mapping[str, str], *, tensor_parallel: bool, gpus: bool) -> Iterator[Check]:
    """Check environment variables.

    Args:
        env: environment of the process that starts the ranks.
        tensor_parallel: whether tensor parallelism is used, whose communication overlaps only in one order of kernels.
        gpus: whether the ranks run on GPUs.
    """
    wrong = [
        (name, value, why, fix)
        for name, harmful, why, fix in _RULES
        if (value := env.get(name, "")) and (not harmful or value in harmful)
    ]
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if gpus and tensor_parallel and (value := env.get(name, "")) not in ("", "1"):
        why = "kernels may run in another order than launched, and communication does not overlap with computation"
        wrong.append((name, value, why, "unset it: megatune sets 1"))
    proxies = sorted(name for name in env if name.startswith("http") and name.endswith("_proxy") and env[name])
    if proxies and not env.get("no_proxy") and not env.get("NO_PROXY"):
        why, fix = "connections between machines may be sent to the proxy", "no_proxy=localhost,127.0.0.1,..."
        wrong.append((proxies[0], "set, and no_proxy is not", why, fix))
    for name, value, why, fix in wrong:
        yield Check("environment", name, Verdict.FAIL if name == _FATAL else Verdict.WARN, value, why, fix)
    if not wrong:
        yield check("environment", "variables", "no harmful ones")
