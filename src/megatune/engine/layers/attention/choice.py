"""Which attention computes a run: said in the banner, and refused before the first step where it cannot be had."""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.errors import ExitCode, Finding, MegatuneError

_KEY = "attention_backend"
_CONTEXT = {
    "all_gather": "keys and values gathered from context-parallel ranks",
    "a2a": "heads exchanged for sequence between context-parallel ranks",
    "p2p": "keys and values around a ring of context-parallel ranks",
}


def describe(settings: Settings, architecture: Architecture) -> str:
    """Which kernel attends and why, for the banner."""
    parallel = settings.parallel
    across = "; " + _CONTEXT[parallel.cp_comm_type] if parallel.context_parallel_size > 1 else ""
    return _kernel(settings, architecture) + across


def _kernel(settings: Settings, architecture: Architecture) -> str:
    backend, precision = settings.performance.attention_backend, settings.precision.params_dtype
    asked = "" if backend == "auto" else f", as {_KEY} asks"
    if backend in ("unfused", "local"):
        return f"plain matrix products{asked}"
    if not device.HAS_GPU:
        return "torch's flash kernel for CPUs" + (", document by document" if settings.packing else "")
    if not in_runs(settings):
        names = {SDPBackend.CUDNN_ATTENTION: "cuDNN", SDPBackend.FLASH_ATTENTION: "flash"}
        kernels = ", then ".join(names[kernel] for kernel in device.sdpa_kernels(backend) if kernel in names)
        major, minor = device.compute_capability()
        return f"torch SDPA, {kernels}{asked or f', the faster first on compute capability {major}.{minor}'}"
    channels = max(_channels(architecture))
    if device.flash_takes(getattr(torch, precision), channels):
        return f"flash with variable lengths, for {'packed rows' if settings.packing else 'context parallelism'}"
    return f"plain matrix products: the flash kernel takes no {precision} with {channels} channels on {device.name()}"


def in_runs(settings: Settings) -> bool:
    """Whether queries attend to runs of keys, which cuDNN's kernels in torch do not do: documents of a packed row, or
    parts of a document that other ranks hold."""
    parallel = settings.parallel
    across = parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a"
    return across or settings.packing


def require(settings: Settings, architecture: Architecture) -> None:
    """See that this device has the kernel that the settings ask for.

    Raises:
        MegatuneError: SETTINGS, where it has not.
    """
    backend = settings.performance.attention_backend
    if backend not in ("flash", "fused"):
        return
    why = _obstacle(backend, getattr(torch, settings.precision.params_dtype), *_channels(architecture))
    if why:
        fix = f"write {_KEY}: auto, which takes the fastest kernel that can be had"
        raise MegatuneError(Finding(f"{_KEY} {backend} cannot be had here", why=why, fix=fix), ExitCode.SETTINGS)


def _channels(architecture: Architecture) -> tuple[int, int]:
    """Channels of a head's query and key, and of its value."""
    mla = architecture.mla
    if mla is None:
        return architecture.kv_channels, architecture.kv_channels
    return mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim


def _obstacle(backend: str, dtype: torch.dtype, channels: int, value_channels: int) -> str:
    """What keeps this device from using the kernel; empty where nothing does."""
    if not device.HAS_GPU:
        return "" if backend == "flash" else "fused attention is cuDNN's, and there is no GPU"
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its GPU kernel computes in bf16 or fp16, and the run in {name}"
    if backend == "flash":
        # Fewer channels of values are filled up with zeros.
        channels = value_channels = max(channels, value_channels)
        channels += -channels % device.FLASH_CHANNEL_MULTIPLE
        value_channels = channels
    query, value = (
        torch.empty(1, 1, 64, size, dtype=dtype, device=device.current()) for size in (channels, value_channels)
    )
    usable = can_use_flash_attention if backend == "flash" else can_use_cudnn_attention
    if usable(SDPAParams(query, query, value, None, 0.0, True, False)):
        return ""
    return f"torch does not use it on {device.name()} in {name} with heads of {channels} and {value_channels} channels"
