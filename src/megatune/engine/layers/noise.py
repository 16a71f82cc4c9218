"""Noise on word embeddings in training (NEFTune, arXiv:2310.05914), computed without generator state: a sequence gets
the same noise in every parallel layout, after a resume, and on every device.

Random numbers are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Each token has its own stream, with one
number per channel. Products and sums of int64 wrap around.

Legend: b rows, s tokens of a whole row, n tokens of this rank, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.engine.layers.cross_entropy import chunks
from megatune.engine.sequences import MicroBatch

_STEP = 0x9E3779B97F4A7C15 - 2**64  # increment of a stream's state: 2^64 divided by the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_BITS = 24  # random bits that are used: as many as fp32 represents exactly


def noise_keys(batch: MicroBatch, seed: int, step: int) -> Tensor:
    """Return the key of each token's noise, int64 [b, s], on the host. It depends on the seed, the step (from 0), the
    tokens of its sequence, and its position there."""
    lengths, positions = torch.tensor(batch.lengths), batch.position_ids
    spans = torch.full_like(lengths, positions.shape[1]) if batch.cu_seqlens is None else batch.cu_seqlens.long().diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(spans).view_as(positions)
    tokens = _mixed(_mixed(batch.input_ids) + positions).where(positions < lengths[sequence], 0)
    texts = torch.zeros_like(lengths).index_add_(0, sequence.flatten(), tokens.flatten())
    of_step = _mixed(_mixed(torch.tensor(seed)) + step)
    return _mixed(_mixed(texts + of_step)[sequence] + positions)


def with_noise(embeddings: Tensor, keys: Tensor, largest: Tensor) -> Tensor:
    """Add uniform noise from -largest to largest to each channel.

    Args:
        embeddings: [n, b, h].
        keys: int64 [n, b], from `noise_keys`.
        largest: fp32 [n, b], or [1, b], [n, 1].
    """
    noise = torch.empty_like(embeddings, requires_grad=False)
    h = noise.shape[-1]
    flat, keys, largest = noise.view(-1, h), keys.reshape(-1, 1), largest.expand_as(keys).reshape(-1, 1)
    channels = torch.arange(h, device=keys.device)
    for chunk in chunks(len(flat), 4 * h):  # the chunk size accounts for two int64 temporaries
        numbers = _mixed(keys[chunk] + channels * _STEP) >> (64 - _BITS)
        flat[chunk] = numbers.float().mul_(largest[chunk] / 2 ** (_BITS - 1))
    return embeddings + noise


def _mixed(states: Tensor) -> Tensor:
    """Advance SplitMix64 states by one step, and return their outputs, int64."""
    found = states + _STEP
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        found = (found ^ _shifted(found, shift)) * factor
    return found ^ _shifted(found, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own shift extends the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
