"""Memory of the fullest rank of a pipeline stage, by part."""

from __future__ import annotations

from typing import NamedTuple


class StageMemory(NamedTuple):
    """Peak bytes of the fullest rank of one pipeline stage; 0 for parts that are not counted.

    Attributes:
        stage: index, from 0.
        num_layers: of the decoder, over all virtual stages.
        weights: parameters in the model's dtype, and buffers.
        gradients: the gradient buffers.
        master_weights: the optimizer's fp32 copy; 0 for an fp32 model.
        optimizer_state: Adam's moments or SGD's momentum, if on the device.
        activations: kept for the backward pass by all micro-batches in flight, and temporaries of a pass.
        logits_and_loss: those of the output layer and the loss at their peak.
        communication: communication buffers, including those of the library.
        expert_imbalance: activations of the fullest expert rank beyond an even share.
        framework: the device's context and libraries; on a CPU the process itself, and copies of async_save.
        host: host memory, not part of the total: optimizer state of a rank.
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
        """The sum of `MEMORY_PARTS`."""
        return sum(self[2:-1])

    @property
    def exact(self) -> int:
        """Bytes of weights, gradients and optimizer state, which are exact: a rank never holds less."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state


MEMORY_PARTS = StageMemory._fields[2:-1]  # without stage, num_layers and host


def sum_memory(*shares: StageMemory) -> StageMemory:
    """Sum up the parts of one stage; only one of the arguments has `stage` and `num_layers`."""
    return StageMemory(*map(sum, zip(*shares, strict=True)))
