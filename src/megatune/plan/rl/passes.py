"""The passes of a role with a model of the engine, as cases of the planner: what it holds, and its seconds."""

from __future__ import annotations

import math
from dataclasses import replace

from megatune.config.rl.settings import ModelRole
from megatune.config.settings import ParallelSettings, Settings
from megatune.plan.case import Case
from megatune.plan.changes.variation import with_settings
from megatune.plan.memory.activations import layer_memory
from megatune.plan.memory.estimate import COMMUNICATOR, StageMemory, workspace_bytes
from megatune.plan.memory.parameters import state_bytes
from megatune.plan.memory.tensors import stage_chunks
from megatune.plan.operators.decoder import embedding, head, inputs
from megatune.plan.operators.operator import chain
from megatune.plan.operators.shapes import Shapes, frozen, of_layer, shapes_of
from megatune.plan.rl.question import RLQuestion
from megatune.plan.time import step_time


def training_case(question: RLQuestion, role: ModelRole, *, longest: bool) -> Case:
    """Return one update of a role.

    Args:
        longest: all samples are as long as any may be, which is what memory is planned for; else as the mean one.
    """
    batch = role.settings.batch
    rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    limit = role.packed_tokens_train or role.dynamic_tokens_train
    return _case(question, role, rows, batch.per_device_train_batch_size, limit, longest=longest)


def forward_case(question: RLQuestion, role: ModelRole, *, longest: bool) -> Case:
    """Return the forward passes over the samples of a step, see `training_case`."""
    rows = -(-question.settings.samples_per_step // dp_size(role))
    limit = role.packed_tokens_forward or role.dynamic_tokens_forward
    return _case(question, role, rows, role.infer_batch_size, limit, longest=longest)


def dp_size(role: ModelRole) -> int:
    """Return how many processes of a role compute samples of their own."""
    return max(1, len(role.devices) // layout_of(role).model_parallel_size)


def num_updates(question: RLQuestion, role: ModelRole) -> float:
    """Return updates of a step."""
    batch = role.settings.batch
    rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * dp_size(role)
    return question.settings.samples_per_step * question.settings.algorithm.ppo_epochs / rows


def layout_of(role: ModelRole) -> ParallelSettings:
    """Return a role's layout; Transformers' models are whole on every device."""
    if role.strategy == "megatron":
        return role.settings.parallel
    sizes = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
    one = {f"{name}_{'model_' * (name != 'context')}parallel_size": size for name, size in sizes.items()}
    none = {"virtual_pipeline_model_parallel_size": None, "sequence_parallel": False}
    return role.settings.parallel.model_copy(update={**one, **none})


def _case(
    question: RLQuestion,
    role: ModelRole,
    samples: int,
    micro_batch: int,
    limit: int | None,
    *,
    longest: bool,
) -> Case:
    """Return the micro-batches of a data-parallel process.

    Args:
        samples: of the process.
        micro_batch: rows, where `limit` is None.
        limit: tokens of a micro-batch.
    """
    lengths = question.lengths
    if limit is not None:  # what is bounded by tokens is packed
        rows, limit = 1, max(limit, lengths.longest)
        count = max(1, math.ceil(samples * lengths.mean / limit))
        length = float(limit) if longest else samples * lengths.mean / count
    else:
        rows = min(micro_batch, samples)
        count = math.ceil(samples / rows)
        length = lengths.longest if longest else lengths.mean_longest(rows)
    changes = {
        "run.stage": "sft",
        "run.num_processes": None,
        "data.packing": limit is not None,
        "data.cutoff_len": math.ceil(length),
        "batch.per_device_train_batch_size": rows,
        "batch.gradient_accumulation_steps": count,
    }
    settings: Settings = with_settings(role.settings, changes).model_copy(update={"parallel": layout_of(role)})
    return Case(
        model=question.models[role.name],
        settings=settings,
        world_size=len(role.devices),
        machine=question.machine,
        document_length=None if limit is None else lengths.longest if longest else lengths.mean,
    )


def forward_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage of passes without gradients: nothing is kept for a backward pass."""
    whole = shapes_of(case)
    shapes = replace(frozen(whole), embedding_trained=False, output_trained=False)
    chunks = stage_chunks(case.settings.parallel, case.model.architecture, case.settings.finetuning)
    return tuple(_forward_stage(case, shapes, stage, contents) for stage, contents in enumerate(chunks))


def _forward_stage(case: Case, shapes: Shapes, stage: int, chunks: tuple) -> StageMemory:
    state, work = state_bytes(case, stage), workspace_bytes(case, stage)
    kinds = {(layer.delta, layer.sparse) for chunk in chunks for layer in chunk.layers}
    passes = [layer_memory(of_layer(shapes, delta, False), sparse, ()) for delta, sparse in kinds]
    if any(chunk.embedding for chunk in chunks):
        passes.append(embedding(shapes).memory)
    # A layer counts with all that it saves for a backward pass, of which some is freed on the way.
    before = inputs(shapes).kept + shapes.hidden
    bare = before + max(memory.kept + memory.forward for memory in passes)
    logits = 0
    if any(chunk.loss for chunk in chunks):
        last = chain(operator.memory for operator in head(shapes))
        logits = max(0, before + last.kept + last.forward - bare)
    factor = case.machine.calibration.activations
    return StageMemory(
        stage=stage,
        num_layers=state.num_layers,
        weights=state.weights,
        gradients=0,
        master_weights=0,
        optimizer_state=0,
        activations=round(factor * bare),
        logits_and_loss=round(factor * logits),
        communication=_forward_communication(case, work.communication),
        expert_imbalance=0,
        framework=work.framework,
    )


def _forward_communication(case: Case, counted: int) -> int:
    """Return buffers of exchanges: of the groups that a forward pass uses, in place of all those that training does."""
    if case.machine.device.generation == "cpu":
        return counted
    parallel = case.settings.parallel
    sizes = [
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    ]
    if case.model.architecture.moe is not None:
        sizes += [parallel.expert_model_parallel_size, parallel.expert_tensor_size]
    return COMMUNICATOR * sum(size > 1 for size in sizes)


def forward_seconds(case: Case) -> float:
    """Return seconds of a pass without gradients over the samples of a step."""
    return step_time(case).forward
