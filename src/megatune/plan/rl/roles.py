"""The memory of each role on its devices in each phase of a step: active, or asleep while other roles use the device.

The passes of roles with a trainer model are cases of the planner. An engine that samples responses holds its shard of
the weights, a KV cache, and the activations of a prefill.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatune.architecture import Architecture
from megatune.config.rl.settings import InferRole, ModelRole
from megatune.config.settings import Settings, with_settings
from megatune.families.adapters import adapter_weights, is_standard_lora
from megatune.families.weights import all_shapes
from megatune.plan.case import Case, PlannedModel
from megatune.plan.flops import num_parameters
from megatune.plan.machine import Machine
from megatune.plan.memory.activations import layer_memory
from megatune.plan.memory.estimate import (
    COMMUNICATOR,
    CONTEXT,
    CPU_PROCESS,
    num_communicators,
    stage_memory,
    workspace_bytes,
)
from megatune.plan.memory.parameters import StateConfig, stage_state
from megatune.plan.memory.stage import StageMemory
from megatune.plan.memory.tensors import ChunkContent, stage_chunks
from megatune.plan.operators.decoder import embedding, head, inputs
from megatune.plan.operators.operator import chain
from megatune.plan.operators.shapes import Shapes, frozen, layer_shapes, shapes_of
from megatune.plan.rl.question import (
    ACTOR,
    CRITIC,
    REFERENCE,
    ROLLOUT,
    Lengths,
    RLQuestion,
    teacher_inside,
)

SYNC, SAMPLE, SCORES, REFERENCE_PASS, OLD_PASS, VALUES, TRAIN_CRITIC, TRAIN = (
    "sync", "rollout", "scores", "reference", "old log-probs", "values", "train critic", "train",
)  # fmt: skip
# The phases in which a role is active; it sleeps in the others.
_ACTIVE = {ACTOR: (SYNC, OLD_PASS, TRAIN), REFERENCE: (REFERENCE_PASS,), CRITIC: (VALUES, TRAIN_CRITIC)}
# A teacher's memory in the policy's processes: its weights, and the last hidden states of an update's tokens.
TEACHER_WEIGHTS, TEACHER_STATES = "teacher_weights", "teacher_states"
_STATE = ("weights", "gradients", "master_weights", "optimizer_state")
# Buckets of the weight update in memory: gathered, packed, and the one before, which engines still read.
_BUCKETS = 3
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# Defaults of vLLM and SGLang.
_MAX_NUM_SEQS, _MAX_BATCHED_TOKENS = 256, 8192
_CPU_CACHE, _CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", 4
# Share of the free memory after loading the weights that the built-in engine's KV cache may use: on a GPU, and on a CPU
# (rl.rollout.kv_cache.kv_cache_budget).
_GPU_SHARE, _CPU_SHARE = 0.5, 0.25
# Bytes of captured CUDA graphs: an assumption; vLLM reports 0.5 to 2 GiB at its start.
GRAPHS = 2**30


# --- passes of a role with a trainer model ----------------------------------------------------------------------------


def training_case(question: RLQuestion, role: ModelRole, *, longest: bool) -> Case:
    """Return the case of one update of a role: with the longest samples, for memory, or with mean samples."""
    batch = role.settings.batch
    rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    limit = role.packed_tokens_train or role.dynamic_tokens_train
    return _case(question, role, rows, batch.per_device_train_batch_size, limit, longest=longest)


def forward_case(question: RLQuestion, role: ModelRole, *, longest: bool) -> Case:
    """Return the case of the forward passes over the samples of a step, see `training_case`."""
    rows = -(-question.settings.samples_per_step // _dp_size(role))
    limit = role.packed_tokens_forward or role.dynamic_tokens_forward
    return _case(question, role, rows, role.infer_batch_size, limit, longest=longest)


def num_updates(question: RLQuestion, role: ModelRole) -> float:
    """Return the number of updates in a step."""
    batch = role.settings.batch
    rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * _dp_size(role)
    return question.settings.samples_per_step * question.settings.algorithm.ppo_epochs / rows


def _dp_size(role: ModelRole) -> int:
    """Return the data-parallel size of a role."""
    return max(1, len(role.devices) // role.settings.parallel.model_parallel_size)


def _case(
    question: RLQuestion, role: ModelRole, samples: int, micro_batch: int, limit: int | None, *, longest: bool
) -> Case:
    """Return the case of the micro-batches of a data-parallel process.

    Args:
        samples: of the process.
        micro_batch: rows of a micro-batch, if `limit` is None.
        limit: tokens of a micro-batch.
    """
    lengths = question.lengths
    if limit is not None:  # micro-batches limited by tokens are packed
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
    settings: Settings = with_settings(role.settings, changes).model_copy(update={"parallel": role.settings.parallel})
    return Case(
        model=question.models[role.name],
        settings=settings,
        world_size=len(role.devices),
        machine=question.machine,
        document_length=None if limit is None else lengths.longest if longest else lengths.mean,
    )


def forward_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage in passes without gradients: nothing is kept for a backward pass."""
    shapes = replace(frozen(shapes_of(case)), embedding_trained=False, output_trained=False)
    chunks = stage_chunks(case.settings.parallel, case.model.architecture, case.settings.finetuning)
    return tuple(_forward_stage(case, shapes, stage, contents) for stage, contents in enumerate(chunks))


def _forward_stage(case: Case, shapes: Shapes, stage: int, chunks: tuple[ChunkContent, ...]) -> StageMemory:
    state, work = stage_state(StateConfig.of(case), stage), workspace_bytes(case, stage)
    kinds = {layer.kind for chunk in chunks for layer in chunk.layers}
    passes = [layer_memory(layer_shapes(shapes, kind, False), kind.sparse, ()) for kind in kinds]
    if any(chunk.embedding for chunk in chunks):
        passes.append(embedding(shapes).memory)
    # An upper bound: a layer counts with all tensors of a forward pass, some of which are freed earlier.
    before = inputs(shapes).kept + shapes.hidden
    bare = before + max(memory.kept + memory.forward for memory in passes)
    logits = 0
    if any(chunk.loss for chunk in chunks):
        last = chain(operator.memory for operator in head(shapes))
        logits = max(0, before + last.kept + last.forward - bare)
    factor = case.machine.calibration.activations
    groups = COMMUNICATOR * num_communicators(case, trains=False)
    return StageMemory(
        stage=stage,
        num_layers=state.num_layers,
        weights=state.weights,
        activations=round(factor * bare),
        logits_and_loss=round(factor * logits),
        communication=work.communication if case.machine.device.on_cpu else groups,
        framework=work.framework,
    )


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one device of an engine.

    Attributes:
        weights: of the device's shard.
        cache: of the KV cache; negative if the weights leave no memory.
        workspace: activations of a prefill, and logits.
        framework: the device's context, libraries and captured graphs, which stay while the engine sleeps.
        sequences: number of sequences that one engine samples at the same time.
        cached_tokens: number of tokens in the KV cache of an engine's devices together.
    """

    weights: int
    cache: int
    workspace: int
    framework: int
    sequences: int
    cached_tokens: int

    @property
    def total(self) -> int:
        """Total bytes while it samples."""
        return self.weights + max(0, self.cache) + self.workspace + self.framework


def key_value_bytes(architecture: Architecture, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers; with latent attention those of its latent, which
    every engine caches, the built-in one because Transformers does."""
    if architecture.mla is not None:
        return architecture.num_layers * architecture.latent_size * itemsize
    # The state of a gated delta net does not depend on the number of tokens.
    kinds = (architecture.layer_kind(layer) for layer in range(architecture.num_layers))
    sizes = (architecture.of_heads(kind.has_global_heads).key_value_size for kind in kinds if not kind.delta)
    return 2 * sum(sizes) * itemsize


def cache_shards(architecture: Architecture, devices: int) -> int:
    """Return the number of devices that shard keys and values: at most the number of heads; a latent is replicated."""
    return 1 if architecture.mla is not None else min(devices, architecture.num_query_groups)


def engine_of(question: RLQuestion, role: InferRole) -> EngineMemory:
    """Return the memory of a role's engine; a built-in judge samples infer_batch_size sequences at the same time."""
    settings = question.settings
    is_judge = role.name != ROLLOUT and role.engine == "builtin"
    return engine_memory(
        role,
        question.models[role.name],
        question.machine,
        question.lengths,
        samples=round(settings.samples_per_step * (1 + question.steps_ahead)),
        max_running=role.infer_batch_size if is_judge else settings.rollout.max_running_requests,
    )


def engine_memory(
    role: InferRole, model: PlannedModel, machine: Machine, lengths: Lengths, *, samples: int, max_running: int
) -> EngineMemory:
    """Return the memory of each device of the role's engines.

    Args:
        samples: of a step, over all engines.
        max_running: maximum of requests in flight to one engine.
    """
    architecture, size, devices = model.architecture, ITEMSIZE[role.dtype], role.devices_per_engine
    memory, on_cpu = machine.device.memory, machine.device.on_cpu
    weights = num_parameters(architecture) * size // devices
    given = min(-(-samples // role.num_engines), max_running)
    process = CPU_PROCESS if on_cpu else CONTEXT + (COMMUNICATOR if devices > 1 else 0)
    of_token = key_value_bytes(architecture, size) // cache_shards(architecture, devices)
    if role.engine == "builtin":  # it allocates for the longest length of all sequences in flight
        room = _CPU_SHARE * memory * machine.gpus_per_node if on_cpu else _GPU_SHARE * (memory - weights - process)
        sequences = max(1, min(given, int(room // (lengths.longest * of_token))))
        return EngineMemory(
            weights=weights,
            cache=sequences * lengths.longest * of_token,
            workspace=8 * sequences * architecture.vocab_size + _prefill_bytes(architecture, sequences, size),
            framework=process,
            sequences=sequences,
            cached_tokens=sequences * lengths.longest,
        )
    config = role.config
    max_sequences = min(given, int(config.get("max_num_seqs") or config.get("max_running_requests") or _MAX_NUM_SEQS))
    at_once = int(config.get("max_num_batched_tokens") or _MAX_BATCHED_TOKENS)
    workspace = (8 * max_sequences * architecture.vocab_size + _prefill_bytes(architecture, at_once, size)) // devices
    if on_cpu:
        cache = int(float(role.system_envs.get(_CPU_CACHE) or _CPU_CACHE_GIB) * 2**30)
    elif role.engine == "vllm":  # everything except graphs is within the share
        cache = int(role.memory_share * memory) - weights - workspace - process
    else:  # weights and cache are
        cache = int(role.memory_share * memory) - weights
    tokens = max(0, cache) // max(of_token, 1)
    has_graphs = not (on_cpu or config.get("enforce_eager") or config.get("disable_cuda_graph"))
    return EngineMemory(
        weights=weights,
        cache=cache,
        workspace=workspace,
        framework=process + has_graphs * GRAPHS,
        sequences=max(1, min(max_sequences, int(tokens // lengths.mean))),
        cached_tokens=tokens,
    )


def _prefill_bytes(architecture: Architecture, tokens: int, size: int) -> int:
    """Return the bytes of a layer's tensors: four hidden states, gate, up and their product."""
    channels = architecture.ffn_hidden_size
    if (moe := architecture.moe) is not None:
        channels = moe.router_topk * moe.moe_ffn_hidden_size + moe.shared_expert_intermediate_size
    return tokens * (4 * architecture.hidden_size + 3 * channels) * size


# --- phases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of one role on one of its devices.

    Attributes:
        parts: by phase and name.
        offloaded: bytes in main memory while the role sleeps.
    """

    role: str
    parts: Mapping[str, Mapping[str, int]]
    offloaded: int = 0

    def total(self, phase: str) -> int:
        return sum(self.parts[phase].values())


@dataclass(frozen=True, slots=True)
class RoleDevices:
    """A role's devices, and its memory on those of each pipeline stage; engines have one stage."""

    role: str
    devices: tuple[int, ...]
    by_stage: tuple[RoleMemory, ...]

    def on(self, device: int) -> RoleMemory:
        """Return the memory on one of `devices`: the ranks of a stage are consecutive."""
        return self.by_stage[self.devices.index(device) * len(self.by_stage) // len(self.devices)]


def phases(question: RLQuestion) -> tuple[str, ...]:
    """Return the phases of a step, in their order."""
    settings, found = question.settings, [SYNC, SAMPLE]
    found += [SCORES] if settings.scorers else []
    if settings.algorithm.enable_reference or settings.teachers:
        found.append(REFERENCE_PASS)
    if settings.algorithm.enable_old_logprobs_recompute:
        found.append(OLD_PASS)
    found += [VALUES, TRAIN_CRITIC] if settings.critic is not None else []
    return (*found, TRAIN)


def memory_of_roles(question: RLQuestion) -> list[RoleDevices]:
    """Return the memory of every role."""
    engines = (role for role in question.settings.samplers if role.name in question.models)
    trainers = (_of_trainer(question, role) for role in question.settings.models)
    return [*trainers, *(_of_engine(question, role) for role in engines)]


def shared_devices(question: RLQuestion) -> frozenset[int]:
    """Return the devices that several models, rollouts or judges time-share."""
    roles = (*question.settings.models, *question.settings.samplers)
    counts = Counter(device for role in roles for device in set(role.devices))
    return frozenset(device for device, count in counts.items() if count > 1)


def sync_bytes(question: RLQuestion) -> int:
    """Return the bytes of a weight update: all weights with merged adapters, or only adapters."""
    actor = question.settings.actor_train
    architecture, selection = question.models[actor.name].architecture, actor.settings.finetuning
    size = ITEMSIZE["fp32" if actor.settings.precision.params_dtype == "float32" else "bf16"]
    if question.settings.actor_infer.engine == "vllm" and is_standard_lora(architecture, selection):
        shapes = all_shapes(adapter_weights(architecture, selection), architecture)
        return size * sum(math.prod(shape) for shape in shapes.values())
    return num_parameters(architecture) * size


def _bucket_bytes(question: RLQuestion) -> int:
    """Return the bytes of the largest bucket of a weight update."""
    return min(question.settings.run.model_update_buffer_size_mb * 2**20, sync_bytes(question))


def _of_trainer(question: RLQuestion, role: ModelRole) -> RoleDevices:
    time_shared, on_cpu = not shared_devices(question).isdisjoint(role.devices), question.machine.device.on_cpu
    forward = forward_memory(forward_case(question, role, longest=True))
    training = stage_memory(training_case(question, role, longest=True)) if role.training else forward
    taught = _of_teacher(question) if role.name == ACTOR else None
    bucket = _BUCKETS * _bucket_bytes(question)
    scores = role in question.settings.scorers.values()
    active = _ACTIVE.get(role.name, (SCORES,) if scores else (REFERENCE_PASS,))
    if (
        role.name == ACTOR and question.settings.reference is None
    ):  # with LoRA the actor is the reference with its adapters disabled
        active = (*active, REFERENCE_PASS)

    def held(forward_pass: StageMemory, trained: StageMemory, teacher: tuple[StageMemory, int] | None) -> RoleMemory:
        # Communicators and the device's context stay. Gradients are dropped, not offloaded.
        stays = {"framework": trained.framework + trained.communication}
        state = {name: size for name in _STATE if (size := getattr(trained, name))}
        state |= {} if teacher is None else {TEACHER_WEIGHTS: teacher[0].weights}
        moved = {name: size for name, size in state.items() if name != "gradients"}
        asleep = {**state, **stays} if not time_shared else {**moved, **stays} if on_cpu else stays
        # For a pass without gradients only the weights are reloaded.
        light = {**asleep, **{name: state[name] for name in ("weights", TEACHER_WEIGHTS) if name in state}}
        working = {"activations": forward_pass.activations + forward_pass.logits_and_loss, **light}
        activations = trained.activations + trained.logits_and_loss + trained.expert_imbalance
        full = {**state, "activations": activations, **stays}
        if teacher is not None:  # its pass is before the update, and keeps the inputs of its output layer
            full |= {"activations": max(activations, teacher[0].activations), TEACHER_STATES: teacher[1]}
        if time_shared and on_cpu:  # copies are made before the originals are freed
            full["copies"] = max(0, sum(moved.values()) - activations)
        by_phase = dict.fromkeys((SCORES, REFERENCE_PASS, OLD_PASS, VALUES), working)
        by_phase |= {SYNC: {**light, "buckets": bucket}, TRAIN_CRITIC: full, TRAIN: full}
        parts = {phase: by_phase[phase] if phase in active else asleep for phase in phases(question)}
        return RoleMemory(role.name, parts, sum(moved.values()) if time_shared else 0)

    return RoleDevices(role.name, role.devices, tuple(map(held, forward, training, taught or (None,) * len(training))))


def _of_teacher(question: RLQuestion) -> tuple[tuple[StageMemory, int], ...] | None:
    """Return the memory of each stage of the teacher in the policy's processes, with the bytes that its pass keeps for
    an update: the last hidden states of all tokens of a rank, on the last stage."""
    if (role := teacher_inside(question.settings)) is None:
        return None
    case = training_case(question, role, longest=True)
    *stages, last = forward_memory(case)
    return (*((stage, 0) for stage in stages), (last, case.num_micro_batches * shapes_of(case).hidden))


def _of_engine(question: RLQuestion, role: InferRole) -> RoleDevices:
    """Return the memory of an engine: it sleeps if its devices are shared; the policy's weights are updated."""
    memory, on_cpu = engine_of(question, role), question.machine.device.on_cpu
    sleeps = not shared_devices(question).isdisjoint(role.devices)
    weights, framework = {"weights": memory.weights}, {"framework": memory.framework}
    working = {**weights, "KV cache": max(0, memory.cache), "activations": memory.workspace, **framework}
    bucket = {"buckets": _bucket_bytes(question)}
    # Sleep level 1 moves weights to main memory, which a CPU uses anyway; the built-in engine does not move them.
    keeps = role.name != ROLLOUT or question.settings.sleep_level == 1
    stays = keeps and (on_cpu or role.engine == "builtin")
    asleep = working if not sleeps else {**weights, **framework} if stays else framework
    offloaded = memory.weights if sleeps and keeps and not stays else 0
    # On shared devices the KV cache wakes up after the weights are updated and the trainer is offloaded.
    updated = {**weights, **framework} if sleeps else working
    by_phase = {SYNC: {**updated, **bucket}, SAMPLE: working} if role.name == ROLLOUT else {SAMPLE: working}
    parts = {phase: by_phase.get(phase, asleep) for phase in phases(question)}
    return RoleDevices(role.name, role.devices, (RoleMemory(role.name, parts, offloaded),))
