"""The size of a checkpoint: one count for plans, `megatune doctor` and the check before a run."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.families.dense import EMBEDDING
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, hf_shapes
from megatune.plan.flops import num_parameters

_FP32 = 4


class CheckpointBytes(NamedTuple):
    """Bytes of a checkpoint's tensors: of its model, or adapters, and of its training state."""

    model: int
    training: int


def bytes_of(
    settings: Settings, parameters: int, weights: int, adapters: int, twice: int = 0, matrices: int = 0
) -> CheckpointBytes:
    """Count from numbers of elements.

    Args:
        parameters: of the model.
        weights: of `parameters`, those that are trained.
        adapters: of adapters, which are fp32 and so their own master weights.
        twice: of `weights`, those that a file of adapters has under two names.
        matrices: of `weights`, those of matrices that Muon orthogonalizes, or fewer for an upper bound.
    """
    itemsize = 2 if settings.precision.params_dtype != "float32" else _FP32
    if settings.finetuning.finetuning_type == "lora":
        model = _FP32 * adapters + itemsize * (weights + twice)
    else:  # in Megatron-Core's form, too, where it is asked for
        model = itemsize * parameters * (2 if settings.checkpoint.save_format == "torch_dist" else 1)
    if settings.checkpoint.save_only_model:
        return CheckpointBytes(model, 0)
    optimizer = settings.optimizer
    # All are written in fp32, whatever exp_avg_dtype says; master weights only where something trained is not fp32.
    kinds = int(bool(optimizer.sgd_momentum)) if optimizer.optimizer == "sgd" else 2
    less = matrices if optimizer.optimizer == "muon" else 0
    kinds += int(itemsize < _FP32 and weights > 0)
    return CheckpointBytes(model, _FP32 * ((weights + adapters) * kinds - less))


def checkpoint_bytes(settings: Settings, architecture: Architecture) -> CheckpointBytes:
    """Count what a run writes at each save."""
    counts = {Role.BASE: 0, Role.ADAPTER: 0}
    matrices = 0
    twice = 0  # a tied word embedding beside adapters, which peft looks for under two names
    for weight, layer in trained_weights(architecture, settings.finetuning):
        size = sum(map(prod, hf_shapes(weight, architecture, layer).values()))
        counts[weight.role] += size
        matrices += size if weight.is_matrix else 0
        if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
            twice = size
    parameters = num_parameters(architecture)
    return bytes_of(settings, parameters, counts[Role.BASE], counts[Role.ADAPTER], twice, matrices)
