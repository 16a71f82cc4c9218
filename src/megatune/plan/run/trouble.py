"""Compares a run with its plan, and proposes changes if it ran out of memory or was slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.report import Outcome, read_outcome
from megatune.plan.fixes import Fix, savings, speedups
from megatune.plan.memory.stage import StageMemory
from megatune.plan.pages.words import TIME_NAMES, describe_row_length, parts, percent, size
from megatune.plan.run.record import (
    PLAN_NAME,
    RankMemory,
    RunRecord,
    comparable,
    read_rank_memory,
    read_records,
    verdict,
)
from megatune.plan.time.estimate import TIME_PARTS

_SLOW = 1.25  # measured over planned seconds of a step, beyond which a run counts as slow
_LARGER = 1.1  # measured over planned bytes, beyond which a part counts as larger than planned
_CLOSE = 0.85  # share of the device's memory below which something else caused the end of memory
_LESS = 0.9  # share of the memory at which a run ended that proposals may need
# Outcomes of a plan's record, and of a launcher's report.
_OUTCOMES = {
    "finished": "finished",
    "done": "finished",
    "stopped": "stopped on request; the same command resumes it",
    "interrupted": "interrupted",
    "failed": "failed",
    "hung": "hung",
    "running": "did not reach its end, or is still running",
}


def diagnose(folder: Path) -> list[str]:
    """Return lines for a terminal on how a run ended, from its output_dir.

    Raises:
        MegatuneError: INPUT if it is not a run's folder, or the run was not planned.
    """
    is_run, launch = (folder / "run.yaml").is_file(), folder / "launch"
    if not is_run and not (folder / PLAN_NAME).is_file():
        why = "there is no run.yaml in it" if folder.is_dir() else "there is no such folder"
        fix = "give the output_dir of a run, a settings file, or a setting"
        if (folder.absolute().parent / "run.yaml").is_file():
            fix = f"megatune explain {folder.parent}: that is the run's"
        raise MegatuneError(Finding(f"{folder} is not the folder of a run", why=why, fix=fix), ExitCode.INPUT)
    try:
        record = read_records(folder)[-1]
    except MegatuneError as error:
        raise (_unplanned(folder, error) if is_run else error) from None
    world_size = record.case.world_size
    ended = read_outcome(launch, world_size)
    head = f"{folder}: {_what(ended) or _OUTCOMES[record.outcome]}"
    if ended is not None and ended.exit_code == ExitCode.OUT_OF_MEMORY:
        # An earlier run with more ranks may have left files of other ranks.
        memory = [each for each in read_rank_memory(launch) if each.rank < world_size]
        return [head, *_out_of_memory(record, ended.rank, memory)]
    return [head, *verdict(record), *_memory_apart(record), *_pace(folder, record)]


def ran_out_of_memory(folder: Path) -> bool:
    """Return whether the run in this folder ran out of memory, by its launcher's report."""
    ended = read_outcome(folder / "launch")
    return ended is not None and ended.exit_code == ExitCode.OUT_OF_MEMORY


def _what(ended: Outcome | None) -> str:
    """Return the failure as text; "" if there is none, or if it is unknown."""
    return ended.findings[0].what if ended is not None and ended.findings else ""


def _unplanned(folder: Path, error: MegatuneError) -> MegatuneError:
    """Describe the end of a run without a plan, its peak memory, and how to get a plan."""
    ended = read_outcome(folder / "launch")
    usual = "how it ended is not recorded" if ended is None else _OUTCOMES.get(ended.kind, ended.kind)
    what = f"{folder}: {_what(ended) or usual}"
    if peak := max((each.peak for each in read_rank_memory(folder / "launch")), default=0):
        what += f"; a rank held up to {size(peak)}"
    end, why = "it has no plan", f"there is no {PLAN_NAME} in {folder}; runs with memory_check: off have none"
    if (folder / PLAN_NAME).is_file():
        end, why = f"its {PLAN_NAME} {error.findings[0].what}", error.findings[0].why
    fix = f"`megatune plan {folder}/run.yaml` plans it now; its next start records its plan"
    return MegatuneError(Finding(f"{what}; {end}", why=why, fix=fix), ExitCode.INPUT)


def _table(memory: RankMemory, stage: StageMemory, counted: str) -> Iterator[str]:
    """Compare kinds of memory of a rank with the plan, as far as its measurements distinguish them."""
    state, name, held = stage.weights + stage.gradients + stage.master_weights, "master weights", memory.loaded
    if memory.stepped:
        state, name, held = state + stage.optimizer_state, "optimizer", memory.stepped
    name, whole = f"weights, gradients, {name}", comparable(stage, counted)
    if counted == "resident":  # building the model also loads libraries: the two are not distinguished
        state, name = state + stage.framework, f"framework, {name}"
    temporary = ("activations, loss, communication", whole - state, max(0, memory.peak - held))
    rows = [(name, state, held), temporary] if held else []
    for name, planned, measured in (*rows, ("all", whole, memory.peak)):
        is_larger = measured > _LARGER * planned and planned
        larger = f"  {measured / planned:.1f} times what was planned" if is_larger else ""
        yield f"    {name:<47} planned {size(planned):>9}, was {size(measured):>9}{larger}"


def _out_of_memory(record: RunRecord, rank: int | None, ranks: list[RankMemory]) -> Iterator[str]:
    """Yield the memory of the first failed rank or the fullest one, its comparison with the plan, and proposals."""
    planned = (record.as_trained() or (record.planned(),))[0]
    case, available = planned.case, planned.case.machine.device.memory
    usual = "resident" if case.machine.device.on_cpu else "allocated"
    counted = record.measured.counted if record.measured else usual
    fullest = max(ranks, key=lambda each: each.peak, default=None)
    memory = next((each for each in ranks if each.rank == rank), fullest)
    stage = planned.stages[memory.stage] if memory is not None else planned.fullest
    held = f"{size(stage.total)} of {size(available)} for stage {stage.stage} ({parts(stage)})"
    yield f"planned    {held}, with rows of {describe_row_length(case)}"
    expected = comparable(stage, counted)
    if memory is None:
        yield "measured   nothing: the run ended before any rank recorded its memory"
    else:
        moment = "before the end of its first step" if memory.loaded else "before its model was built"
        moment = "as last recorded, after its first step or later" if memory.stepped else moment
        yield f"measured   rank {memory.rank}, {moment}:"
        yield from _table(memory, stage, counted)
        if max(memory.peak + stage.total - expected, stage.total) < _CLOSE * available:
            why = (
                "one large allocation, another process on the device, or a lower limit of the process or its container"
            )
            yield f"limit      memory ended at {size(memory.peak)} of {size(available)}: {why}"
    # Proposals must need less memory than the run had.
    share = _LESS * min(1.0, memory.peak / expected if memory else 1.0)
    yield from _listed(savings(planned, room=int(share * min(planned.fullest.total, available))))


def _memory_apart(record: RunRecord) -> Iterator[str]:
    """Yield the stages whose memory exceeded the plan, by kind."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None:
        return
    for memory in measured.stages:
        stage = trained[0].stages[memory.stage]
        if memory.peak > _LARGER * comparable(stage, measured.counted):
            yield f"memory     larger than planned on stage {memory.stage}, rank {memory.rank}:"
            yield from _table(memory, stage, measured.counted)


def _pace(folder: Path, record: RunRecord) -> Iterator[str]:
    """Yield whether the run was slow, the planned parts of a step, and proposals."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None or measured.step_seconds is None:
        yield "measured   nothing: no step was finished"
        return
    planned = trained[1]
    ratio = measured.step_seconds / planned.time.total
    if ratio <= max(_SLOW, 1 + planned.time.uncertainty):
        yield "it was as fast as planned" if ratio > 1 / _SLOW else "it was faster than planned"
        return
    shares = {part: getattr(planned.time, part) / planned.time.total for part in TIME_PARTS}
    listed = sorted(((share, part) for part, share in shares.items() if share >= 0.01), reverse=True)
    yield f"slow       {ratio:.1f} times what was planned, which is ±{percent(planned.time.uncertainty)}"
    yield f"planned    {', '.join(f'{TIME_NAMES[part]} {percent(share)}' for share, part in listed)}"
    if not planned.case.machine.calibration.of_time:
        fits = f"`megatune plan --calibrate {folder}` fits the planner to this machine"
        yield f"           {fits}; a difference that remains has a cause in the run"
    yield from _listed(speedups(planned))


def _listed(fixes: list[Fix]) -> Iterator[str]:
    if not fixes:
        yield f"{'helps':<10} no change of settings, by the planner"
        return
    yield "helps, by the planner:"
    yield from (f"    {number}. {each}" for number, each in enumerate(fixes, 1))
