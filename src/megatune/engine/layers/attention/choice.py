"""Which attention kernel a run uses: named in the banner, and refused before the first step where torch lacks it."""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from megatune.architecture import Architecture
from megatune.config.kernels import PLAIN_BACKENDS, attends_in_runs, attention_kernels
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.attention.flash_version import activate
from megatune.engine.layers.attention.kernels import FlashOnGPU
from megatune.errors import ExitCode, Finding, MegatuneError

_KEY = "attention_backend"
_CONTEXT = {
    "all_gather": "keys and values gathered from context-parallel ranks",
    "a2a": "heads exchanged for sequence between context-parallel ranks",
    "p2p": "keys and values around a ring of context-parallel ranks",
}


def describe(settings: Settings, architecture: Architecture) -> str:
    """Return which kernel attends and why, for the banner."""
    parallel = settings.parallel
    across = "; " + _CONTEXT[parallel.cp_comm_type] if parallel.context_parallel_size > 1 else ""
    return _kernel(settings, architecture) + across


def _kernel(settings: Settings, architecture: Architecture) -> str:
    backend, dtype = settings.performance.attention_backend, settings.precision.params_dtype
    asked = "" if backend == "auto" else f", as {_KEY} asks"
    if backend in PLAIN_BACKENDS:
        return f"plain matrix products{asked}"
    if not device.HAS_GPU:
        return "torch's flash kernel for CPUs" + (", document by document" if settings.packing else "")
    capability, channels = device.compute_capability(), max(_channels(architecture))
    kernels = attention_kernels(capability, backend, dtype, channels, in_runs=_in_runs(settings, architecture))
    version = activate_newest(settings, architecture)
    match kernels[0]:
        case "plain":
            obstacle = f"the flash kernel does not support {dtype} with {channels} channels on {device.name()}"
            return f"plain matrix products: {obstacle}"
        case "varlen":
            what = "packed rows" if settings.packing else "context parallelism"
            what = (
                what if attends_in_runs(settings) else "attention sinks" if architecture.attention_sinks else "pictures"
            )
            return f"flash with variable lengths ({version}), for {what}"
    names = {"cudnn": "cuDNN", "flash": f"flash ({version})" if version else "flash"}
    order = ", then ".join(names[kernel] for kernel in kernels if kernel in names)
    return f"torch SDPA, {order}{asked}"


def require(settings: Settings, architecture: Architecture) -> None:
    """Check that this device has the kernel that the settings ask for.

    Raises:
        MegatuneError: SETTINGS, where it has not.
    """
    backend = settings.performance.attention_backend
    if backend not in ("flash", "fused"):
        return
    why = _obstacle(backend, getattr(torch, settings.precision.params_dtype), *_channels(architecture))
    if backend == "fused" and architecture.merges_attention:
        who = "attention sinks need" if architecture.attention_sinks else "tokens of pictures that see each other need"
        why = f"{who} a kernel's log-sum-exp, which torch does not return of cuDNN's"
    if why:
        fix = f"write {_KEY}: auto, which takes the fastest available kernel"
        raise MegatuneError(Finding(f"{_KEY} {backend} is not available here", why=why, fix=fix), ExitCode.SETTINGS)


def activate_newest(settings: Settings, architecture: Architecture) -> str:
    """Let flash attention be the newest that this device has; see `flash_version.activate`.

    Returns:
        Its name; "" where nothing asks torch for it.
    """
    backend, dtype = settings.performance.attention_backend, settings.precision.params_dtype
    channels, has_window = _channels(architecture), any(each is not None for each in architecture.windows or ())
    found = attention_kernels(device.compute_capability(), backend, dtype, max(channels), in_runs=True)
    if not device.HAS_GPU or found != ("varlen",):
        return ""
    return activate(FlashOnGPU(), getattr(torch, dtype), *channels, has_window)


def _in_runs(settings: Settings, architecture: Architecture) -> bool:
    """Return whether a kernel that returns its log-sum-exp attends, see `kernels`."""
    return architecture.merges_attention or attends_in_runs(settings)


def _channels(architecture: Architecture) -> tuple[int, int]:
    """Return the channels of a head's query and key, and of its value."""
    mla = architecture.mla
    if mla is None:
        channels = max(architecture.kv_channels, architecture.of_heads(True).kv_channels)
        return channels, channels
    return mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim


def _obstacle(backend: str, dtype: torch.dtype, channels: int, value_channels: int) -> str:
    """Return what keeps this device from using the kernel; empty where nothing does."""
    if not device.HAS_GPU:
        return "" if backend == "flash" else "fused attention is cuDNN's, and there is no GPU"
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its GPU kernel computes in bf16 or fp16, and the run in {name}"
    if backend == "flash":
        # Fewer channels of values are filled up with zeros.
        widest = max(channels, value_channels)
        channels = value_channels = widest + -widest % device.FLASH_CHANNEL_MULTIPLE
    sizes = channels, value_channels
    query, value = (torch.empty(1, 1, 64, size, dtype=dtype, device=device.current()) for size in sizes)
    usable = can_use_flash_attention if backend == "flash" else can_use_cudnn_attention
    if usable(SDPAParams(query, query, value, None, 0.0, True, False)):
        return ""
    return f"torch does not use it on {device.name()} in {name} with heads of {channels} and {value_channels} channels"
