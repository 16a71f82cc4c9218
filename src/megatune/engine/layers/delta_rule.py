"""The gated delta rule (arXiv:2412.06464): a head's state S [d, e] decays, and each token corrects the value that the
state holds for the token's key.

    S ← exp(g) S;  S ← S + k β (v − Sᵀ k)ᵀ;  o = Sᵀ q       with k and q normalized to length 1, q times 1 / √d

`chunked` processes C tokens at a time: within a chunk by a triangular system and matrix products, across chunks by the
state. `recurrent` is the definition, token by token, for tests.

Legend: s tokens of a whole row, b rows, C tokens of a chunk, N chunks, k key heads of this rank, r value heads of each
key head, d channels of a query and a key, e channels of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatune.engine import device
from megatune.engine.layers.norm import upcast

CHUNK = 64
# Number of cached boundary patterns: more than the micro-batches in flight in a pipeline.
_REMEMBERED = 64


class SequenceLayout(NamedTuple):
    """The layout of the sequences in a row; all tensors are on the device.

    Attributes:
        sees: bool [N, C, C + 1], whether a token sees another token of its chunk: itself or an earlier one of its
            sequence. The last column is the state before the chunk, seen by tokens of a sequence that began earlier;
            the last row also selects what the state after the chunk keeps.
        places: int64 [s], the position of each token among `num_places`. There is one empty position for each earlier
            tap of the convolution before each sequence, and after the last.
        num_places: number of positions, including empty ones.
    """

    sees: Tensor
    places: Tensor
    num_places: int


@lru_cache(_REMEMBERED)
def sequence_layout(boundaries: tuple[int, ...], num_taps: int) -> SequenceLayout:
    """Return the layout for a row's boundaries.

    Args:
        num_taps: kernel size of the convolution.
    """
    s, gap = boundaries[-1], num_taps - 1
    sequence = torch.bucketize(torch.arange(s), torch.tensor(boundaries), right=True)
    padded = torch.cat((sequence, sequence[-1:].expand(-s % CHUNK))).view(-1, CHUNK)
    before = torch.cat((padded[:1, 0], padded[:-1, -1]))[:, None]
    seen = torch.cat((padded, before), 1)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    sees = (padded[:, :, None] == seen[:, None, :]) & torch.nn.functional.pad(earlier, (0, 1), value=True)
    places = torch.arange(s) + gap * sequence
    return SequenceLayout(device.send(sees), device.send(places), s + gap * len(boundaries))


# Number of chunks that are in memory at once, with all their intermediates.
_CHUNKS_AT_ONCE = 16
_NORM_EPSILON = 1e-6  # as in Transformers' l2norm


def chunked(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: SequenceLayout) -> Tensor:
    """Apply the rule within each sequence, in fp32 or wider; the backward pass stores little more than the arguments.

    Args:
        query: [s, b, k, d], like key.
        value: [s, b, k, r, e].
        decay: [s, b, k, r], the logarithm g of the state's decay factor, finite and at most 0.
        beta: [s, b, k, r], from 0 to 1.

    Returns:
        [s, b, k, r, e] in the dtype of the value.
    """
    output: Tensor = _Chunked.apply(query.unsqueeze(3), key.unsqueeze(3), value, decay, beta, layout)
    return output


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, boundaries: tuple[int, ...]
) -> Tensor:
    """Apply the rule token by token; for the arguments see `chunked`."""
    query, key = (_normalize(upcast(each)).unsqueeze(3).expand(*value.shape[:4], -1) for each in (query, key))
    wide, outputs = upcast(value), []
    state = wide.new_zeros(*value.shape[1:4], key.shape[-1], value.shape[-1])
    for token in range(len(value)):
        state = state * (upcast(decay[token]).exp() * (token not in boundaries))[..., None, None]
        correction = wide[token] - torch.einsum("bkrde,bkrd->bkre", state, key[token])
        correction = correction * upcast(beta[token])[..., None]
        state = state + torch.einsum("bkrd,bkre->bkrde", key[token], correction)
        outputs.append(torch.einsum("bkrde,bkrd->bkre", state, query[token] * key.shape[-1] ** -0.5))
    return torch.stack(outputs).to(value.dtype)


class _Chunks(NamedTuple):
    """Results of chunks that do not depend on the state, each [N, H, ...] with H = b · k · r.

    With the state S before a chunk, X = corrections − readings S, outputs = queries S + scores X, and the next state is
    decay S + keysᵀ X.
    """

    corrections: Tensor  # [N, H, C, e]
    readings: Tensor  # [N, H, C, d]
    scores: Tensor  # [N, H, C, C]
    queries: Tensor  # [N, H, C, d]
    keys: Tensor  # [N, H, C, d]
    decay: Tensor  # [N, H, 1, 1]


class _Chunked(torch.autograd.Function):
    """Processes the row a few chunks at a time; the backward pass goes from the end, and recomputes the chunks.
    Autograd alone would store the states of all chunks and all their intermediates."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: SequenceLayout
    ) -> Tensor:
        ctx.layout = layout
        rows = query, key, value, decay, beta
        state = _first_state(key, value)
        states, outputs = [], []
        for part in _parts(layout):
            states.append(state)
            chunks = _inside([_cut(each, part) for each in rows], layout.sees[part])
            before, state, corrections = _through(chunks, state)
            outputs.append(chunks.queries @ before + chunks.scores @ corrections)
        ctx.save_for_backward(*rows, *states)
        return _joined((torch.cat(outputs).unflatten(1, value.shape[1:4]),), value).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, layout = ctx.saved_tensors, ctx.layout
        rows, states = saved[:5], saved[5:]
        grads: list[tuple[Tensor, ...]] = []
        grad_state = torch.zeros_like(states[0])
        for part, state in reversed(list(zip(_parts(layout), states, strict=True))):
            inputs = [_cut(each, part).detach().requires_grad_() for each in rows]
            with torch.enable_grad():
                chunks = _inside(inputs, layout.sees[part])
            grad_outputs = upcast(_cut(grad, part)).flatten(1, 3)
            grad_chunks, grad_state = _backward_through(
                _Chunks(*(each.detach() for each in chunks)), state, grad_outputs, grad_state
            )
            grads.append(torch.autograd.grad(chunks, inputs, grad_chunks))
        by_row = zip(*reversed(grads), strict=True)
        return *(_joined(parts, row) for parts, row in zip(by_row, rows, strict=True)), None


def _parts(layout: SequenceLayout) -> list[slice]:
    """Return the groups of chunks that are computed together."""
    size = _CHUNKS_AT_ONCE
    return [slice(first, first + size) for first in range(0, len(layout.sees), size)]


def _first_state(key: Tensor, value: Tensor) -> Tensor:
    """Return a zero state [H, d, e]."""
    b, k, r, e = value.shape[1:]
    return upcast(value.new_zeros(())).new_zeros(b * k * r, key.shape[-1], e)


def _cut(row: Tensor, part: slice) -> Tensor:
    """Cut tokens [s, b, k, r or 1, ...] into the chunks of a part: [N, b, k, r or 1, C, ...], padded with zeros."""
    tokens = row[part.start * CHUNK : part.stop * CHUNK]
    missing = -len(tokens) % CHUNK
    if missing:
        tokens = torch.cat((tokens, tokens.new_zeros(missing, *tokens.shape[1:])))
    return tokens.unflatten(0, (-1, CHUNK)).movedim(1, 4).contiguous()  # otherwise each product would copy it


def _joined(parts: tuple[Tensor, ...], row: Tensor) -> Tensor:
    """Undo `_cut` for all parts of a row."""
    return torch.cat(parts).movedim(4, 1).flatten(0, 1)[: len(row)]


def _normalize(channels: Tensor) -> Tensor:
    return channels * torch.rsqrt(channels.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def _inside(rows: Sequence[Tensor], sees: Tensor) -> _Chunks:
    """Compute the results of chunks that do not depend on the state.

    Args:
        rows: query, key, value, decay and beta, from `_cut`.
        sees: bool [N, C, C + 1], see SequenceLayout.
    """
    query, key, value, decay, beta = rows
    query, key = (_normalize(upcast(each)) for each in (query, key))
    query = query * key.shape[-1] ** -0.5
    value, decay, beta = (upcast(each) for each in (value, decay, beta))
    between = _decay_between(decay, sees)
    between, from_start = between[..., :-1], between[..., -1:]
    to_end, kept = between[..., -1, :, None], from_start[..., -1:, :]
    system = beta[..., None] * (key @ key.mT) * between
    wanted = torch.cat((beta[..., None] * value, (beta[..., None] * from_start) * key), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    corrections, readings = solved.split((value.shape[-1], key.shape[-1]), -1)
    whole = corrections, readings, (query @ key.mT) * between, query * from_start, key * to_end, kept
    return _Chunks(*(each.flatten(1, 3) for each in whole))


def _decay_between(decay: Tensor, sees: Tensor) -> Tensor:
    """Return the decay factor at each token of each earlier token and of the state before the chunk: [..., C, C + 1].

    Each exponent is summed separately. Differences of prefix sums would have the rounding errors of these, and in the
    gradient large terms would cancel if decays are fast.

    Args:
        decay: [N, b, k, r, C].
        sees: bool [N, C, C + 1].
    """
    later = torch.nn.functional.pad(decay.new_ones(CHUNK, CHUNK).tril(-1), (0, 1), value=1.0)
    # Not cumsum, which has no deterministic CUDA kernel in torch.
    exponents = (decay.new_ones(CHUNK, CHUNK).tril() * decay[..., None, :]) @ later
    return exponents.masked_fill(~sees[:, None, None, None], -torch.inf).exp()


def _through(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the state through the chunks.

    Returns:
        The states before the chunks, [N, H, d, e]; the state after them; and the corrections X, [N, H, C, e].
    """
    before = state.new_empty(len(chunks.keys), *state.shape)
    corrections = torch.empty_like(chunks.corrections)
    for number, (wanted, readings, keys, decay) in enumerate(
        zip(chunks.corrections, chunks.readings, chunks.keys, chunks.decay, strict=True)
    ):
        before[number] = state
        torch.baddbmm(wanted, readings, state, alpha=-1, out=corrections[number])
        state = torch.baddbmm(decay * state, keys.mT, corrections[number])
    return before, state, corrections


def _backward_through(
    chunks: _Chunks, state: Tensor, grad_outputs: Tensor, grad_state: Tensor
) -> tuple[_Chunks, Tensor]:
    """Return the gradients of the chunks' state-independent results, and of the state before the first chunk.

    Args:
        state: before the first chunk.
        grad_outputs: [N, H, C, e].
        grad_state: of the state after the last chunk.
    """
    before, _, corrections = _through(chunks, state)
    grad_corrections, grad_after = chunks.scores.mT @ grad_outputs, torch.empty_like(before)
    from_outputs = chunks.queries.mT @ grad_outputs
    for number in reversed(range(len(before))):
        grad_after[number] = grad_state
        grad_corrections[number].baddbmm_(chunks.keys[number], grad_state)
        kept = torch.addcmul(from_outputs[number], chunks.decay[number], grad_state)
        grad_state = torch.baddbmm(kept, chunks.readings[number].mT, grad_corrections[number], alpha=-1)
    grads = _Chunks(
        corrections=grad_corrections,
        readings=-(grad_corrections @ before.mT),
        scores=grad_outputs @ corrections.mT,
        queries=grad_outputs @ before.mT,
        keys=corrections @ grad_after.mT,
        decay=(before * grad_after).sum((-2, -1), keepdim=True),
    )
    return grads, grad_state
