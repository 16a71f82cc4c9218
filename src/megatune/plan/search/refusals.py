"""Layouts of the machine's processes that cannot be: how many, and why, in the words of the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatune.config.rules import check
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.problem import divisors, nearest
from megatune.config.settings import ParallelSettings
from megatune.errors import Finding
from megatune.plan.search.request import Refusal
from megatune.plan.search.space import Space

_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


@dataclass
class _Group:
    count: int
    example: Mapping[str, int]


def refusals(space: Space) -> tuple[Refusal, ...]:
    """Of all ways to deal the processes out, tensor parallelism inside a machine, those that the rules refuse, grouped
    by the first reason."""
    groups: dict[str, _Group] = {}
    for what, count, example in _impossible(space):
        group = groups.setdefault(what, _Group(0, example))
        group.count += count
    found = [_refusal(space, what, group) for what, group in groups.items()]
    return tuple(sorted(found, key=lambda refusal: -refusal.count))


def _impossible(space: Space) -> Iterator[tuple[str, int, Mapping[str, int]]]:
    """What is wrong, with how many layouts, and one of them as settings."""
    request, architecture = space.request, space.request.model.architecture
    world = request.world_size
    inside = world if space.one_machine else request.machine.gpus_per_node
    for tp in (size for size in divisors(inside) if world % size == 0):
        for pp in divisors(world // tp):
            for cp in divisors(world // (tp * pp)):
                layout = {_TP: tp, _PP: pp, _CP: cp}
                if not tensor_parallel_fits(architecture, tp):
                    yield "tensor parallelism does not split the model evenly", 1, layout
                elif pp > architecture.num_layers:
                    yield "more pipeline stages than layers", 1, layout
                elif request.rows % (world // (tp * pp * cp)):
                    yield "the global batch is not dealt evenly to the data-parallel processes", 1, layout
                elif architecture.moe is not None:
                    yield from _impossible_experts(space, layout)


def _impossible_experts(space: Space, layout: Mapping[str, int]) -> Iterator[tuple[str, int, Mapping[str, int]]]:
    moe, world = space.request.model.architecture.moe, space.request.world_size
    assert moe is not None
    for etp in sorted({1, layout[_TP]}):
        for ep in divisors(world // layout[_PP]):
            experts = {**layout, _EP: ep, _ETP: etp}
            if moe.moe_ffn_hidden_size % etp:
                yield "expert tensor parallelism does not split the experts evenly", 1, experts
            elif moe.num_experts % ep:
                yield "expert parallelism does not deal the experts evenly", 1, experts
            elif world % (ep * etp * layout[_PP]):
                yield "the processes do not hold whole copies of the experts", 1, experts


def _refusal(space: Space, what: str, group: _Group) -> Refusal:
    example = _finding(space, group.example)
    return Refusal(what=what, why=example.why, count=group.count, example=example)


def _finding(space: Space, layout: Mapping[str, int]) -> Finding:
    """What the rules say about the example, or, as no rule knows of a global batch, what is wrong with that."""
    request = space.request
    base = request.settings
    parallel = ParallelSettings.model_validate({**layout, "sequence_parallel": 1 < layout[_TP] <= space.cutoff})
    settings = base.model_copy(
        update={"parallel": parallel, "run": base.run.model_copy(update={"num_processes": None})}
    )
    named = {f"parallel.{key}" for key in layout}
    found = check(settings, request.model.architecture, request.world_size, origins=dict.fromkeys(named, "plan"))
    about = [finding for finding in found if finding.where]
    if about:
        return Finding(about[0].what, "", about[0].why, about[0].fix)
    dp = request.world_size // (layout[_TP] * layout[_PP] * layout[_CP])
    valid = nearest(request.rows, (max(request.rows // dp, 1) * dp, (request.rows // dp + 1) * dp))
    return Finding(
        f"a global batch of {request.rows} rows on {dp} data-parallel processes",
        "",
        "every process takes as many rows of a step",
        f"ask for a global batch of {valid}",
    )
