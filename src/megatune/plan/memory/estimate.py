"""Memory of each pipeline stage's fullest rank, by part."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatune.plan.case import Case
from megatune.plan.memory.activations import activation_bytes
from megatune.plan.memory.parameters import state_bytes
from megatune.plan.memory.workspace import workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of the fullest rank of one pipeline stage at the fullest moment of a step.

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
        framework: the device's context, the library's handles, fragments between tensors.
    """

    stage: int
    num_layers: int
    weights: int
    gradients: int
    master_weights: int
    optimizer_state: int
    activations: int
    logits_and_loss: int
    communication: int
    expert_imbalance: int
    framework: int

    @property
    def total(self) -> int:
        """All parts, in bytes."""
        return sum(getattr(self, part) for part in MEMORY_PARTS)


MEMORY_PARTS = tuple(field.name for field in fields(StageMemory) if field.name not in ("stage", "num_layers"))


def stage_memory(case: Case) -> tuple[StageMemory, ...]:
    """Memory of each pipeline stage, the first stage first."""
    return tuple(memory_of_stage(case, stage) for stage in range(case.settings.parallel.pipeline_model_parallel_size))


def memory_of_stage(case: Case, stage: int) -> StageMemory:
    """Memory of one pipeline stage."""
    state, kept, work = state_bytes(case, stage), activation_bytes(case, stage), workspace_bytes(case, stage)
    return StageMemory(
        stage=stage,
        num_layers=state.num_layers,
        weights=state.weights,
        gradients=state.gradients,
        master_weights=state.master_weights,
        optimizer_state=state.optimizer_state,
        activations=kept.activations,
        logits_and_loss=kept.logits_and_loss,
        expert_imbalance=kept.expert_imbalance,
        communication=work.communication,
        framework=work.framework,
    )
