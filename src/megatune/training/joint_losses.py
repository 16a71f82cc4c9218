"""The pass without gradient that comes before a step of losses that look at all its pairs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from megatune.data.batches import Batch, DocumentValues
from megatune.engine import groups
from megatune.engine.model import Chunk
from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.joint_losses import expansion
from megatune.objectives.pair_losses import Pairs
from megatune.objectives.preference import EXPANSION, Preference, pairs_of
from megatune.training.train_step import evaluate


def with_joint_losses(model: list[Chunk], batches: Sequence[Batch], objective: Preference) -> list[Batch]:
    """Give micro-batches what the objective's joint losses need to know of the step's other pairs; collective.

    Costs a forward pass. It is without dropout: the losses are exact where there is none.

    Args:
        model: pipeline chunks; computed in eval mode.
        batches: this data-parallel rank's micro-batches of one step, with log-probabilities of the reference.
    """
    found = _PairsOfStep(objective)
    evaluate(model, [batches], found)
    if not found.values:
        return list(batches)  # before the last pipeline stage nothing is computed of pairs
    valid = torch.cat(found.valid)
    by_rank = groups.gather_rows(torch.cat(found.values)[valid])
    pairs = Pairs(*torch.cat(by_rank).unbind(1))
    before = sum(map(len, by_rank[: groups.data_parallel_group().rank()]))
    of_pairs = expansion(pairs, objective.shape, objective.joint)
    mine = of_pairs.new_zeros(len(valid), *of_pairs.shape[1:])
    mine[valid] = of_pairs[before : before + int(valid.sum())]
    of_batches = mine.flatten(0, 1).split([2 * len(each) for each in found.valid])
    return [
        replace(batch, extras={**batch.extras, EXPANSION: DocumentValues(values)})
        for batch, values in zip(batches, of_batches, strict=True)
    ]


@dataclass
class _PairsOfStep:
    """Takes the place of an objective, and keeps its pairs.

    Attributes:
        values: of each micro-batch, the fields of `Pairs`, [P, fields].
        valid: of each, bool [P].
    """

    objective: Preference
    values: list[Tensor] = field(default_factory=list)
    valid: list[Tensor] = field(default_factory=list)
    metric_names: tuple[str, ...] = ()

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return self.objective.normalizer(batch)

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        pairs, valid = pairs_of(token_losses, batch)
        self.values.append(torch.stack([getattr(pairs, each.name) for each in fields(pairs)], 1))
        self.valid.append(valid)
        return ObjectiveOutput(token_losses.sum(), replicated=True)
