"""Muon: updates of matrices are orthogonalized, and AdamW updates everything else."""

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
from megatune.families.weights import Slice, Weight, hf_shapes, segments

# Keller Jordan's quintic iteration, as in torch.optim.Muon: five steps bring every singular value near 1.
_COEFFICIENTS, _STEPS, _SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
_BATCH = 2**26  # elements of matrices of one shape that are orthogonalized together
MOMENTUM = "momentum_buffer"


class ParamRange(NamedTuple):
    """Elements start..stop of a model parameter, flattened, which this rank's optimizer updates as `main`."""

    main: Tensor
    start: int
    stop: int


class Muon(FusedAdam):
    """Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) for the matrices of linear layers.

    Of a matrix M with gradient G, momentum m and running average B: B ← m B + (1 − m) G, U ← m B + (1 − m) G (with
    Nesterov's momentum, otherwise B), then
    M ← M (1 − learning rate · weight decay) − learning rate · scale · √max(rows, columns) · orthogonal(U), where
    orthogonal(P S Qᵀ) ≈ P Qᵀ. A matrix is a Hugging Face tensor, whatever it is stacked with in the engine: a
    query, key or value projection, a gate, one expert. It is put together from tensor-parallel ranks. Where the
    optimizer is distributed, each replica orthogonalizes some of the matrices, and sends the others what they update.

    State of a matrix: `momentum_buffer`, fp32, of its shape; of other parameters Adam's. Products are computed in bf16
    where the model is 16-bit, otherwise in fp32.

    Args:
        momentum: decay of the running average of gradients.
        nesterov: what is orthogonalized has the new gradient once more.
        scale: 0.2 makes updates about as large as AdamW's.
        adam: of `FusedAdam`, for everything else.
    """

    def __init__(self, params: Iterable[Any], *, momentum: float, nesterov: bool, scale: float, **adam: Any) -> None:
        super().__init__(params, **adam)
        self._momentum, self._nesterov, self._scale = momentum, nesterov, scale
        # Of each parameter that is made of matrices whether this rank orthogonalizes them, and what it updates of it.
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
        """Take over the matrices among the parameters. Before the state is made; the same on all replicas.

        Args:
            held: what this rank updates, by parameter of the model.
            buckets: Megatron-Core's, of a distributed optimizer; with `replicas` that share them.
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
        """Give every parameter its state, so that it can be loaded into before the first step."""
        super().init_state()
        for main in self.excluded:
            if MOMENTUM not in self.state[main]:
                self.state[main][MOMENTUM] = torch.zeros_like(main.data, dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter."""
        super().step()  # first: it reads gradients whose memory is needed below
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
        """Update the running average, and return what is to be orthogonalized."""
        assert main.grad is not None
        gradient, average = main.grad.float(), self.state[main][MOMENTUM]
        average.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(average, self._momentum) if self._nesterov else average

    def _orthogonal(self, parameter: Any) -> Tensor:
        """Orthogonalize the matrices in a parameter's gradient memory; return this rank's part of them, scaled."""
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
    """Exchanges of a distributed optimizer's buckets between replicas, each of which holds a share of every bucket."""

    def __init__(self, buckets: Sequence[Any], replicas: ProcessGroup) -> None:
        size, rank = replicas.size(), replicas.rank()
        self._replicas = replicas
        self._buckets = [(bucket.grad_data, bucket.grad_data.view(size, -1)[rank]) for bucket in buckets]

    def gather(self) -> None:
        """Give every replica the shares of all."""
        for whole, share in self._buckets:
            torch.distributed.all_gather_into_tensor(whole, share, group=self._replicas)

    def scatter(self) -> None:
        """Add up what replicas hold, and leave each its share."""
        for whole, share in self._buckets:
            torch.distributed.reduce_scatter_tensor(share, whole, group=self._replicas)


def _memory(param: Any, mine: ParamRange) -> Tensor:
    """Return the gradient memory of what a rank updates, fp32 or bf16 [stop - start]: updates are computed in it."""
    flat: Tensor = param.main_grad.view(-1)
    return flat[mine.start : mine.stop]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices [n, rows, columns] near 1, each by itself, in their dtype."""
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
    """Return the slices of all tensor-parallel ranks of what this rank holds a slice of."""
    if weight.partition_dim is None or part.tp_size == 1:
        return {part: mine}
    group = groups.expert_tensor_parallel_group() if weight.per_expert else groups.tensor_parallel_group()
    found = [torch.empty_like(mine) for _ in range(part.tp_size)]
    torch.distributed.all_gather(found, mine, group=group)
    return {replace(part, tp_rank=rank): held for rank, held in enumerate(found)}


def _pieces(
    weight: Weight, architecture: Architecture, part: Slice, held: Tensor, whole: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of a rank's slice, each with the view of the matrix that it is a piece of."""
    rows, first = held.view(-1, held.shape[-1]), 0
    for one in segments(weight, architecture, part):
        of_matrix = whole[one.name].narrow(one.dim, one.start, one.stop - one.start)
        yield rows[first : first + len(of_matrix)], of_matrix
        first += len(of_matrix)


def _cost(weight: Weight, architecture: Architecture) -> int:
    """Return a number in proportion to the operations that the matrices of a parameter take."""
    return sum(math.prod(shape) * min(shape) for shape in hf_shapes(weight, architecture, 0).values())


def _balanced(costs: Sequence[int], count: int) -> list[int]:
    """Assign to each cost one of `count` ranks, always the one with the least so far."""
    load, chosen = [0] * count, []
    for cost in costs:
        rank = min(range(count), key=load.__getitem__)
        load[rank] += cost
        chosen.append(rank)
    return chosen
