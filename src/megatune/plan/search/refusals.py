"""Layouts of the machine's processes that cannot be: how many, and why, in the words of the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatune.config.rules import check
from megatune.config.rules.layout import tensor_parallel_fits
from megatune.config.rules.problem import divisors, nearest
from megatune.config.settings import ParallelSettings
from megatune.errors import Finding
from megatune.plan.changes.variation import with_settings
from megatune.plan.search.candidate import Refusal
from megatune.plan.search.space import Space

_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def refusals(space: Space) -> tuple[Refusal, ...]:
    """Group the layouts that the rules refuse by the first reason, the largest group first.

    They are of all the processes' layouts with tensor parallelism inside a machine.
    """
    examples: dict[str, Mapping[str, int]] = {}
    counts: Counter[str] = Counter()
    for what, layout in _impossible(space):
        examples.setdefault(what, layout)
        counts[what] += 1
    findings = {what: _finding(space, layout) for what, layout in examples.items()}
    return tuple(
        Refusal(what=what, why=findings[what].why, count=count, example=findings[what])
        for what, count in counts.most_common()
    )


def _impossible(space: Space) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield layouts that cannot be, as settings, each with what is wrong."""
    request, architecture = space.request, space.request.model.architecture
    world = request.world_size
    inside = world if space.one_machine else request.machine.gpus_per_node
    for tp in (size for size in divisors(inside) if world % size == 0):
        for pp in divisors(world // tp):
            for cp in divisors(world // (tp * pp)):
                layout = {_TP: tp, _PP: pp, _CP: cp}
                if not tensor_parallel_fits(architecture, tp):
                    yield "tensor parallelism does not split the model evenly", layout
                elif pp > architecture.num_layers:
                    yield "more pipeline stages than layers", layout
                elif request.rows % (world // (tp * pp * cp)):
                    yield "the global batch is not split evenly over the data-parallel processes", layout
                elif architecture.moe is not None:
                    yield from _impossible_experts(space, layout)


def _impossible_experts(space: Space, layout: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, int]]]:
    moe, world = space.request.model.architecture.moe, space.request.world_size
    assert moe is not None
    for etp in sorted({1, layout[_TP]}):
        for ep in divisors(world // layout[_PP]):
            experts = {**layout, _EP: ep, _ETP: etp}
            if moe.moe_ffn_hidden_size % etp:
                yield "expert tensor parallelism does not split the experts evenly", experts
            elif moe.num_experts % ep:
                yield "expert parallelism does not shard the experts evenly", experts
            elif world % (ep * etp * layout[_PP]):
                yield "the processes do not hold whole copies of the experts", experts


def _finding(space: Space, layout: Mapping[str, int]) -> Finding:
    """Return what the rules say about a layout, or, as no rule knows of a global batch, what is wrong with that."""
    request = space.request
    parallel = ParallelSettings.model_validate({**layout, "sequence_parallel": 1 < layout[_TP] <= space.cutoff})
    settings = with_settings(request.settings, {"run.num_processes": None}).model_copy(update={"parallel": parallel})
    origins = {f"parallel.{key}": "plan" for key in layout}
    found = check(settings, request.model.architecture, request.world_size, origins=origins)
    if about := next((finding for finding in found if finding.where), None):
        return replace(about, where="")
    dp = request.world_size // (layout[_TP] * layout[_PP] * layout[_CP])
    valid = nearest(request.rows, (max(request.rows // dp, 1) * dp, (request.rows // dp + 1) * dp))
    what = f"a global batch of {request.rows} rows on {dp} data-parallel processes"
    return Finding(what, "", "every process takes as many rows of a step", f"ask for a global batch of {valid}")
