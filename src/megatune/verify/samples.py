"""Token rows to compare on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatune.data.packing import pack
from megatune.data.rows import IGNORE_INDEX

# fp16's smallest numbers are 6e-8: gradients of a mean loss need some room below, and none above. All sides multiply
# their loss by this where they compute in fp16; relative errors are the same.
FP16_LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of tokens: labels[t] belongs to input_ids[t] as in Transformers, -100 where it is not trained."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


def random_samples(
    vocab_size: int, lengths: Sequence[int], seed: int = 0, *, padding: int | None = None
) -> list[Sample]:
    """Return rows of random tokens; up to a half of each row, its first part, is not trained.

    Args:
        padding: a token that must not occur: Transformers gives the embedding of config.json's pad_token_id no
            gradient, and text holds none.
    """
    generator = random.Random(seed)
    tokens_of_text = [token for token in range(vocab_size) if token != padding]
    samples = []
    for length in lengths:
        tokens = tuple(generator.choice(tokens_of_text) for _ in range(length))
        untrained = generator.randrange(length // 2 + 1)
        samples.append(Sample(tokens, (IGNORE_INDEX,) * untrained + tokens[untrained:]))
    return samples


def uneven_lengths(num_samples: int, longest: int) -> list[int]:
    """Lengths from `longest` down to half of it, so that micro-batches hold different numbers of trained tokens."""
    return [longest - index * (longest // 2) // num_samples for index in range(num_samples)]


def sample_rows(samples: Sequence[Sample], *, packed: bool) -> list[list[int]]:
    """Numbers of the samples of each row: one, or, packed, as many as fit into twice the longest."""
    if not packed:
        return [[number] for number in range(len(samples))]
    lengths = [len(sample.input_ids) for sample in samples]
    numbers, starts = pack(lengths, 2 * max(lengths), seed=0)
    return [row.tolist() for row in np.split(numbers, starts[1:-1])]
