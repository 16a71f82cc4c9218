"""Changes of settings that save memory or time, each with what the planner says it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from megatune.config.names import plain
from megatune.plan.case import Case
from megatune.plan.changes.variation import Changes, named, smaller_micro_batch, varied, with_settings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.pages.words import change, seconds, size
from megatune.plan.search import TIGHT, SearchRequest, is_tight, safe_bytes, search

# A saving below this share of what a rank holds, and a gain below this share of a step, are not worth a change.
_LEAST_SAVING, _LEAST_GAIN = 0.02, 0.02
# Changes of what is computed, not only of how: offered after those that leave the numbers of the run as they are.
_CHANGES_NUMBERS = {"data.cutoff_len", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "precision.bf16",
                    "finetuning.finetuning_type"}  # fmt: skip


@dataclass(frozen=True)
class Fix:
    """A change of settings, values by "group.name", and the plans before and after it."""

    changes: Changes
    before: Estimate
    after: Estimate

    @property
    def keeps_numbers(self) -> bool:
        """Whether the run trains on the same tokens with the same roundings."""
        return not _CHANGES_NUMBERS & self.changes.keys()

    @property
    def saving(self) -> int:
        """Bytes of the fullest rank."""
        return self.before.fullest.total - self.after.fullest.total

    @property
    def gain(self) -> float:
        """Share of a step's time, for as many tokens."""
        return 1 - self.before.time.tokens_per_second / self.after.time.tokens_per_second

    def __str__(self) -> str:
        return plain(self.text)

    @property
    def text(self) -> str:
        """The changes and what they do, for a message, whose dialect writes the names (`config.names`)."""
        memory = f"{size(self.after.fullest.total)} ({size(abs(self.saving))} {'less' if self.saving > 0 else 'more'})"
        pace = change(1 - self.gain, "slower", "faster", "as fast")
        return f"{named(self.changes)}: {memory}, {seconds(self.after.time.total)} a step ({pace})"


def savings(before: Estimate, count: int = 3, room: int | None = None) -> list[Fix]:
    """Find the cheapest changes after which the run fits, by time; those that help most where none is enough.

    Single changes come before pairs of them, and those that leave the run's numbers as they are before others. `room`
    are the bytes that a rank may be planned to hold; None for the device's memory, less what the planner may be off.
    """
    if room is None:
        # What surely fits is offered where there is anything, or else what fits as planned.
        safe, likely = safe_bytes(before.case), int(TIGHT * before.case.machine.device.memory)
        sure = savings(before, count, safe)
        return sure if any(each.after.fullest.total <= safe for each in sure) else savings(before, count, likely)

    def fits(found: Fix) -> bool:
        return found.after.fullest.total <= room

    asked = [(each, fix(before, each)) for each in _less_memory(before.case) if each]
    least = _LEAST_SAVING * before.fullest.total
    useful = [(each, found) for each, found in asked if found is not None and found.saving >= least]
    enough = _distinct(sorted((found for _, found in useful if fits(found)), key=_cost))
    if len(enough) < count:
        # A pair of which one half is enough offers nothing new.
        halves = [each for each, found in useful if not fits(found)]
        pairs = ({**one, **other} for one, other in combinations(halves, 2) if not one.keys() & other.keys())
        both = filter(None, (fix(before, each) for each in pairs))
        enough += _distinct(sorted(filter(fits, both), key=_cost))
    if not enough:
        enough = _distinct(sorted((found for _, found in useful), key=lambda found: -found.saving))
    return enough[:count]


def speedups(before: Estimate, count: int = 3) -> list[Fix]:
    """Find the changes that gain most time and still fit."""
    asked = filter(None, (fix(before, each) for each in _less_time(before.case) if each))
    found = [each for each in asked if each.after.fits and each.gain >= _LEAST_GAIN]
    return _distinct(sorted(found, key=_cost))[:count]


def searched(before: Estimate) -> Fix | None:
    """Search for the fastest layout of the same devices and rows that fits; None where none does."""
    case = before.case
    found = search(
        SearchRequest(
            model=case.model,
            machine=case.machine,
            world_size=case.world_size,
            settings=case.settings,
            global_batch_size=case.global_batch_size,
            document_length=case.document_length,
            image_tokens=case.image_tokens,
            largest_picture=case.largest_picture,
            lengths=case.lengths,
            keep=1,
            free=False,
        )
    ).best
    if found is None:
        return None
    changes = {
        f"{group}.{name}": value
        for group in ("parallel", "batch", "recompute")
        for name, value in getattr(found.case.settings, group)
        if value != getattr(getattr(case.settings, group), name)
    }
    return Fix(changes, before, found)


def more_devices(too_large: Sequence[Estimate]) -> Estimate | None:
    """Find the fastest of the nearest misses' layouts that surely fits on two, four, eight or sixteen times as many
    devices, or that fits as planned.

    These make up more stages, shard more experts, or train more rows at a time. None where sixteen times are too few.
    """
    likely: Estimate | None = None
    cases = [near.case for near in too_large if near.case.machine.device.generation != "cpu"]
    for factor in (2, 4, 8, 16):
        asked = (estimate(more) for case in cases for more in _on_more(case, factor))
        found = sorted((after for after in asked if after.fits), key=lambda after: after.time.total)
        if sure := next((after for after in found if not is_tight(after)), None):
            return sure
        likely = likely or next(iter(found), None)
    return likely


def _on_more(case: Case, factor: int) -> Iterator[Case]:
    """Yield the layout on `factor` times as many devices, shared by its kinds of parallelism in every way."""
    parallel = case.settings.parallel
    settings = with_settings(case.settings, {"run.num_processes": None})
    wider = replace(case, settings=settings, world_size=factor * case.world_size)
    shares = [2**power for power in range(factor.bit_length())]
    for stages, experts in product(shares, shares if case.model.architecture.moe is not None else (1,)):
        rows = case.micro_batch_size * wider.dp_size // stages
        if wider.dp_size % stages or case.global_batch_size % rows:
            continue
        changes = {
            "parallel.pipeline_model_parallel_size": stages * parallel.pipeline_model_parallel_size,
            "parallel.expert_model_parallel_size": experts * parallel.expert_model_parallel_size,
            "batch.gradient_accumulation_steps": case.global_batch_size // rows,
        }
        if (found := varied(wider, changes)) is not None:
            yield found[1]


def _distinct(found: Iterable[Fix]) -> list[Fix]:
    """Keep the first of those that change the same settings to different values."""
    first: dict[frozenset[str], Fix] = {}
    for each in found:
        first.setdefault(frozenset(each.changes) - {"batch.gradient_accumulation_steps"}, each)
    return list(first.values())


def fix(before: Estimate, changes: Changes) -> Fix | None:
    """Judge one change; None where it cannot be made."""
    found = varied(before.case, changes)
    return None if found is None else Fix(found[0], before, estimate(found[1]))


def _cost(found: Fix) -> tuple[bool, float]:
    return not found.keeps_numbers, -found.after.time.tokens_per_second


def _less_memory(case: Case) -> Iterator[Changes]:
    """Yield what may save memory, {} for what is no change."""
    settings = case.settings
    parallel, recompute = settings.parallel, settings.recompute
    yield smaller_micro_batch(case)
    if case.micro_batch_size > 2:
        yield {"batch.per_device_train_batch_size": 1}
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    if not parallel.use_distributed_optimizer and case.shard_size > 1:
        yield {"parallel.use_distributed_optimizer": True}
    if not settings.performance.cross_entropy_loss_fusion:
        yield {"performance.cross_entropy_loss_fusion": True}
    if recompute.recompute_granularity != "full":
        for modules in _modules(case):
            if set(modules) - set(recompute.recompute_modules if recompute.recompute_granularity else ()):
                yield {"recompute.recompute_granularity": "selective", "recompute.recompute_modules": modules}
        yield _FULL
    yield from _more_parallel(case)
    if not settings.optimizer.optimizer_cpu_offload and case.machine.device.generation != "cpu":
        yield {"optimizer.optimizer_cpu_offload": True}
    yield {"optimizer.exp_avg_dtype": "bf16", "optimizer.exp_avg_sq_dtype": "bf16"}
    longest = min(settings.data.cutoff_len, case.sequence_length)
    if longest >= 1024:
        yield {"data.cutoff_len": longest // 2}


_METHODS = ("recompute.recompute_granularity", "recompute.recompute_method", "recompute.recompute_num_layers")
_FULL = dict(zip(_METHODS, ("full", "uniform", 1), strict=True))
OVERLAPS: Changes = {"parallel.overlap_grad_reduce": True, "parallel.overlap_param_gather": True}
NO_RECOMPUTE: Changes = {**dict.fromkeys(_METHODS), "recompute.moe_layer_recompute": False}


def _modules(case: Case) -> Iterator[list[str]]:
    """Yield modules to recompute, the cheapest first."""
    moe = case.model.architecture.moe
    feed_forward = ["mlp"] if moe is None else ["moe"] if all(moe.layers) else ["mlp", "moe"]
    yield ["core_attn"]
    yield ["layernorm"]
    yield ["layernorm", *feed_forward]


def less_recompute(case: Case) -> Iterator[Changes]:
    """Yield no recomputation, and cheaper kinds than full."""
    yield NO_RECOMPUTE
    if case.settings.recompute.recompute_granularity == "full":
        for modules in _modules(case):
            selective = {"recompute.recompute_granularity": "selective", "recompute.recompute_modules": modules}
            yield {**NO_RECOMPUTE, **selective}


def _more_parallel(case: Case) -> Iterator[Changes]:
    parallel = case.settings.parallel
    tp, pp, cp = (parallel.sizes(case.world_size)[name] for name in ("tp", "pp", "cp"))
    for larger in (2 * tp, 4 * tp):
        if larger <= case.machine.gpus_per_node:
            yield {"parallel.tensor_model_parallel_size": larger, "parallel.sequence_parallel": True}
    for larger in (2 * pp, 4 * pp):
        yield {"parallel.pipeline_model_parallel_size": larger}
    if case.sequence_length >= 4096 * 2 * cp:
        yield {"parallel.context_parallel_size": 2 * cp}
    if case.model.architecture.moe is not None:
        yield {"parallel.expert_model_parallel_size": 2 * parallel.expert_model_parallel_size}


def _less_time(case: Case) -> Iterator[Changes]:
    """Yield what may save time, {} for what is no change."""
    settings = case.settings
    parallel, recompute, performance = settings.parallel, settings.recompute, settings.performance
    if recompute.recompute_granularity or recompute.moe_layer_recompute:
        yield from less_recompute(case)
    if case.shard_size > 1 and parallel.use_distributed_optimizer:
        yield OVERLAPS
    elif case.shard_size > 1:
        yield {"parallel.overlap_grad_reduce": True}
    if settings.precision.params_dtype == "float32" and case.machine.device.generation != "cpu":
        yield {"precision.bf16": True}
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tp > 1:
        yield {"parallel.tensor_model_parallel_size": tp // 2}
        yield {"parallel.tensor_model_parallel_size": tp // 2, "parallel.sequence_parallel": tp > 2}
        if not parallel.sequence_parallel:
            yield {"parallel.sequence_parallel": True}
    if pp > 1:
        yield {"parallel.pipeline_model_parallel_size": pp // 2}
        for virtual in (2, 4):
            yield {"parallel.virtual_pipeline_model_parallel_size": virtual}
    if parallel.context_parallel_size > 1:
        yield {"parallel.context_parallel_size": parallel.context_parallel_size // 2}
    if settings.optimizer.optimizer_cpu_offload:
        yield {"optimizer.optimizer_cpu_offload": False}
    yield {"batch.per_device_train_batch_size": 2 * case.micro_batch_size}
    yield smaller_micro_batch(case)
    if case.model.architecture.moe is not None and not settings.experts.moe_grouped_gemm:
        yield {"experts.moe_grouped_gemm": True}
    if not performance.cross_entropy_loss_fusion:
        yield {"performance.cross_entropy_loss_fusion": True}
