"""The loss of pretraining and supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

IGNORED = -100


def token_sum(token_losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the loss over trained tokens, which is divided once by the global number of them.

    Averages of micro-batches are not the average of the batch where they hold different numbers of trained tokens;
    this is what Transformers computes with num_items_in_batch.

    Args:
        token_losses: fp32 [b, s].
        labels: int64 [b, s]; IGNORED where a token is not trained.

    Returns:
        The sum, fp32 [], and the number of trained tokens, int64 [].
    """
    trained = labels != IGNORED
    return (token_losses * trained).sum(), trained.sum()
