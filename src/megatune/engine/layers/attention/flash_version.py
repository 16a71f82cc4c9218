"""The newest FlashAttention that this device and its packages have, in place of torch's own version 2.

torch's operators compute with version 2 (arXiv:2307.08691) until another implementation is activated: version 3
(arXiv:2407.08608, package flash_attn_interface) for Hopper, or 4 (package flash_attn.cute) for Hopper and Blackwell.
Each is tried on a few tokens against version 2 before a run uses it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatune.engine import device
from megatune.engine.layers.attention.kernels import Kernel
from megatune.engine.layers.attention.spans import documents

_NEWER = {9: ("FA3", "FA4"), 10: ("FA4",)}  # by the GPU's generation, the better one first
_HEADS, _GROUPS = 4, 2
_BOUNDARIES = (0, 96, 160)
_WINDOW = 32
_TOLERANCE = 2e-2  # of the largest number: what two kernels in bf16 may differ by


@functools.cache
def activate(kernel: Kernel, dtype: torch.dtype, channels: int, value_channels: int, has_window: bool) -> str:
    """Let torch compute flash attention by the best implementation that gives version 2's results, for this process.

    Args:
        kernel: that calls torch's flash attention.
        channels, value_channels: of a head's queries and keys, and of its values.
        has_window: some layers have one.

    Returns:
        Its name, and why better ones are left alone, for the banner.
    """
    names = _NEWER.get(device.compute_capability()[0], ())
    api: Any = torch.nn.attention
    if not names or not hasattr(api, "activate_flash_attention_impl"):
        return "FA2"
    if chosen := api.current_flash_attention_impl():  # by what the user has set
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
        except Exception as error:  # whatever a package of another version raises
            left.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        else:
            if all(map(_agree, found, expected)):
                return name
            left.append(f"{name} computes something else than FA2")
        api.restore_flash_attention_impl(_raise_warn=False)
    return f"FA2; {', '.join(left)}"


def _results(
    kernel: Kernel, dtype: torch.dtype, channels: int, value_channels: int, window: int | None
) -> tuple[Tensor, ...]:
    """Return the output, its log-sum-exp and the three gradients of two short documents."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, size: int) -> Tensor:
        numbers = torch.randn(_BOUNDARIES[-1], heads, size, generator=generator)
        return numbers.to(device=device.current(), dtype=dtype)

    query, key, value = random(_HEADS, channels), random(_GROUPS, channels), random(_GROUPS, value_channels)
    spans, scale = documents(_BOUNDARIES, window), channels**-0.5
    output, lse = kernel.forward(query, key, value, spans, scale)
    grad = random(_HEADS, value_channels)
    return output, lse, *kernel.backward(grad, (query, key, value, output, lse), spans, scale)


def _agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        bool((one.float() - other.float()).abs().max() <= _TOLERANCE * other.float().abs().max())
        for one, other in zip(found, expected, strict=True)
    )
