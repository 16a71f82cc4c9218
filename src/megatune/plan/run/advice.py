"""What a run that fits could do better. Only what matters is said: each check states its threshold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatune.plan.changes.fixes import OVERLAPS, Changes, Fix, fix, less_recompute
from megatune.plan.changes.variation import named, setting_of, smaller_micro_batch
from megatune.plan.estimate import Estimate
from megatune.plan.pages.words import percent, seconds, size
from megatune.plan.search import TIGHT

# The least share of a step's time, and of the device's memory, that a warning is worth.
_TIME, _MEMORY = 0.05, 0.01
_BUBBLE = 0.15  # of a step
_STATE = 0.1  # of the device's memory


def warnings_of(planned: Estimate) -> list[str]:
    """Return what is worth a word to a run that fits; on a CPU, where runs are tried and not paid for, only that memory
    is tight."""
    case = planned.case
    found, share = [], planned.fullest.total / case.machine.device.memory
    if share > TIGHT:
        planned_share = f"{percent(share)} of the device's is planned"
        found.append(f"memory is tight: {planned_share}, and the plan may be some percent off")
    if case.machine.device.generation == "cpu":
        return found
    checks = (_single_precision, tensor_parallel_across_machines, _no_sequence_parallel, _bubble, _nothing_to_share,
              _recompute_not_needed, _no_overlap)  # fmt: skip
    return [*found, *(warning for check in checks for warning in check(planned))]


def idle_words(planned: Estimate, idle_gpus: int) -> Iterator[str]:
    """GPUs of this machine that the run leaves alone."""
    if idle_gpus and planned.case.machine.device.generation != "cpu":
        yield (
            f"{idle_gpus} GPUs of this machine are idle: `num_processes: {planned.case.world_size + idle_gpus}` would"
            " train on all of them, with more rows in a step or fewer `gradient_accumulation_steps`"
        )


def _single_precision(planned: Estimate) -> Iterator[str]:
    """fp32 on a GPU, where bf16 gains 5 % or more."""
    if planned.case.settings.precision.params_dtype != "float32":
        return
    if (better := fix(planned, {"precision.bf16": True})) is not None and better.gain >= _TIME:
        yield f"this run computes in fp32: {better.text}"


def tensor_parallel_across_machines(planned: Estimate) -> Iterator[str]:
    """A tensor-parallel group that is not inside one machine, where its communication takes 5 % of a step or more."""
    case = planned.case
    tp, inside = case.settings.parallel.tensor_model_parallel_size, case.machine.gpus_per_node
    pp = case.settings.parallel.pipeline_model_parallel_size
    share = planned.time.tensor_parallel / planned.time.total
    if tp == 1 or case.world_size <= inside or inside % tp == 0 or share < _TIME:
        return
    said = (
        f"`tensor_model_parallel_size {tp}` goes across machines of {inside}: its communication waits for the network,"
        f" {seconds(planned.time.tensor_parallel)} of {seconds(planned.time.total)} a step"
    )
    candidates: Iterable[Changes] = (
        {
            "parallel.tensor_model_parallel_size": smaller,
            "parallel.pipeline_model_parallel_size": pp * tp // smaller,
            "parallel.sequence_parallel": smaller > 1,
        }
        for smaller in range(inside, 0, -1)
        if inside % smaller == 0 and tp % smaller == 0
    )
    best = _best(planned, candidates)
    yield said + (f"; {best.text}" if best is not None else f"; sizes that divide {inside} stay inside")


def _best(planned: Estimate, candidates: Iterable[Changes]) -> Fix | None:
    """Return the fastest of the changes that gain time and fit with something to spare."""
    limit = TIGHT * planned.case.machine.device.memory
    found = [each for changes in candidates if (each := fix(planned, changes)) is not None]
    roomy = [each for each in found if each.gain > 0 and each.after.fullest.total <= limit]
    return max(roomy, key=lambda each: each.gain, default=None)


def _no_sequence_parallel(planned: Estimate) -> Iterator[str]:
    """tp without sequence parallelism that costs 1 % of the memory, or 5 % of the time: it gives up nothing for it."""
    parallel = planned.case.settings.parallel
    if parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel:
        return
    better = fix(planned, {"parallel.sequence_parallel": True})
    if better is not None and (better.saving >= _MEMORY * planned.case.machine.device.memory or better.gain >= _TIME):
        yield f"tensor parallelism without sequence parallelism keeps whole what could be split: {better.text}"


def _bubble(planned: Estimate) -> Iterator[str]:
    """Stages that wait for 15 % of a step or more, and what makes them wait less by 5 % of its time."""
    case = planned.case
    stages = case.settings.parallel.pipeline_model_parallel_size
    share = planned.time.pipeline / planned.time.total
    if stages == 1 or share < _BUBBLE:
        return
    count = case.num_micro_batches
    few = f"{count} micro-batches for {stages} stages" if count < stages else f"{stages} stages"
    candidates: list[dict[str, Any]] = [smaller_micro_batch(case)]
    if case.settings.parallel.virtual_stages is None:
        candidates += [{"parallel.virtual_pipeline_model_parallel_size": size} for size in (2, 3, 4)]
    best = _best(planned, candidates)
    if best is not None and best.gain >= _TIME:
        yield f"{few} wait for each other {percent(share)} of a step: {best.text}"
        return
    # More rows in a step change what is trained, so this is said without a judgement of the whole.
    accumulation = "batch.gradient_accumulation_steps"
    more = fix(planned, {accumulation: max(4 * stages, 2 * count)})
    if more is not None and more.gain >= _TIME:
        rows = f"{more.after.case.global_batch_size} rows in a step instead of {case.global_batch_size}"
        gain = f"{named(more.changes)} trains {percent(1 / (1 - more.gain) - 1)} more tokens a second"
        yield f"{few} wait for each other {percent(share)} of a step; {gain}, with {rows}"


def _nothing_to_share(planned: Estimate) -> Iterator[str]:
    """One replica whose optimizer takes 10 % of the device's memory, where a smaller model-parallel size would share
    it out and gain 5 % of the time."""
    case, stage = planned.case, planned.fullest
    whole = stage.master_weights + stage.optimizer_state
    if case.shard_size > 1 or case.world_size == 1 or whole < _STATE * case.machine.device.memory:
        return
    paths = ("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size")
    sizes = {path: setting_of(case.settings, path) for path in paths}
    best = _best(planned, ({path: size // 2} for path, size in sizes.items() if size % 2 == 0))
    if best is not None and best.gain >= _TIME:
        one = "there is one replica of the model, so each rank keeps its optimizer's state whole"
        yield f"{one}, {size(whole)}; two would share it: {best.text}"


def _recompute_not_needed(planned: Estimate) -> Iterator[str]:
    """It would fit without, or with less of it, and gain 5 % of the time."""
    recompute = planned.case.settings.recompute
    if not recompute.recompute_granularity and not recompute.moe_layer_recompute:
        return
    best = _best(planned, less_recompute(planned.case))
    if best is not None and best.gain >= _TIME:
        some = best.after.case.settings.recompute.recompute_granularity is not None
        yield f"{'less recomputation would do' if some else 'recomputation is not needed'}: {best.text}"


def _no_overlap(planned: Estimate) -> Iterator[str]:
    """Replicas that exchange gradients and parameters while nothing computes, 5 % of the time or more."""
    case = planned.case
    parallel = case.settings.parallel
    if case.shard_size == 1 or (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
        return
    changes = OVERLAPS if parallel.use_distributed_optimizer else {"parallel.overlap_grad_reduce": True}
    better = fix(planned, changes)
    if better is not None and better.after.fits and better.gain >= _TIME:
        yield f"gradient reduction is not overlapped with compute: {better.text}"
