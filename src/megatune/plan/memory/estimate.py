"""Memory of each pipeline stage's fullest rank, by part; and the size of a checkpoint."""

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
# Assumptions in bytes, not measured: an NCCL communicator; a CUDA context with torch's kernels and cuBLAS's workspace.
# With eight communicators they add up to the about 6 GiB that other planners reserve.
COMMUNICATOR = 600 * 2**20
CONTEXT = 1200 * 2**20
# A process of the engine before it builds a model, on a machine without a GPU.
CPU_PROCESS = 350 * 2**20
# Also assumed: the range of memory beyond tensors, relative to its plan; and fragmentation, relative to activations.
_LEAST_BEYOND, _MOST_BEYOND, MOST_FRAGMENTS = 0.5, 2.0, 0.1
# Size of a checkpoint's files, which are assigned to ranks; as in bridge.file_set.
_FILE_BYTES = 5 * 10**9


def stage_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage, the first stage first."""
    rules, kept = StateConfig.of(case), Activations(case)
    return tuple(
        sum_memory(stage_state(rules, stage), kept.parts(stage), workspace_bytes(case, stage))
        for stage in range(case.settings.parallel.pipeline_model_parallel_size)
    )


class FixedMemory(NamedTuple):
    """The parts that recomputation does not change: shapes, chunks, and bytes without activations by stage."""

    shapes: Shapes
    contents: Contents
    stages: dict[int, int]


def fixed_memory(case: Case) -> FixedMemory:
    """Return it for the stages that may be the fullest: those with content that the stage before does not have."""
    rules = StateConfig.of(case)
    contents = rules.contents
    held = [stage for stage, chunks in enumerate(contents) if not stage or not _are_within(chunks, contents[stage - 1])]
    fixed = {stage: stage_state(rules, stage).total + workspace_bytes(case, stage).total for stage in held}
    return FixedMemory(shapes_of(case), contents, fixed)


def _are_within(chunks: tuple[ChunkContent, ...], others: tuple[ChunkContent, ...]) -> bool:
    """Return whether each chunk has the first layers of another one, and the same ends."""
    return chunks == others or all(
        (one.embedding, one.loss, one.layers) == (other.embedding, other.loss, other.layers[: len(one.layers)])
        for one, other in zip(chunks, others, strict=True)
    )


def fullest_bytes(case: Case, fixed: FixedMemory) -> int:
    """Return the largest `StageMemory.total`, computed without its parts."""
    kept = Activations(case, fixed.shapes, fixed.contents)
    return max(kept.total(stage) + size for stage, size in fixed.stages.items())


def workspace_bytes(case: Case, stage: int) -> StageMemory:
    """Return the memory of communication and framework."""
    on_cpu = case.machine.device.on_cpu
    process = CPU_PROCESS + _copies(case, stage) if on_cpu else CONTEXT
    return StageMemory(
        communication=_tensors(case, stage) + library_bytes(case),
        framework=process + case.machine.calibration.framework,
    )


def library_bytes(case: Case) -> int:
    """Return the bytes of NCCL's buffers, which torch's allocator does not count."""
    return 0 if case.machine.device.on_cpu else COMMUNICATOR * num_communicators(case)


def beyond_tensors(case: Case, stage: StageMemory) -> tuple[int, int, int]:
    """Return the least, planned and most bytes of the device's context, NCCL's buffers and fragmentation; all equal if
    runs on the machine measured them."""
    planned = stage.framework + library_bytes(case)
    if case.machine.device.on_cpu or case.machine.calibration.framework:
        return planned, planned, planned
    fragments = MOST_FRAGMENTS * (stage.activations + stage.logits_and_loss)
    return int(_LEAST_BEYOND * planned), planned, int(_MOST_BEYOND * planned + fragments)


def _copies(case: Case, stage: int) -> int:
    """Return the bytes that the fullest rank of a stage copies to host memory, which on a CPU is device memory, for
    `async_save`: the first file of each kind, and an even share of the others."""
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
    """Count the process groups of more than one rank in which a rank communicates.

    Every rank is in groups of tensor, context, pipeline and expert parallelism. One that trains is also in those of the
    replicas of its weights and of its experts, of the ranks of an expert layer, of one model's ranks (for the gradient
    norm), of two ranks with the word embedding, and of all ranks.
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
    """Return the bytes of the buffer in which linear layers gather the sequence (Megatron-Core's global memory buffer),
    and of messages between pipeline stages: one that was sent; with virtual stages and overlap_p2p_comm also those in
    flight in both directions. Their number was observed with two and four stages, not derived from the schedule."""
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


# --- the size of a checkpoint: for plans, `megatune doctor` and the check before a run --------------------------------


class CheckpointBytes(NamedTuple):
    """Bytes of a checkpoint's tensors: those of its model or adapters, and those of its training state."""

    model: int
    training: int


def bytes_of(
    settings: Settings, parameters: int, weights: int, adapters: int, twice: int = 0, matrices: int = 0
) -> CheckpointBytes:
    """Compute a checkpoint's size from numbers of elements.

    Args:
        parameters: elements of the model.
        weights: trained elements of these.
        adapters: elements of adapters, which are fp32 and need no master weights.
        twice: elements of `weights` that a file of adapters has under two names.
        matrices: elements of `weights` in matrices that Muon orthogonalizes, or fewer for an upper bound.
    """
    itemsize = 2 if settings.precision.params_dtype != "float32" else _FP32
    if settings.finetuning.finetuning_type == "lora":
        model = _FP32 * adapters + itemsize * (weights + twice)
    else:  # torch_dist also writes Megatron-Core's format
        model = itemsize * parameters * (2 if settings.checkpoint.save_format == "torch_dist" else 1)
    if settings.checkpoint.save_only_model:
        return CheckpointBytes(model, 0)
    optimizer = settings.optimizer
    # All state is written in fp32, for any exp_avg_dtype; master weights only if trained weights are not fp32.
    kinds = int(bool(optimizer.sgd_momentum)) if optimizer.optimizer == "sgd" else 2
    less = matrices if optimizer.optimizer == "muon" else 0
    kinds += int(itemsize < _FP32 and weights > 0)
    return CheckpointBytes(model, _FP32 * ((weights + adapters) * kinds - less))


def checkpoint_bytes(settings: Settings, architecture: Architecture) -> CheckpointBytes:
    """Return the size of a run's checkpoints."""
    counts = {Role.BASE: 0, Role.ADAPTER: 0}
    matrices = repeated = 0
    copies = FAMILIES[architecture.model_type].copies(architecture)  # names that published files repeat
    twice = 0  # a tied word embedding with adapters, which peft expects under two names
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
