"""Memory of each pipeline stage's fullest rank, by part, with what no pass keeps; and the size of a checkpoint."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.families import FAMILIES
from megatune.families.dense import EMBEDDING
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, hf_shapes
from megatune.plan.case import Case
from megatune.plan.flops import num_parameters
from megatune.plan.memory.activations import Activations, Contents
from megatune.plan.memory.parameters import StateConfig, elements_of, stage_state
from megatune.plan.memory.stage import StageMemory, sum_memory
from megatune.plan.memory.tensors import ChunkContent
from megatune.plan.operators.shapes import Shapes, shapes_of

_FP32 = 4
# Assumptions, in bytes, none of which was measured here: a communicator of NCCL; a CUDA context with the kernels of
# torch and cuBLAS's workspace. With eight communicators they make the about 6 GiB that others allow for such runs.
COMMUNICATOR = 600 * 2**20
CONTEXT = 1200 * 2**20
# A process of the engine before it makes a model, on a machine without a GPU.
CPU_PROCESS = 350 * 2**20
# Assumed, too: what is held beyond tensors, of what is planned for it; fragments of freed memory, of activations.
_LEAST_BEYOND, _MOST_BEYOND, MOST_FRAGMENTS = 0.5, 2.0, 0.1
# Of a checkpoint's files, which are dealt to ranks; as bridge.file_set's.
_FILE_BYTES = 5 * 10**9


def stage_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage, the first stage first."""
    rules, kept = StateConfig.of(case), Activations(case)
    return tuple(
        sum_memory(stage_state(rules, stage), kept.parts(stage), workspace_bytes(case, stage))
        for stage in range(case.settings.parallel.pipeline_model_parallel_size)
    )


class FixedMemory(NamedTuple):
    """What recomputation does not change: shapes, chunks, and bytes of state and of what no pass keeps, by stage."""

    shapes: Shapes
    contents: Contents
    stages: dict[int, int]


def fixed_memory(case: Case) -> FixedMemory:
    """Return it for each stage that holds anything which the one before does not hold for as many micro-batches."""
    rules = StateConfig.of(case)
    contents = rules.contents
    held = [stage for stage, chunks in enumerate(contents) if not stage or not _are_within(chunks, contents[stage - 1])]
    fixed = {stage: stage_state(rules, stage).total + workspace_bytes(case, stage).total for stage in held}
    return FixedMemory(shapes_of(case), contents, fixed)


def _are_within(chunks: tuple[ChunkContent, ...], others: tuple[ChunkContent, ...]) -> bool:
    """Return whether each chunk holds the first layers of another one, and all else that it holds."""
    return chunks == others or all(
        (one.embedding, one.loss, one.layers) == (other.embedding, other.loss, other.layers[: len(one.layers)])
        for one, other in zip(chunks, others, strict=True)
    )


def fullest_bytes(case: Case, fixed: FixedMemory) -> int:
    """Return the largest `StageMemory.total`, without its parts."""
    kept = Activations(case, fixed.shapes, fixed.contents)
    return max(kept.total(stage) + size for stage, size in fixed.stages.items())


def workspace_bytes(case: Case, stage: int) -> StageMemory:
    """Count what no pass keeps: communication and framework."""
    on_cpu = case.machine.device.on_cpu
    process = CPU_PROCESS + _copies(case, stage) if on_cpu else CONTEXT
    return StageMemory(
        communication=_tensors(case, stage) + library_bytes(case),
        framework=process + case.machine.calibration.framework,
    )


def library_bytes(case: Case) -> int:
    """Return bytes of NCCL's own buffers, which no allocator of torch counts."""
    return 0 if case.machine.device.on_cpu else COMMUNICATOR * num_communicators(case)


def beyond_tensors(case: Case, stage: StageMemory) -> tuple[int, int, int]:
    """Return the least, the planned and the most bytes of a device's context, NCCL's buffers and fragments: one number
    where runs on the machine measured them."""
    planned = stage.framework + library_bytes(case)
    if case.machine.device.on_cpu or case.machine.calibration.framework:
        return planned, planned, planned
    fragments = MOST_FRAGMENTS * (stage.activations + stage.logits_and_loss)
    return int(_LEAST_BEYOND * planned), planned, int(_MOST_BEYOND * planned + fragments)


def _copies(case: Case, stage: int) -> int:
    """Count what the fullest rank of a stage copies to the host's memory for `async_save`, which on a CPU is the
    device's: of both kinds of files the first, and an even share of the others."""
    if not case.settings.checkpoint.async_save:
        return 0
    held, parallel = elements_of(StateConfig.of(case), stage), case.settings.parallel
    tp, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size * parallel.expert_tensor_size
    trained = tp * held.trained_dense + experts * held.trained_expert
    is_lora = case.settings.finetuning.finetuning_type == "lora"
    counts = (0, trained) if is_lora else (trained, 0)
    kinds = bytes_of(case.settings, tp * held.dense + experts * held.expert, *counts)
    return sum(min(size, _FILE_BYTES + size // (tp * case.shard_size)) for size in kinds)


@lru_cache(maxsize=4096)
def num_communicators(case: Case, *, trains: bool = True) -> int:
    """Count groups of more than one rank that a rank exchanges tensors in.

    Every rank is in those of tensor, context, pipeline and expert parallelism. One that trains is also in those of the
    replicas of its weights and of its experts, of the ranks that share an expert layer, of one model's ranks (which add
    up the gradient's norm), of two that hold the word embedding, and of all ranks.
    """
    parallel, architecture = case.settings.parallel, case.model.architecture
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    sizes = [tp, parallel.context_parallel_size, pp]
    sizes += [ep, etp] if architecture.moe is not None else []
    if trains:
        copied = pp > 1 and (architecture.tie_word_embeddings or architecture.mtp_num_layers)
        sizes += [case.shard_size, tp * pp, case.world_size, 2 if copied else 1]
        sizes += [ep * etp, case.expert_shard_size] if architecture.moe is not None else []
    return len([size for size in sizes if size > 1])


def _tensors(case: Case, stage: int) -> int:
    """Return what linear layers gather the sequence into (Megatron-Core's global memory buffer), and hidden states
    and their gradients between pipeline stages: one that was sent; with virtual stages and overlap_p2p_comm, those
    sent in both directions, too. Their number was seen on two and on four stages, not derived from the schedule."""
    parallel, row = case.settings.parallel, case.model.architecture.hidden_size * case.itemsize
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    whole = case.micro_batch_size * case.row_tokens // parallel.context_parallel_size * row
    spread = parallel.sequence_parallel and tp > 1
    gathered = whole if spread else 0
    if pp == 1 or case.num_micro_batches == 1:
        return gathered
    message = whole // tp if spread else whole
    if parallel.virtual_stages is None:
        return gathered + (message if stage else 0)
    in_transfer = 3 if parallel.overlap_p2p_comm and stage else 1 if parallel.overlap_p2p_comm else 0
    return gathered + (1 + in_transfer) * message


# --- the size of a checkpoint: one count for plans, `megatune doctor` and the check before a run ----------------------


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
    matrices = repeated = 0
    copies = FAMILIES[architecture.model_type].copies(architecture)  # published files have them
    twice = 0  # a tied word embedding beside adapters, which peft looks for under two names
    for weight, layer in trained_weights(architecture, settings.finetuning):
        shapes = hf_shapes(weight, architecture, layer)
        size = sum(map(prod, shapes.values()))
        counts[weight.role] += size
        repeated += sum(prod(shape) for name, shape in shapes.items() if name in copies)
        matrices += size if weight.is_matrix else 0
        if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
            twice = size
    parameters = num_parameters(architecture) + repeated
    return bytes_of(settings, parameters, counts[Role.BASE], counts[Role.ADAPTER], twice, matrices)
