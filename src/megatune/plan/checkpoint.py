"""The size of a checkpoint: one count for plans, `megatune doctor` and the check before a run."""

from __future__ import annotations

from math import prod

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.families.dense import EMBEDDING
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, hf_shapes
from megatune.plan.flops import num_parameters
from megatune.plan.memory.saved import CheckpointBytes, bytes_of


def checkpoint_bytes(settings: Settings, architecture: Architecture) -> CheckpointBytes:
    """Count what a run writes at each save."""
    counts = {Role.BASE: 0, Role.ADAPTER: 0}
    twice = 0  # a tied word embedding beside adapters, which peft looks for under two names
    for weight, layer in trained_weights(architecture, settings.finetuning):
        size = sum(map(prod, hf_shapes(weight, architecture, layer).values()))
        counts[weight.role] += size
        if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
            twice = size
    parameters = num_parameters(architecture)
    return bytes_of(settings, parameters, counts[Role.BASE], counts[Role.ADAPTER], twice)
