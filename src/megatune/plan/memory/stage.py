"""Bytes of the fullest rank of a pipeline stage, by part: what every fold of memory returns its share of."""

from __future__ import annotations

from typing import NamedTuple


class StageMemory(NamedTuple):
    """Bytes of the fullest rank of one pipeline stage at the fullest moment of a step; 0 for what is not counted.

    Attributes:
        stage: from 0.
        num_layers: of the decoder, over all its virtual stages.
        weights: parameters in the dtype that the model computes in, and buffers.
        gradients: the buffers that they are added up in.
        master_weights: the optimizer's fp32 copy; 0 where the model computes in fp32.
        optimizer_state: Adam's averages or SGD's momentum, where they are on the device.
        activations: kept for the backward pass by all micro-batches in flight, and what the pass adds to them.
        logits_and_loss: the output layer's at their fullest.
        communication: buffers of exchanges, of the communication library's among them.
        expert_imbalance: activations of the fullest expert rank beyond those of an even share.
        framework: the device's context and the libraries; on a CPU the process itself, and what async_save copies.
        host: of the host's memory, and so of no other part: optimizer state that a rank keeps there.
    """

    stage: int = 0
    num_layers: int = 0
    weights: int = 0
    gradients: int = 0
    master_weights: int = 0
    optimizer_state: int = 0
    activations: int = 0
    logits_and_loss: int = 0
    communication: int = 0
    expert_imbalance: int = 0
    framework: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """All of `MEMORY_PARTS`, in bytes."""
        return sum(self[2:-1])

    @property
    def exact(self) -> int:
        """Bytes of weights, gradients and optimizer, which are exact: a rank never holds less."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state


MEMORY_PARTS = StageMemory._fields[2:-1]  # neither its number and layers, nor what the host has


def sum_memory(*shares: StageMemory) -> StageMemory:
    """Return what a stage holds of which each of these counts some parts; one of them has its number."""
    return StageMemory(*map(sum, zip(*shares, strict=True)))
