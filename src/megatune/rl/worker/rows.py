"""Samples to micro-batches, and what micro-batches gave back to samples.

What belongs to a token that was sampled lies where that token is predicted: one place before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from megatune.data.batches import Batch, Collator, Share
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn
from megatune.engine.sequences import ROUTING
from megatune.rl.samples import Rollouts

# By number of the sample: fp32 [r], values of its response's tokens.
Answer = dict[int, np.ndarray]


def document(rollouts: Rollouts, sample: int) -> Document:
    """Return a sample as the engine takes it: what was sampled is trained."""
    tokens, places = np.asarray(rollouts.tokens[sample], np.int64), rollouts.sampled(sample)
    labels = np.full_like(tokens, IGNORE_INDEX)
    labels[places] = tokens[places]
    shown = rollouts.shown[sample] if rollouts.shown else None
    return Document(tokens, labels, shown.pictures if shown is not None else ())


def extras(
    rollouts: Rollouts, samples: Sequence[int], per_token: Iterable[str], per_sample: Iterable[str]
) -> dict[str, ExtraColumn]:
    """Return values of some samples, by name.

    Raises:
        KeyError: there are none of this name.
    """
    found: dict[str, ExtraColumn] = {}
    lengths = [len(rollouts.tokens[sample]) for sample in samples]
    starts = np.cumsum([0, *lengths])
    for name in per_token:
        column = np.zeros(starts[-1], np.float32)
        for sample, start in zip(samples, starts, strict=False):
            column[start + rollouts.sampled(sample) - 1] = rollouts.per_token[name][sample]
        found[name] = ExtraColumn("token", column)
    for name in per_sample:
        values = np.asarray(rollouts.per_sample[name], np.float32)[np.asarray(samples, np.int64)]
        found[name] = ExtraColumn("document", values)
    return found


def routing(rollouts: Rollouts, samples: Sequence[int]) -> ExtraColumn:
    """Return the experts that the rollout engine chose, each number + 1: int16 [tokens, layers, k]. It did not compute
    the last token of a sample, whose routers choose by themselves.

    Raises:
        ValueError: the engine did not say.
    """
    if rollouts.routing is None:
        raise ValueError("router_replay: the rollout engine returned no routing")
    parts = []
    for sample in samples:
        chosen = rollouts.routing[sample]
        if len(chosen) != len(rollouts.tokens[sample]) - 1:
            raise ValueError(f"routing of {len(chosen)} tokens for a sample of {len(rollouts.tokens[sample])}")
        parts.append(np.pad(chosen.astype(np.int16) + 1, ((0, 1), (0, 0), (0, 0))))
    empty = np.zeros((0, *rollouts.routing[0].shape[1:]), np.int16)
    return ExtraColumn("token", np.concatenate([empty, *parts]))


def batches(
    rollouts: Rollouts,
    shares: Sequence[Sequence[Sequence[int]]],
    rank: int,
    collator: Collator,
    *,
    same_length: bool,
    per_token: Iterable[str] = (),
    per_sample: Iterable[str] = (),
    replay: bool = False,
    share: Share | None = None,
) -> list[Batch]:
    """Make a data-parallel rank's micro-batches.

    Args:
        shares: numbers of samples, by rank and micro-batch.
        same_length: all micro-batches of all ranks have one length, as pipelines need.
        replay: routers choose the experts that the rollout engine chose.
        share: which pictures this rank decodes; None for none of them.
    """
    lengths = rollouts.lengths

    def columns(samples: Sequence[int]) -> dict[str, ExtraColumn]:
        found = extras(rollouts, samples, per_token, per_sample)
        return {**found, ROUTING: routing(rollouts, samples)} if replay else found

    def needed(samples: Sequence[int]) -> int:
        return collator.length([lengths[sample] for sample in samples])

    longest = max(needed(samples) for of_rank in shares for samples in of_rank)
    return [
        collator(
            [document(rollouts, sample) for sample in samples],
            longest if same_length else needed(samples),
            columns(samples),
            share,
        )
        for samples in shares[rank]
    ]


def answer(rollouts: Rollouts, samples: Sequence[int], batch: Batch, values: Tensor) -> Answer:
    """Take what was computed of a micro-batch's samples, fp32 [b, s], to their responses."""
    flat = values.float().cpu().numpy().reshape(-1)
    width = batch.input_ids.shape[1]
    found: Answer = {}
    for place, sample in enumerate(samples):
        start = place * width if batch.cu_seqlens is None else int(batch.cu_seqlens[place])
        found[sample] = flat[start + rollouts.sampled(sample) - 1]
    return found


def merged(answers: Iterable[Answer], rollouts: Rollouts) -> list[np.ndarray]:
    """Put the answers of a role's ranks together: fp32 [r] of each sample, in order.

    Raises:
        ValueError: nobody has answered for a sample.
    """
    found: Answer = {}
    for each in answers:
        found |= each
    missing = sorted(set(range(len(rollouts))) - found.keys())
    if missing:
        raise ValueError(f"no rank answered for {len(missing)} of {len(rollouts)} samples, such as {missing[0]}")
    return [found[sample] for sample in range(len(rollouts))]
