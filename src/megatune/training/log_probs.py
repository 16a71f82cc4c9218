"""Log-probabilities of whole documents, by passes that only run forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatune.data.batches import Batch
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.engine import device, groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.model import Chunk
from megatune.engine.sequences import LocalBatch, MicroBatch, document_sums
from megatune.engine.step import ObjectiveOutput, evaluate
from megatune.progress import Progress


class _LogProbs:
    """Keeps log-probabilities of documents, and asks for nothing to be reported: an objective without a loss.

    They are summed as losses of pairs sum them: where policy and reference are the same model, so are these, to the
    last digit.
    """

    metric_names = ()

    def __init__(self) -> None:
        self.of_micro_batches: list[Tensor] = []

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        sums = document_sums(-token_losses.double(), batch.sequences)
        self.of_micro_batches.append(sums.to(token_losses.dtype))
        return ObjectiveOutput(token_losses.new_zeros(()), replicated=True)


def step_log_probs(model: list[Chunk], batches: Sequence[Batch]) -> list[Tensor]:
    """Return log p(labels) of each document of each micro-batch, fp32 [D]; none before the last pipeline stage.
    Collective.

    Args:
        model: computed in eval mode.
        batches: this data-parallel rank's micro-batches of a step.
    """
    found = _LogProbs()
    evaluate(model, [batches], found)
    return found.of_micro_batches


def row_log_probs(
    model: list[Chunk],
    steps: PreparedSteps,
    loader: StepLoader,
    place: RankCoordinates,
    *,
    readable: Callable[[list[Batch]], list[Batch]],
    on_step: Callable[[int], None],
) -> np.ndarray:
    """Compute log p(labels) of every document of all rows: fp32 [documents], on every rank. Collective.

    Args:
        steps, loader: each row once.
        readable: leaves what cannot be computed out of a step's micro-batches.
        on_step: called before each step, with its number.
    """
    values = torch.zeros(len(steps.rows.spans), dtype=torch.float32, device=device.current())
    found = _LogProbs()
    # Tensor- and context-parallel ranks hold the same values.
    keeps = place.is_last_stage and place.tp_rank == place.cp_rank == 0
    progress = Progress("reference", len(steps.rows), "rows", shows=place.rank == 0)

    def batches() -> Iterator[list[Batch]]:
        for step, of_step in loader:
            on_step(step)
            yield readable(of_step)
            # What was yielded is computed now.
            for rows, own in zip(loader.places(step), found.of_micro_batches, strict=False):
                numbers = steps.rows.document_numbers(steps.row_ids(step)[rows.start : rows.stop])
                if keeps:  # documents behind those of the rows are padding
                    values[device.send(torch.from_numpy(numbers))] = own[: len(numbers)]
            found.of_micro_batches.clear()
            progress.to(min((step + 1) * steps.global_batch_size, len(steps.rows)))

    with progress:
        evaluate(model, batches(), found)
    groups.add_up(values)
    return values.cpu().numpy()
