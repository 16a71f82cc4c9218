"""Muon: orthogonalized updates for matrices, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.engine import groups
from megatune.engine.adam import FusedAdam
from megatune.engine.weights import rank_slice
from megatune.families.table import rows_of
from megatune.families.weights import Slice, Weight, hf_shapes

# Keller Jordan's quintic iteration, as in torch.optim.Muon: five steps bring every singular value close to 1.
_COEFFICIENTS, _STEPS, _SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
_BATCH = 2**26  # elements of equally shaped matrices that are orthogonalized in one batch
MOMENTUM = "momentum_buffer"


class ParamRange(NamedTuple):
    """Elements start..stop of a flattened model parameter that this rank's optimizer updates as `main`."""

    main: Tensor
    start: int
    stop: int


class Muon(FusedAdam):
    """Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) for the matrices of linear layers.

    Of a matrix M with gradient G, momentum m and running average B: B ← m B + (1 − m) G, U ← m B + (1 − m) G (with
    Nesterov's momentum, otherwise B), then
    M ← M (1 − learning rate · weight decay) − learning rate · scale · √max(rows, columns) · orthogonal(U), where
    orthogonal(P S Qᵀ) ≈ P Qᵀ. A matrix is a Hugging Face tensor, even if the engine stacks it with others: a query,
    key or value projection, a gate, one expert. It is gathered from tensor-parallel ranks. With a distributed optimizer
    each replica orthogonalizes some of the matrices, and sends the updates to the replicas that apply them.

    State of a matrix: `momentum_buffer`, fp32, of its shape; other parameters have Adam's. Products are computed in
    bf16 for a 16-bit model, otherwise in fp32.

    Args:
        momentum: decay rate of the running average of gradients.
        nesterov: add the new gradient once more to what is orthogonalized.
        scale: 0.2 makes updates about as large as AdamW's.
        adam: arguments of `FusedAdam`, for all other parameters.
    """

    def __init__(self, params: Iterable[Any], *, momentum: float, nesterov: bool, scale: float, **adam: Any) -> None:
        super().__init__(params, **adam)
        self._momentum, self._nesterov, self._scale = momentum, nesterov, scale
        # For each parameter that consists of matrices: whether this rank orthogonalizes them, and the range it updates.
        self._parameters: list[tuple[Any, bool]] = []
        self._updated: list[tuple[Any, ParamRange]] = []
        self._exchange: _Exchange | None = None

    def attach(
        self,
        held: Mapping[Tensor, ParamRange],
        architecture: Architecture,
        buckets: Sequence[Any] = (),
        replicas: ProcessGroup | None = None,
    ) -> None:
        """Take over the matrices among the parameters. Call it before the state is allocated, with the same arguments
        on all replicas.

        Args:
            held: the range of each model parameter that this rank updates.
            buckets: Megatron-Core's buckets of a distributed optimizer, which `replicas` share.
        """
        self._architecture = architecture
        everything: Iterable[Any] = [param for bucket in buckets for param in bucket.params_list] if replicas else held
        parameters = [param for param in everything if param.entry.is_matrix]
        size, rank = (replicas.size(), replicas.rank()) if replicas else (1, 0)
        owners = _balanced([_cost(param.entry, architecture) for param in parameters], size)
        self._parameters = [(param, owner == rank) for param, owner in zip(parameters, owners, strict=True)]
        self._updated = [(param, held[param]) for param in parameters if param in held]
        self.excluded = {mine.main for _, mine in self._updated}
        if replicas is not None:
            self._exchange = _Exchange([each for each in buckets if not each.params.isdisjoint(parameters)], replicas)

    def init_state(self) -> None:
        """Allocate the state of every parameter, so that it can be loaded before the first step."""
        super().init_state()
        for main in self.excluded:
            if MOMENTUM not in self.state[main]:
                self.state[main][MOMENTUM] = torch.zeros_like(main.data, dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter."""
        super().step()  # first, because the code below overwrites gradients
        for param, mine in self._updated:
            _memory(param, mine).copy_(self._next(mine.main).view(-1))
        if self._exchange is not None:
            self._exchange.gather()
        for param, is_owner in self._parameters:
            if is_owner:
                param.main_grad.copy_(self._orthogonal(param))
            else:
                param.main_grad.zero_()
        if self._exchange is not None:
            self._exchange.scatter()
        group_of = {main: group for group in self.param_groups for main in group["params"]}
        for param, mine in self._updated:
            group = group_of[mine.main]
            mine.main.mul_(1 - group["lr"] * group["weight_decay"])
            mine.main.view(-1).add_(_memory(param, mine), alpha=-group["lr"])

    def _next(self, main: Tensor) -> Tensor:
        """Update the running average, and return the matrix to orthogonalize."""
        assert main.grad is not None
        gradient, average = main.grad.float(), self.state[main][MOMENTUM]
        average.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(average, self._momentum) if self._nesterov else average

    def _orthogonal(self, parameter: Any) -> Tensor:
        """Orthogonalize the matrices in a parameter's gradient buffer; return this rank's slice of them, scaled."""
        weight, part = parameter.entry, rank_slice(parameter.entry, groups.coordinates())
        mine = parameter.main_grad.to(torch.float32 if parameter.dtype == torch.float32 else torch.bfloat16)
        parts = _gathered(mine, weight, part)
        shapes = hf_shapes(weight, self._architecture, 0, part)
        whole = {name: mine.new_empty(shape) for name, shape in shapes.items()}
        for rank, held in parts.items():
            for piece, target in _pieces(weight, self._architecture, rank, held, whole):
                target.copy_(piece)
        by_shape = defaultdict(list)
        for name, shape in shapes.items():
            by_shape[shape].append(name)
        for (rows, columns), names in by_shape.items():
            count, scale = max(_BATCH // (rows * columns), 1), self._scale * math.sqrt(max(rows, columns))
            for first in range(0, len(names), count):
                some = names[first : first + count]
                done = orthogonalize(torch.stack([whole[name] for name in some])) * scale
                whole |= dict(zip(some, done, strict=True))
        result = torch.empty_like(mine)
        for piece, source in _pieces(weight, self._architecture, part, result, whole):
            piece.copy_(source)
        return result


class _Exchange:
    """Collectives over a distributed optimizer's buckets, of which each replica holds a shard."""

    def __init__(self, buckets: Sequence[Any], replicas: ProcessGroup) -> None:
        size, rank = replicas.size(), replicas.rank()
        self._replicas = replicas
        self._buckets = [(bucket.grad_data, bucket.grad_data.view(size, -1)[rank]) for bucket in buckets]

    def gather(self) -> None:
        """All-gather the shards of every bucket."""
        for whole, shard in self._buckets:
            torch.distributed.all_gather_into_tensor(whole, shard, group=self._replicas)

    def scatter(self) -> None:
        """Reduce-scatter every bucket into its shards."""
        for whole, shard in self._buckets:
            torch.distributed.reduce_scatter_tensor(shard, whole, group=self._replicas)


def _memory(param: Any, mine: ParamRange) -> Tensor:
    """Return the gradient buffer of a rank's range, fp32 or bf16 [stop - start]; updates are computed in it."""
    flat: Tensor = param.main_grad.view(-1)
    return flat[mine.start : mine.stop]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of each of the matrices [n, rows, columns] close to 1, in their dtype."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True, dtype=torch.float32)
    wide = wide / norms.clamp(min=_SMALLEST_NORM).to(wide.dtype)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        wide = torch.baddbmm(wide, polynomial, wide, beta=first)
    return wide.mT if is_tall else wide


def _gathered(mine: Tensor, weight: Weight, part: Slice) -> dict[Slice, Tensor]:
    """Return the slices of all tensor-parallel ranks of a parameter of which this rank holds a slice."""
    if weight.partition_dim is None or part.tp_size == 1:
        return {part: mine}
    group = groups.expert_tensor_parallel_group() if weight.per_expert else groups.tensor_parallel_group()
    found = [torch.empty_like(mine) for _ in range(part.tp_size)]
    torch.distributed.all_gather(found, mine, group=group)
    return {replace(part, tp_rank=rank): held for rank, held in enumerate(found)}


def _pieces(
    weight: Weight, architecture: Architecture, part: Slice, held: Tensor, whole: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of a rank's slice, each with the corresponding view of the whole matrix."""
    for row in rows_of(weight, architecture, part):
        yield held.view(-1)[row.elements].view(row.box.shape), whole[row.name][row.box.slices]


def _cost(weight: Weight, architecture: Architecture) -> int:
    """Return a number proportional to the operations needed to orthogonalize the matrices of a parameter."""
    return sum(math.prod(shape) * min(shape) for shape in hf_shapes(weight, architecture, 0).values())


def _balanced(costs: Sequence[int], count: int) -> list[int]:
    """Assign each cost to one of `count` ranks, always the one with the smallest load so far."""
    load, chosen = [0] * count, []
    for cost in costs:
        rank = min(range(count), key=load.__getitem__)
        load[rank] += cost
        chosen.append(rank)
    return chosen
