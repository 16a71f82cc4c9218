"""One call of attention, forward and backward, by each kernel that can say its log-sum-exp.

The log-sum-exp lets results over different keys be merged, and lets the backward pass compute each key's gradient apart
from the others': with P = exp(scores - lse), dV = Pᵀ dO, dS = P (dO Vᵀ - sum(dO · O)), from the final O and lse
(FlashAttention-2, arXiv:2307.08691, algorithm 2).

Legend: t queries and u keys of this call, n query heads, g key/value heads (n a multiple of g), d channels of queries
and keys, e channels of values. Rows of a micro-batch are folded into the heads: all have the same spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import pad

from megatune.config.attention_kernel import attention_kernels
from megatune.engine import device
from megatune.engine.layers.attention.plain import Plain, lower_right
from megatune.engine.layers.attention.spans import Spans

aten = torch.ops.aten


class Kernel(Protocol):
    """A way to compute attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query: [t, n, d].
            key: [u, g, d].
            value: [u, g, e].
            scale: multiplies the scores.

        Returns:
            [t, n, e] in the dtype of `query`, and the logarithm of the sum of the scores' exponentials, [n, t] in
            fp32 (fp64 for fp64).
        """

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value.

        Args:
            grad_output, output: [t, n, e].
            lse: [n, t]; with `output` over all keys that the queries see, in this call or another.
        """


class FlashOnCPU:
    """torch's flash attention for CPUs, run by run."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        channels = value.shape[-1]
        query, key, value = equal_channels(query, key, value)
        outputs, lses = [], []
        for queries, keys in spans.runs:
            of_query, of_key, of_value = (
                _heads_first(query[queries]),
                _heads_first(key[keys]),
                _heads_first(value[keys]),
            )
            output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                of_query, of_key, of_value, 0.0, **_cpu_mask(of_query, of_key, spans.causal), scale=scale
            )
            outputs.append(_tokens_first(output))
            lses.append(lse[0])
        return torch.cat(outputs)[..., :channels], torch.cat(lses, 1)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels = query.shape[-1], key.shape[-1], value.shape[-1]
        grad_output, output, query, key, value = equal_channels(grad_output, output, query, key, value)
        gradients: list[tuple[Tensor, ...]] = []
        for queries, keys in spans.runs:
            of_query, of_key, of_value = (
                _heads_first(query[queries]),
                _heads_first(key[keys]),
                _heads_first(value[keys]),
            )
            of_run = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(grad_output[queries]),
                of_query,
                of_key,
                of_value,
                _heads_first(output[queries]),
                lse[None, :, queries],
                0.0,
                **_cpu_mask(of_query, of_key, spans.causal),
                scale=scale,
            )
            gradients.append(tuple(map(_tokens_first, of_run)))
        grad_query, grad_key, grad_value = (
            torch.cat(runs)[..., :size] for runs, size in zip(zip(*gradients, strict=True), channels, strict=True)
        )
        return grad_query, grad_key, grad_value


def _heads_first(tensor: Tensor) -> Tensor:
    """[t, n, d] to [1, n, t, d]."""
    return tensor.transpose(0, 1)[None]


def _tokens_first(tensor: Tensor) -> Tensor:
    """[1, n, t, d] to [t, n, d]."""
    return tensor[0].transpose(0, 1)


def _cpu_mask(query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    """Arguments that mask the CPU kernel: its own causal mask counts from the first key."""
    t, u = query.shape[2], key.shape[2]
    if not causal or t == u:
        return {"is_causal": causal}
    return {"is_causal": False, "attn_mask": lower_right(query, t, u)}


class FlashOnGPU:
    """FlashAttention-2 as torch has it, all runs in one call. Its causal mask counts from the last key, as ours."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        channels = value.shape[-1]
        query, key, value = equal_channels(query, key, value)
        output, lse, *_ = aten._flash_attention_forward(
            query,
            key,
            value,
            *spans.on_device,
            spans.max_queries,
            spans.max_keys,
            0.0,
            spans.causal,
            False,
            scale=scale,
        )
        return output[..., :channels], lse

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels = query.shape[-1], key.shape[-1], value.shape[-1]
        grad_output, output, query, key, value = equal_channels(grad_output, output, query, key, value)
        # State of a dropout that there is not.
        random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        gradients = aten._flash_attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse.contiguous(),
            *spans.on_device,
            spans.max_queries,
            spans.max_keys,
            0.0,
            spans.causal,
            *random,
            scale=scale,
        )
        grad_query, grad_key, grad_value = (
            gradient[..., :size] for gradient, size in zip(gradients, channels, strict=True)
        )
        return grad_query, grad_key, grad_value


def equal_channels(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with as many channels as flash kernels ask for: all the same, and on a GPU a multiple of 8,
    where kernels read 8 at once. Channels of zeros add nothing to a score, and give an output of zeros."""
    multiple = device.FLASH_CHANNEL_MULTIPLE
    size = max(tensor.shape[-1] for tensor in tensors)
    size += -size % multiple
    for tensor in tensors:
        if tensor.shape[-1] < size:
            yield pad(tensor, (0, size - tensor.shape[-1]))
        else:
            yield tensor if tensor.stride(-1) == 1 and not tensor.stride(-2) % multiple else tensor.contiguous()


_PLAIN = Plain()
_FLASH: Kernel = FlashOnGPU() if device.HAS_GPU else FlashOnCPU()


def pick(query: Tensor, value: Tensor, backend: AttnBackend) -> Kernel:
    """Return the kernel for runs of these tensors: flash, unless the backend or the device needs plain products."""
    channels, dtype = max(query.shape[-1], value.shape[-1]), str(query.dtype).removeprefix("torch.")
    capability = device.compute_capability()
    (kernel,) = attention_kernels(capability, backend.name, dtype, channels, in_runs=True)
    return _PLAIN if kernel == "plain" else _FLASH


class _Attention(torch.autograd.Function):
    """A kernel as an operator with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, kernel: Kernel
    ) -> Tensor:
        output, lse = kernel.forward(query, key, value, spans, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.arguments, ctx.kernel = (spans, scale), kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.kernel.backward(grad_output, *ctx.saved_tensors, *ctx.arguments)
        return *gradients, None, None, None


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, backend: AttnBackend) -> Tensor:
    """Attend within `spans`, with a gradient.

    Args:
        query: [t, n, d].
        key: [u, g, d].
        value: [u, g, e].

    Returns:
        [t, n, e].
    """
    return _Attention.apply(query, key, value, spans, scale, pick(query, value, backend))
