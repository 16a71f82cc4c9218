"""Choose the attention kernel: describe it in the banner, and report a missing one before the first step.

torch's flash attention is version 2 (arXiv:2307.08691) unless another implementation is activated: version 3
(arXiv:2407.08608, package flash_attn_interface) for Hopper, or 4 (package flash_attn.cute) for Hopper and Blackwell.
Each is compared with version 2 on a few tokens before a run uses it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from megatune.architecture import Architecture
from megatune.config.kernels import PLAIN_BACKENDS, attention_kernels, needs_varlen
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.attention.kernels import FlashOnGPU, Kernel
from megatune.engine.layers.attention.spans import causal_spans
from megatune.errors import ExitCode, Finding, MegatuneError

_KEY = "attention_backend"
_CONTEXT = {
    "all_gather": "keys and values gathered from context-parallel ranks",
    "a2a": "heads exchanged for sequence between context-parallel ranks",
    "p2p": "keys and values around a ring of context-parallel ranks",
}


def describe(settings: Settings, architecture: Architecture) -> str:
    """Describe the attention kernel and the reason for it, for the banner."""
    parallel = settings.parallel
    across = "; " + _CONTEXT[parallel.cp_comm_type] if parallel.context_parallel_size > 1 else ""
    return _kernel(settings, architecture) + across


def _kernel(settings: Settings, architecture: Architecture) -> str:
    backend, dtype = settings.performance.attention_backend, settings.precision.params_dtype
    suffix = "" if backend == "auto" else f", as {_KEY} requires"
    if backend in PLAIN_BACKENDS:
        return f"plain matrix products{suffix}"
    if not device.HAS_GPU:
        return "torch's flash kernel for CPUs" + (", sequence by sequence" if settings.packing else "")
    capability, channels = device.compute_capability(), max(_channels(architecture))
    varlen = architecture.merges_attention or needs_varlen(settings)
    kernels = attention_kernels(capability, backend, dtype, channels, varlen=varlen)
    version = activate_newest(settings, architecture)
    match kernels[0]:
        case "plain":
            obstacle = f"the flash kernel does not support {dtype} with {channels} channels on {device.name()}"
            return f"plain matrix products: {obstacle}"
        case "varlen":
            what = "packed rows" if settings.packing else "context parallelism"
            what = what if needs_varlen(settings) else "attention sinks" if architecture.attention_sinks else "images"
            return f"flash with variable lengths ({version}), for {what}"
    names = {"cudnn": "cuDNN", "flash": f"flash ({version})" if version else "flash"}
    order = ", then ".join(names[kernel] for kernel in kernels if kernel in names)
    return f"torch SDPA, {order}{suffix}"


def require(settings: Settings, architecture: Architecture) -> None:
    """Check that this device supports the kernel that the settings require.

    Raises:
        MegatuneError: SETTINGS, if it does not.
    """
    backend = settings.performance.attention_backend
    if backend not in ("flash", "fused"):
        return
    why = _obstacle(backend, getattr(torch, settings.precision.params_dtype), *_channels(architecture))
    if backend == "fused" and architecture.merges_attention:
        who = "attention sinks need" if architecture.attention_sinks else "image tokens that see each other need"
        why = f"{who} the kernel's log-sum-exp, which torch does not return for cuDNN's"
    if why:
        fix = f"write {_KEY}: auto, which takes the fastest available kernel"
        raise MegatuneError(Finding(f"{_KEY} {backend} is not available here", why=why, fix=fix), ExitCode.SETTINGS)


def activate_newest(settings: Settings, architecture: Architecture) -> str:
    """Activate the newest flash attention that this device supports; see `activate`.

    Returns:
        Its name; "" if torch's variable-length flash attention is not used.
    """
    backend, dtype = settings.performance.attention_backend, settings.precision.params_dtype
    channels, has_window = _channels(architecture), any(each is not None for each in architecture.windows or ())
    found = attention_kernels(device.compute_capability(), backend, dtype, max(channels), varlen=True)
    if not device.HAS_GPU or found != ("varlen",):
        return ""
    return activate(FlashOnGPU(), getattr(torch, dtype), *channels, has_window)


def _channels(architecture: Architecture) -> tuple[int, int]:
    """Return the channels of a head's query and key, and of its value."""
    mla = architecture.mla
    if mla is None:
        channels = max(architecture.kv_channels, architecture.of_heads(True).kv_channels)
        return channels, channels
    return mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim


def _obstacle(backend: str, dtype: torch.dtype, channels: int, value_channels: int) -> str:
    """Return why this device cannot use the kernel; "" if it can."""
    if not device.HAS_GPU:
        return "" if backend == "flash" else "fused attention is cuDNN's, and there is no GPU"
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its GPU kernel computes in bf16 or fp16, but the run uses {name}"
    if backend == "flash":
        # Fewer channels of values are padded with zeros.
        widest = max(channels, value_channels)
        channels = value_channels = widest + -widest % device.FLASH_CHANNEL_MULTIPLE
    sizes = channels, value_channels
    query, value = (torch.empty(1, 1, 64, size, dtype=dtype, device=device.current()) for size in sizes)
    usable = can_use_flash_attention if backend == "flash" else can_use_cudnn_attention
    if usable(SDPAParams(query, query, value, None, 0.0, True, False)):
        return ""
    return f"torch does not use it on {device.name()} in {name} with heads of {channels} and {value_channels} channels"


_NEWER = {9: ("FA3", "FA4"), 10: ("FA4",)}  # by the major compute capability, the best first
_HEADS, _GROUPS = 4, 2
_BOUNDARIES = (0, 96, 160)
_WINDOW = 32
_TOLERANCE = 2e-2  # relative to the largest value: accepted difference between two kernels in bf16


@functools.cache
def activate(kernel: Kernel, dtype: torch.dtype, channels: int, value_channels: int, has_window: bool) -> str:
    """Activate the best flash attention in torch that matches version 2's results, for this process.

    Args:
        kernel: calls torch's flash attention.
        channels, value_channels: of a head's queries and keys, and of its values.
        has_window: whether some layers have a sliding window.

    Returns:
        Its name, and why better ones are not used, for the banner.
    """
    names = _NEWER.get(device.compute_capability()[0], ())
    api: Any = torch.nn.attention
    if not names or not hasattr(api, "activate_flash_attention_impl"):
        return "FA2"
    if chosen := api.current_flash_attention_impl():  # already activated by the user
        return str(chosen)
    windows = (None, _WINDOW) if has_window else (None,)
    expected = [_results(kernel, dtype, channels, value_channels, each) for each in windows]
    left = []
    for name in names:
        try:
            api.activate_flash_attention_impl(name)
            found = [_results(kernel, dtype, channels, value_channels, each) for each in windows]
        except ImportError:
            left.append(f"{name} is not installed")
        except Exception as error:  # a package of another version may raise anything
            left.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        else:
            if all(map(_agree, found, expected)):
                return name
            left.append(f"{name} computes other results than FA2")
        api.restore_flash_attention_impl(_raise_warn=False)
    return f"FA2; {', '.join(left)}"


def _results(
    kernel: Kernel, dtype: torch.dtype, channels: int, value_channels: int, window: int | None
) -> tuple[Tensor, ...]:
    """Return the output, its log-sum-exp and the three gradients for two short sequences."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, size: int) -> Tensor:
        numbers = torch.randn(_BOUNDARIES[-1], heads, size, generator=generator)
        return numbers.to(device=device.current(), dtype=dtype)

    query, key, value = random(_HEADS, channels), random(_GROUPS, channels), random(_GROUPS, value_channels)
    spans, scale = causal_spans(_BOUNDARIES, window), channels**-0.5
    output, lse = kernel.forward(query, key, value, spans, scale)
    grad = random(_HEADS, value_channels)
    return output, lse, *kernel.backward(grad, (query, key, value, output, lse), spans, scale)


def _agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        bool((one.float() - other.float()).abs().max() <= _TOLERANCE * other.float().abs().max())
        for one, other in zip(found, expected, strict=True)
    )
