"""How much a model computes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from megatune.architecture import Architecture
from megatune.families import FAMILIES
from megatune.families.weights import hf_shape

# Forward pass once, backward pass twice (towards the inputs, towards the weights).
_PASSES = 3


def num_parameters(architecture: Architecture) -> int:
    """Parameters of the model as its checkpoint holds them: tied embeddings once, no padding."""
    return sum(
        prod(hf_shape(tensor, architecture)) * (architecture.num_layers if weight.per_layer else 1)
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        for tensor in weight.hf
    )


def num_matmul_parameters(architecture: Architecture) -> int:
    """Parameters that every token is multiplied with: all matrices but the word embedding, which is looked up. The
    output layer counts, tied or not."""
    per_layer = sum(
        prod(hf_shape(tensor, architecture))
        for weight in FAMILIES[architecture.model_type].weights
        if weight.per_layer
        for tensor in weight.hf
        if len(tensor.shape) == 2
    )
    return per_layer * architecture.num_layers + architecture.vocab_size * architecture.hidden_size


def train_flops(architecture: Architecture, lengths: Iterable[int]) -> float:
    """Model floating-point operations of a training step over rows of these lengths, in FLOP.

    Counted as the field does for model FLOP/s utilization (arXiv:2204.02311): a multiply and an add are two, nothing
    recomputed counts, and of causal attention only the half that is not masked.

    Args:
        lengths: tokens of each row, without padding.
    """
    lengths = list(lengths)
    matmuls = 2 * num_matmul_parameters(architecture) * sum(lengths)
    # Scores and their product with the values: 2 · 2 · s² · query size, half of it under the causal mask.
    attention = 2 * architecture.num_layers * architecture.query_size * sum(length * length for length in lengths)
    return float(_PASSES * (matmuls + attention))
