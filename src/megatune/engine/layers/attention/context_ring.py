"""Context parallelism that passes keys and values around a ring while computing (Ring Attention, arXiv:2310.01889).

After k steps a rank holds what the rank k places before it began with. Results over different keys are merged by their
log-sum-exps; the backward pass sends keys and values around once more, and their gradients after them.

Legend: t = s / cp tokens of this rank, n query heads and g key/value heads, rows folded in, d channels of queries and
keys, e channels of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from megatune.engine.layers.attention.kernels import Kernel, add_sinks, merge, pick, sinks_gradient
from megatune.engine.layers.attention.spans import RingStep, ring

Boundaries: TypeAlias = tuple[int, ...]
Group: TypeAlias = torch.distributed.ProcessGroup
Steps: TypeAlias = Sequence[RingStep]

# gloo distinguishes messages between the same two ranks by a tag.
_KEYS, _GRADIENTS = 1, 2


def attend_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    scale: float,
    backend: AttnBackend,
    group: Group,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to what comes around the ring; shapes as in `core`."""
    steps = ring(boundaries, group.size())
    sinks = None if sinks is None else sinks.repeat(query.shape[1])
    arguments = (sinks, steps, scale, pick(query, value, backend), group)
    output = _RingAttention.apply(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), *arguments)
    return output.unflatten(1, query.shape[1:3])


class _RingAttention(torch.autograd.Function):
    """query [t, n, d], key [t, g, d], value [t, g, e] and sinks [n] to [t, n, e]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        steps: Steps,
        scale: float,
        kernel: Kernel,
        group: Group,
    ) -> Tensor:
        channels = key.shape[-1], value.shape[-1]
        output, lse = query.new_empty(0), query.new_empty(0)
        for here, (of_query, of_key, spans) in _around(torch.cat((key, value), -1), steps, group):
            keys, values = here.split(channels, -1)
            found, of_found = kernel.forward(query[of_query], keys[of_key], values[of_key], spans, scale)
            if not len(output):  # the first step
                output, lse = found.to(of_found.dtype), of_found
            else:
                merged = merge(output[of_query], lse[:, of_query], found, of_found)
                output[of_query], lse[:, of_query] = merged
        output, lse = add_sinks(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.arguments = steps, scale, kernel, group
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        steps, scale, kernel, group = ctx.arguments
        channels = key.shape[-1], value.shape[-1]
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        of_others: _Passing | None = None
        for here, (of_query, of_key, spans) in _around(torch.cat((key, value), -1), steps, group):
            keys, values = here.split(channels, -1)
            saved = query[of_query], keys[of_key], values[of_key], output[of_query], lse[:, of_query]
            grad_run, *grad_keys = kernel.backward(grad_output[of_query], saved, spans, scale)
            grad_query[of_query] += grad_run
            # What the ranks before found of these keys' gradients; it was on its way while this rank computed.
            gradients = of_others.wait() if of_others else torch.zeros_like(here, dtype=lse.dtype)
            gradients[of_key] += torch.cat(grad_keys, -1)
            of_others = _Passing(gradients, group, _GRADIENTS)
        assert of_others is not None  # a ring has at least one rank
        grad_key, grad_value = of_others.wait().to(key.dtype).split(channels, -1)
        grad_sinks = sinks_gradient(grad_output, output, lse, sinks)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None, None, None


def _around(here: Tensor, steps: Steps, group: Group) -> Iterator[tuple[Tensor, RingStep]]:
    """Yield the keys and values that this rank has at each step, and who sees what of them, while the next arrive."""
    for step in range(group.size()):
        arriving = _Passing(here, group, _KEYS) if step + 1 < group.size() else None
        yield here, steps[0 if step == 0 else 1 if step <= group.rank() else 2]
        if arriving is not None:
            here = arriving.wait()


class _Passing:
    """A tensor on its way to the next rank of the ring, while one of its shape comes from the rank before.

    It must not change until `wait`.
    """

    def __init__(self, tensor: Tensor, group: Group, tag: int) -> None:
        ranks = torch.distributed.get_process_group_ranks(group)
        after, before = ranks[(group.rank() + 1) % group.size()], ranks[group.rank() - 1]
        self._sent, self._received = tensor, torch.empty_like(tensor)
        self._works = batch_isend_irecv(
            [P2POp(isend, self._sent, after, group, tag), P2POp(irecv, self._received, before, group, tag)]
        )

    def wait(self) -> Tensor:
        """Return the tensor that was received."""
        for work in self._works:
            work.wait()
        return self._received
