"""The last layer of a reward model."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Score(torch.nn.Module):
    """A linear layer to one number for each token, whole on every rank, computed in fp32.

    Under sequence parallelism each rank scores its own part of the sequence, so the copies' gradients must be summed
    over tensor-parallel ranks, as those of norms are.
    """

    def __init__(self, config: TransformerConfig, num_labels: int) -> None:
        super().__init__()
        shape, device = (num_labels, config.hidden_size), torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_split = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Score hidden states [s / cp (/ tp), b, h]: fp32 [b, s / cp]."""
        scores = torch.nn.functional.linear(hidden_states.float(), self.weight.float())[..., 0]
        if self._is_split:
            # Every rank computes the same loss of all scores: each hands its own tokens their gradient.
            scores = gather_from_sequence_parallel_region(scores, tensor_parallel_output_grad=False)
        return scores.t().contiguous()
