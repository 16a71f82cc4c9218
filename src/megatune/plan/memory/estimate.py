"""Memory of each pipeline stage's fullest rank, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from megatune.plan.case import Case
from megatune.plan.memory.activations import ActivationBytes, stage_activations
from megatune.plan.memory.parameters import StageState, stage_states
from megatune.plan.memory.workspace import Workspace, workspace_bytes


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
        framework: the device's context and the libraries; on a CPU the process itself.
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
    stages = range(case.settings.parallel.pipeline_model_parallel_size)
    return tuple(
        StageMemory(
            stage=stage,
            num_layers=state.num_layers,
            weights=state.weights,
            gradients=state.gradients,
            master_weights=state.master_weights,
            optimizer_state=state.optimizer_state,
            activations=(parts := kept.parts).activations,
            logits_and_loss=parts.logits_and_loss,
            expert_imbalance=parts.expert_imbalance,
            communication=work.communication,
            framework=work.framework,
        )
        for stage, (state, kept, work) in enumerate(_parts(case, stages))
    )


def fullest_bytes(case: Case, stages: Sequence[int]) -> int:
    """Return the largest `StageMemory.total` of these stages, without its parts."""
    return max(
        state.weights + state.gradients + state.master_weights + state.optimizer_state + kept.total + work.communication
        + work.framework
        for state, kept, work in _parts(case, stages)
    )  # fmt: skip


def _parts(case: Case, stages: Iterable[int]) -> Iterator[tuple[StageState, ActivationBytes, Workspace]]:
    workspaces = (workspace_bytes(case, stage) for stage in stages)
    return zip(stage_states(case, stages), stage_activations(case, stages), workspaces, strict=True)
