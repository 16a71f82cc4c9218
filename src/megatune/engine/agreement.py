"""Check that replicas hold the same numbers.

Copies are compared bit for bit, through a digest of each tensor: once two copies differ at all, because of a hardware
fault or a missing collective, they keep diverging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 21  # elements per digest chunk, which limits the memory of their 64-bit copies
_NUM_NAMED = 3  # number of tensors per group that an error names

_FIX = (
    "a machine, its memory or its network is faulty, or there is a bug: resume without these ranks' machines, and "
    "compare the layout with Transformers by `megatune verify`"
)


class NamedValues(NamedTuple):
    """This rank's copy of one parameter or buffer.

    Attributes:
        name: for reports.
        parameter: the parameter they belong to, whose attributes tell which ranks hold copies.
        values: the parameter itself, or its gradient.
    """

    name: str
    parameter: Tensor
    values: Tensor


class _Difference(NamedTuple):
    """One rank's digest of a tensor whose copies differ; `gap` is the largest difference from the first rank."""

    label: str
    name: str
    digest: int
    gap: float


def digest(values: Tensor) -> Tensor:
    """Hash the bits of a tensor: each element's bits times a different odd number, summed modulo 2^64.

    Returns:
        int64 [] on the device of `values`.
    """
    flat = values.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = torch.arange(1, 2 * min(_CHUNK, bits.numel()) + 1, 2, device=values.device)
    for chunk in bits.split(_CHUNK):
        total = total * 1_000_003 + (chunk.long() * weights[: chunk.numel()]).sum()
    return total


@torch.no_grad()
def check_agreement(what: str, held: Sequence[NamedValues], *, over_replicas: bool = True) -> None:
    """Compare this rank's tensors with the copies on other ranks; collective over all ranks.

    Copies are: weights on data- and context-parallel replicas, and experts on expert replicas; weights that are not
    split by (expert) tensor parallelism on its ranks; tied embeddings on the first and the last pipeline stage.

    Args:
        what: for the report, such as "step 3: weights".
        held: in the same order on all ranks that hold copies of each other.
        over_replicas: False if each replica holds its own shard, such as the distributed optimizer's gradients; tied
            embeddings are then not compared either, since their shards differ.

    Raises:
        MegatuneError: NOT_FINITE, on every rank, naming tensors, ranks, and the size of the differences.
    """
    digests = [digest(one.values) for one in held]
    wrong: list[tuple[str, ProcessGroup, NamedValues, Tensor]] = []
    for label, group, indices in _copies(held, over_replicas):
        mine = torch.stack([digests[index] for index in indices])
        low, high = mine.clone(), mine.clone()
        torch.distributed.all_reduce(low, ReduceOp.MIN, group=group)
        torch.distributed.all_reduce(high, ReduceOp.MAX, group=group)
        differing = (low != high).nonzero().flatten().tolist()
        wrong += [(label, group, held[indices[place]], mine[place]) for place in differing]
    num_wrong = torch.tensor(len(wrong), device=torch.cuda.current_device())
    torch.distributed.all_reduce(num_wrong, ReduceOp.MAX)
    if num_wrong.item():
        found = [
            _Difference(label, one.name, int(value), _gap(one.values, group)) for label, group, one, value in wrong
        ]
        raise MegatuneError(_findings(what, groups.all_gather_object(found)), ExitCode.NOT_FINITE)


def _copies(held: Sequence[NamedValues], over_replicas: bool) -> Iterator[tuple[str, ProcessGroup, list[int]]]:
    """Return groups of ranks, and the indices of the tensors that all ranks of a group hold."""
    experts = [index for index, one in enumerate(held) if not getattr(one.parameter, "allreduce", True)]
    whole_experts = [index for index in experts if getattr(held[index].parameter, "partition_dim", 0) < 0]
    dense = sorted(set(range(len(held))).difference(experts))
    whole = [index for index in dense if not getattr(held[index].parameter, "tensor_model_parallel", False)]
    kinds = [
        ("tensor-parallel", groups.tensor_parallel_group(), whole),
        ("expert tensor-parallel", groups.expert_tensor_parallel_group(), whole_experts),
    ]
    if over_replicas:
        tied = [index for index in dense if getattr(held[index].parameter, "shared_embedding", False)]
        kinds += [
            ("data-parallel", groups.replica_group(), dense),
            ("expert data-parallel", groups.expert_replica_group(), experts),
            # Only the first and the last stage hold tied embeddings, and have this group.
            *([("pipeline-parallel", parallel_state.get_embedding_group(), tied)] if tied else []),
        ]
    return ((label, group, indices) for label, group, indices in kinds if indices and group.size() > 1)


def _gap(values: Tensor, group: ProcessGroup) -> float:
    """Return the largest absolute difference from the group's first rank."""
    first = values.detach().clone()
    torch.distributed.broadcast(first, group=group, group_src=0)
    return (values.float() - first.float()).abs().max().item()


def _findings(what: str, found_by_rank: Sequence[Sequence[_Difference]]) -> list[Finding]:
    """Return a finding for each kind of copies that differ, naming the ranks that disagree."""
    by_tensor: dict[str, dict[str, dict[int, _Difference]]] = {}
    for rank, found in enumerate(found_by_rank):
        for one in found:
            by_tensor.setdefault(one.label, {}).setdefault(one.name, {})[rank] = one
    findings = []
    for label, tensors in by_tensor.items():
        described = [f"{name}: {_between(ranks)}" for name, ranks in list(tensors.items())[:_NUM_NAMED]]
        more = f"; and {len(tensors) - _NUM_NAMED} more" if len(tensors) > _NUM_NAMED else ""
        findings.append(Finding(f"{what} differ between {label} copies", why="; ".join(described) + more, fix=_FIX))
    return findings


def _between(ranks: Mapping[int, _Difference]) -> str:
    """Describe which ranks differ from which, and by how much at most."""
    ((usual, times), *_) = Counter(one.digest for one in ranks.values()).most_common()
    odd = [rank for rank, one in ranks.items() if one.digest != usual]
    rest = [rank for rank in ranks if rank not in odd]
    gap = max(one.gap for one in ranks.values())
    first = f"ranks {_listed(rest)}" if times > 1 else f"rank {_listed(rest)}"
    return f"rank{'s' if len(odd) > 1 else ''} {_listed(odd)} and {first}, by up to {gap:.1e}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def check_scalars(what: str, values: Mapping[str, float]) -> None:
    """Compare scalars that every rank holds; collective over all ranks.

    Raises:
        MegatuneError: NOT_FINITE, on every rank, naming the values and their ranks.
    """
    by_rank = groups.all_gather_object({name: repr(value) for name, value in values.items()})
    findings = []
    for name in values:
        ranks: dict[str, list[int]] = {}
        for rank, held in enumerate(by_rank):
            ranks.setdefault(held.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            why = "; ".join(f"{value} on rank {_listed(who[:4])}" for value, who in ranks.items())
            findings.append(Finding(f"{what}: {name} differs between ranks", why=why, fix=_FIX))
    if findings:
        raise MegatuneError(findings, ExitCode.NOT_FINITE)
