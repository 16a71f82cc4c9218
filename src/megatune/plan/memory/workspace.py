"""Bytes of a rank that no pass keeps: buffers of communication, and what the device and the libraries hold."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.plan.case import Case

# Assumptions, in bytes, none of which was measured here: a communicator of NCCL; a CUDA context with the kernels of
# torch and cuBLAS's workspace. With eight communicators they make the about 6 GiB that others allow for such runs.
COMMUNICATOR = 600 * 2**20
CONTEXT = 1200 * 2**20
# A process of the engine before it makes a model, on a machine without a GPU.
CPU_PROCESS = 350 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Bytes of a rank; see `plan.memory.estimate.StageMemory`."""

    communication: int
    framework: int


def workspace_bytes(case: Case, stage: int) -> Workspace:
    """Buffers of communication, and what the device's context and the libraries hold."""
    on_cpu = case.machine.device.generation == "cpu"
    libraries = 0 if on_cpu else COMMUNICATOR * num_communicators(case)
    return Workspace(
        communication=_tensors(case, stage) + libraries,
        framework=(CPU_PROCESS if on_cpu else CONTEXT) + case.machine.calibration.framework,
    )


def num_communicators(case: Case) -> int:
    """Groups of more than one rank that a rank exchanges tensors in.

    Every rank is in those of tensor, context and pipeline parallelism, of the replicas of its weights and of its
    experts, of expert parallelism and of the ranks that share an expert layer, of one model's ranks (which add up the
    gradient's norm), and of all ranks.
    """
    parallel = case.settings.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = [tp, parallel.context_parallel_size, pp, case.shard_size, tp * pp, case.world_size]
    if case.model.architecture.moe is not None:
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
        sizes += [ep, etp, ep * etp, case.expert_shard_size]
    if case.model.architecture.tie_word_embeddings:
        sizes.append(2 if pp > 1 else 1)
    return len([size for size in sizes if size > 1])


def _tensors(case: Case, stage: int) -> int:
    """Return what linear layers gather the sequence into (Megatron-Core's global memory buffer), and hidden states
    and their gradients between pipeline stages: one that was sent; with virtual stages and overlap_p2p_comm, those
    sent in both directions, too. Their number was seen on two and on four stages, not derived from the schedule."""
    parallel, row = case.settings.parallel, case.model.architecture.hidden_size * case.itemsize
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    whole = case.micro_batch_size * case.sequence_length // parallel.context_parallel_size * row
    spread = parallel.sequence_parallel and tp > 1
    gathered = whole if spread else 0
    if pp == 1 or case.num_micro_batches == 1:
        return gathered
    message = whole // tp if spread else whole
    if parallel.virtual_stages is None:
        return gathered + (message if stage else 0)
    in_transfer = 3 if parallel.overlap_p2p_comm and stage else 1 if parallel.overlap_p2p_comm else 0
    return gathered + (1 + in_transfer) * message
