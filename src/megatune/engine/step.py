"""Forward and backward over the micro-batches of one step, through Megatron-Core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatune.engine.sequences import MicroBatch, share, whole_rows

# Token losses fp32 [b, s] and labels int64 [b, s] -> the sum over trained tokens and their number, both scalars.
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_backward(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    forward_only: bool = False,
    raised_hand: bool = False,
) -> Tensor:
    """Run all micro-batches and leave the gradient of the mean loss over all trained tokens of all ranks in main_grad.

    Args:
        batches: this data-parallel rank's micro-batches; with pipeline parallelism all of one shape.
        forward_only: evaluate, without gradients.
        raised_hand: something this rank wants all ranks to know, sent along with the loss.

    Returns:
        fp64 [3] on the device, equal on all ranks: the sum of the loss, the number of trained tokens, and how many
        ranks raised their hand.
    """
    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
    b, s = batches[0].input_ids.shape
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_function),
        data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(batches),
        seq_length=s,
        micro_batch_size=b,
        forward_only=forward_only,
    )
    total = torch.zeros(3, dtype=torch.float64, device=torch.cuda.current_device())
    # Tensor-parallel ranks of the last stage all hold the loss; one of them reports it.
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        total[:2] = torch.stack(reports).sum(0)
    total[2] = float(raised_hand)
    torch.distributed.all_reduce(total)
    return total


def logits(model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Logits of each micro-batch, [b, s, padded vocabulary / tp] of this rank; empty before the last pipeline stage.

    Args:
        batches: of one shape; with virtual stages a multiple of the pipeline's size of them.
    """
    found: list[Tensor] = []

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
        mine = share(next(iterator))

        def collect(output: Tensor, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            found.append(whole_rows(output, mine.sequences.boundaries))
            return output

        return chunk(input_ids=mine.input_ids, sequences=mine.sequences), collect

    b, s = batches[0].input_ids.shape
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(batches),
        seq_length=s,
        micro_batch_size=b,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return found


def _forward_step(
    loss_function: LossFunction, iterator: Iterator[MicroBatch], chunk: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    mine = share(next(iterator))
    output = chunk(input_ids=mine.input_ids, sequences=mine.sequences, labels=mine.labels)
    return output, partial(_loss, loss_function, mine.labels)


def _loss(loss_function: LossFunction, labels: Tensor, token_losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss, num_tokens = loss_function(token_losses, labels)
    # The schedule scales the loss in place for fp16; what is reported must be a copy.
    report = torch.stack((loss.detach().double(), num_tokens.double()))
    return loss, num_tokens.int(), report
