"""A call of attention, forward and backward, by each kernel that returns its log-sum-exp; and attention in which the
tokens of an image see each other, composed of two calls.

With the log-sum-exp, results for different keys can be merged, and the backward pass can compute the gradients of each
run of keys separately: with P = exp(scores - lse), dV = Pᵀ dO, dS = P (dO Vᵀ - sum(dO · O)), from the final O and lse
(FlashAttention-2, arXiv:2307.08691, algorithm 2).

Legend: t queries and u keys of this call, n query heads, g key/value heads (n a multiple of g), d channels of queries
and keys, e channels of values. Rows of a micro-batch are folded into the heads, since all have the same spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import pad

from megatune.config.kernels import attention_kernels
from megatune.engine import device
from megatune.engine.layers.attention.spans import LaterTokens, Spans
from megatune.engine.layers.norm import upcast

aten = torch.ops.aten

# query [t, n, d], key [u, g, d] and value [u, g, e] of a call; output [t, n, e] and log-sum-exp [n, t] over all keys
# that the queries see, in this call or another.
Saved: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """An attention kernel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        """Attend, with scores multiplied by `scale`.

        Returns:
            [t, n, e] in the dtype of `query`, and the log-sum-exp of the scores, [n, t] in fp32 (fp64 for fp64).
        """

    def backward(self, grad_output: Tensor, saved: Saved, spans: Spans, scale: float) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value."""


class MathKernel:
    """Matrix products with all scores of a run in memory, in fp32 or wider: for any device, dtype and shape."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        outputs, lses = [], []
        for queries, keys in spans.runs:
            scores = _scores(query[queries], key[keys], spans, scale)
            lse = scores.logsumexp(-1)
            shares = (scores - lse[..., None]).exp()
            outputs.append(torch.einsum("grqk,kgd->qgrd", shares, upcast(value[keys])).flatten(1, 2))
            lses.append(lse.flatten(0, 1))
        return torch.cat(outputs).to(query.dtype), torch.cat(lses, 1)

    def backward(self, grad_output: Tensor, saved: Saved, spans: Spans, scale: float) -> tuple[Tensor, ...]:
        query, key, value, output, lse = saved
        groups = (key.shape[1], -1)
        delta = (upcast(grad_output) * upcast(output)).sum(-1).T.unflatten(0, groups)
        lse = lse.unflatten(0, groups)
        gradients: tuple[list[Tensor], ...] = ([], [], [])
        for queries, keys in spans.runs:
            scores = _scores(query[queries], key[keys], spans, scale)
            shares = (scores - lse[..., queries, None]).exp()
            grad_run = upcast(grad_output[queries]).unflatten(1, groups)
            grad_shares = torch.einsum("qgrd,kgd->grqk", grad_run, upcast(value[keys]))
            grad_scores = shares * (grad_shares - delta[..., queries, None]) * scale
            query_run = upcast(query[queries]).unflatten(1, groups)
            gradients[0].append(torch.einsum("grqk,kgd->qgrd", grad_scores, upcast(key[keys])).flatten(1, 2))
            gradients[1].append(torch.einsum("grqk,qgrd->kgd", grad_scores, query_run))
            gradients[2].append(torch.einsum("grqk,qgrd->kgd", shares, grad_run))
        return tuple(torch.cat(parts).to(query.dtype) for parts in gradients)


def _scores(query: Tensor, key: Tensor, spans: Spans, scale: float) -> Tensor:
    """Return the scores [g, n / g, t, u], -inf where a query does not see a key."""
    scores = torch.einsum("qgrd,kgd->grqk", upcast(query).unflatten(1, (key.shape[1], -1)), upcast(key)) * scale
    return scores + _unseen(scores, len(query), len(key), spans.window) if spans.causal else scores


def _unseen(like: Tensor, t: int, u: int, window: int | None) -> Tensor:
    """Return a mask [t, u], in the dtype of `like`: -inf for keys that a query does not see, if the last query sees all
    keys, or the last `window` of them."""
    everywhere = like.new_full((t, u), -torch.inf)
    later = everywhere.triu(1 + u - t)
    return later if window is None else later + everywhere.tril(u - t - window)


class FlashOnCPU:
    """torch's flash attention for CPUs; runs of equal lengths are computed in one call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        channels = value.shape[-1]
        query, key, value = equal_channels(query, key, value)
        output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=upcast(query[:0]).dtype)
        for queries, keys, count in spans.equal_runs:
            runs = _heads_first(count, query[queries], key[keys], value[keys])
            mask = _cpu_mask(runs[0], runs[1], spans)
            found, found_lse = aten._scaled_dot_product_flash_attention_for_cpu(*runs, 0.0, **mask, scale=scale)
            output[queries] = _tokens_first(found)
            lse[:, queries] = found_lse.transpose(0, 1).flatten(1)
        return output[..., :channels], lse

    def backward(self, grad_output: Tensor, saved: Saved, spans: Spans, scale: float) -> tuple[Tensor, ...]:
        *tensors, lse = saved
        query, key, value, output, grad_output = equal_channels(*tensors, grad_output)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for queries, keys, count in spans.equal_runs:
            runs = _heads_first(count, query[queries], key[keys], value[keys])
            results = _heads_first(count, grad_output[queries], output[queries])
            run_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                results[0], *runs, results[1], lse[:, queries].unflatten(1, (count, -1)).transpose(0, 1), 0.0,
                **_cpu_mask(runs[0], runs[1], spans), scale=scale,
            )  # fmt: skip
            for gradient, tokens, of_tokens in zip(gradients, (queries, keys, keys), run_grads, strict=True):
                gradient[tokens] = _tokens_first(of_tokens)
        return _cut_channels(gradients, saved)


def _heads_first(count: int, *tensors: Tensor) -> list[Tensor]:
    """Reshape each tensor from [count · t, n, d] to [count, n, t, d]."""
    return [tensor.unflatten(0, (count, -1)).transpose(1, 2) for tensor in tensors]


def _tokens_first(tensor: Tensor) -> Tensor:
    """Reshape [count, n, t, d] to [count · t, n, d]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _cut_channels(gradients: Iterable[Tensor], saved: Saved) -> tuple[Tensor, ...]:
    """Remove the channels that `equal_channels` added."""
    return tuple(gradient[..., : tensor.shape[-1]] for gradient, tensor in zip(gradients, saved[:3], strict=True))


def _cpu_mask(query: Tensor, key: Tensor, spans: Spans) -> dict[str, Any]:
    """Return the mask arguments of the CPU kernel, whose own causal mask is aligned to the first key."""
    t, u = query.shape[2], key.shape[2]
    window = None if spans.window is None or spans.window >= u else spans.window
    if not spans.causal or (t == u and window is None):
        return {"is_causal": spans.causal}
    return {"is_causal": False, "attn_mask": _unseen(query, t, u, window)}


class FlashOnGPU:
    """torch's FlashAttention-2, all runs in one call. Its causal mask is aligned to the last key, as ours."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        tensors = equal_channels(query, key, value)
        arguments = (*spans.on_device, 0.0, spans.causal, False)
        output, lse, *_ = aten._flash_attention_forward(*tensors, *arguments, scale=scale, **_window(spans))
        return output[..., : value.shape[-1]], lse

    def backward(self, grad_output: Tensor, saved: Saved, spans: Spans, scale: float) -> tuple[Tensor, ...]:
        query, key, value, output, lse = saved
        tensors = equal_channels(grad_output, query, key, value, output)
        # Dropout state, unused.
        random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        arguments = (lse.contiguous(), *spans.on_device, 0.0, spans.causal, *random)
        gradients = aten._flash_attention_backward(*tensors, *arguments, scale=scale, **_window(spans))
        return _cut_channels(gradients, saved)


def _window(spans: Spans) -> dict[str, int]:
    """Return the window arguments: the number of keys before its own that a query sees, and none after it."""
    return {} if spans.window is None else {"window_size_left": spans.window - 1, "window_size_right": 0}


def equal_channels(*tensors: Tensor) -> Iterator[Tensor]:
    """Pad the tensors to the number of channels that flash kernels require: the same for all, and on a GPU a multiple
    of 8, which kernels read at once. Zero channels do not change scores, and give zero outputs."""
    multiple = device.FLASH_CHANNEL_MULTIPLE
    size = max(tensor.shape[-1] for tensor in tensors)
    size += -size % multiple
    for tensor in tensors:
        if tensor.shape[-1] < size:
            yield pad(tensor, (0, size - tensor.shape[-1]))
        else:
            yield tensor if tensor.stride(-1) == 1 and not tensor.stride(-2) % multiple else tensor.contiguous()


_MATH = MathKernel()
_FLASH: Kernel = FlashOnGPU() if device.HAS_GPU else FlashOnCPU()


def pick(query: Tensor, value: Tensor, backend: AttnBackend) -> Kernel:
    """Return the kernel for these tensors: flash, unless the backend or the device requires plain matrix products."""
    channels, dtype = max(query.shape[-1], value.shape[-1]), str(query.dtype).removeprefix("torch.")
    capability = device.compute_capability()
    (kernel,) = attention_kernels(capability, backend.name, dtype, channels, varlen=True)
    return _MATH if kernel == "plain" else _FLASH


def merge(output: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results of attention over different keys, [t, n, e] and [n, t]."""
    share = torch.sigmoid(found_lse - lse).T[..., None]
    return torch.lerp(output, found.to(output.dtype), share), torch.logaddexp(lse, found_lse)


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add each head's attention sink, a score without a value, to a result of attention: [t, n, e] and [n, t] with sink
    scores [n]. A kernel's backward pass with the new output and log-sum-exp returns the right gradients."""
    if sinks is None:
        return output, lse
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (output * (lse - whole).exp().T[..., None]).to(output.dtype), whole


def sinks_gradient(grad_output: Tensor, output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sink scores, [n], from the result of `add_sinks`: a sink's value is zero, so it is
    -P · sum(dO · O)."""
    if sinks is None:
        return None
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(shares * (upcast(grad_output) * upcast(output)).sum(-1).T).sum(1).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    """A kernel as a differentiable operator."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        spans: Spans,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        output, lse = add_sinks(*kernel.forward(query, key, value, spans, scale), sinks)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.arguments, ctx.kernel = (spans, scale), kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad_output, tuple(saved), *ctx.arguments)
        return *gradients, sinks_gradient(grad_output, saved[3], saved[4], sinks), None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    scale: float,
    backend: AttnBackend,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within `spans`, differentiably: [t, n, d], [u, g, d] and [u, g, e] to [t, n, e].

    Args:
        sinks: scores of the heads' sinks, for a single row; see `add_sinks`.
    """
    sinks = None if sinks is None else sinks.repeat(query.shape[1] // len(sinks))
    return _Attention.apply(query, key, value, sinks, spans, scale, pick(query, value, backend))


def attend_with_images(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, later: LaterTokens, scale: float, backend: AttnBackend
) -> Tensor:
    """Attend within `spans`, and to `later` image tokens, as in Gemma 3: [t, b, n, d], [t, b, g, d] and [t, b, g, e] to
    [t, b, n, e], with t tokens of b whole rows."""
    kernel = pick(query, value, backend)
    output: Tensor = _ImageAttention.apply(query, key, value, spans, later, scale, kernel)
    return output


class _ImageAttention(torch.autograd.Function):
    """Attention to the keys that causal attention excludes is a second call of the same kernel, merged by the
    log-sum-exps. No window limits it: a window ends a number of tokens before the query."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Spans,
        later: LaterTokens,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        rows, (query_index, key_index, later_spans) = query.shape[1], later
        output, lse = kernel.forward(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), spans, scale)
        output, lse = output.unflatten(1, query.shape[1:3]), _by_token(lse, rows)
        by_token = [each.flatten(0, 1) for each in (query, key, value, output)]
        keys, values = (each[key_index] for each in by_token[1:3])
        found, found_lse = kernel.forward(by_token[0][query_index], keys, values, later_spans, scale)
        merged, lse[:, query_index] = merge(
            by_token[3][query_index].to(lse.dtype), lse[:, query_index], found, found_lse
        )
        output = by_token[3].index_copy(0, query_index, merged.to(output.dtype)).view_as(output)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.arguments = spans, later, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        spans, (query_index, key_index, later_spans), scale, kernel = ctx.arguments
        rows = grad_output.shape[1]
        saved = (*(each.flatten(1, 2) for each in tensors), _by_row(lse, rows))
        gradients = kernel.backward(grad_output.flatten(1, 2), saved, spans, scale)
        query, key, value, output = (each.flatten(0, 1) for each in tensors)
        saved = query[query_index], key[key_index], value[key_index], output[query_index], lse[:, query_index]
        run_grads = kernel.backward(grad_output.flatten(0, 1)[query_index], saved, later_spans, scale)
        whole = []
        for tensor, gradient, places, run_grad in zip(
            tensors, gradients, (query_index, key_index, key_index), run_grads, strict=False
        ):
            by_token = gradient.unflatten(1, tensor.shape[1:3]).flatten(0, 1)
            whole.append(by_token.index_add(0, places, run_grad).view_as(tensor))
        return *whole, None, None, None, None


def _by_token(lse: Tensor, rows: int) -> Tensor:
    """Reshape [b · n, t] to [n, t · b]."""
    return lse.unflatten(0, (rows, -1)).permute(1, 2, 0).flatten(1)


def _by_row(lse: Tensor, rows: int) -> Tensor:
    """Reshape [n, t · b] to [b · n, t]."""
    return lse.unflatten(1, (-1, rows)).permute(2, 0, 1).flatten(0, 1)
