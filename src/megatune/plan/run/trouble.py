"""What became of a run beside its plan, and what helps where it ran out of memory or is slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.changes.fixes import Fix, savings, speedups
from megatune.plan.memory.estimate import StageMemory
from megatune.plan.pages.words import TIME_WORDS, parts, percent, row_words, seconds, size
from megatune.plan.run.ended import Ended, how_it_ended, metrics, unplanned
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
_CLOSE = 0.85  # of the memory that was taken for free; below it, something else ended the run
_LESS = 0.9  # of the memory at which a run ended, for what helps


@dataclass(frozen=True)
class _Run:
    """A run as its folder says."""

    folder: Path
    record: RunRecord
    ended: Ended
    memory: list[RankMemory]


def diagnose(folder: Path) -> list[str]:
    """Say what became of a run, from its output_dir, as lines for a terminal.

    Raises:
        MegatuneError: INPUT, where it is no run's, or nothing was planned for it.
    """
    if not (folder / "run.yaml").is_file() and not (folder / PLAN_NAME).is_file():
        why = "there is no run.yaml in it" if folder.is_dir() else "there is no such folder"
        finding = Finding(f"{folder} is not the folder of a run", why=why, fix="give the output_dir of a run")
        raise MegatuneError(finding, ExitCode.INPUT)
    try:
        record = read_records(folder)[-1]
    except MegatuneError as error:
        if (folder / "run.yaml").is_file():
            raise unplanned(folder, error) from None
        raise
    world_size = record.case.world_size
    # An earlier run of more ranks may have left notes of those that are not in this one.
    memory = [each for each in read_rank_memory(folder / "launch") if each.rank < world_size]
    run = _Run(folder, record, how_it_ended(folder / "launch", world_size), memory)
    outcomes = {
        "finished": "finished",
        "stopped": "stopped on request; the same command resumes it",
        "failed": "failed",
        "running": "did not come to an end, or is still running",
    }
    head = f"{folder}: {run.ended.what or outcomes[run.record.outcome]}"
    if run.ended.out_of_memory:
        return [head, *_out_of_memory(run)]
    return [head, *verdict(run.record), *_memory_apart(run), *_pace(run)]


def ran_out_of_memory(folder: Path) -> bool:
    """Return whether the run in this folder ended so, by its launcher's report."""
    return how_it_ended(folder / "launch").out_of_memory


class _Share(NamedTuple):
    """Bytes that one kind of thing was planned to take, and took."""

    name: str
    planned: int
    measured: int

    @property
    def is_larger(self) -> bool:
        return self.measured > _LARGER * self.planned


def _shares(memory: RankMemory, stage: StageMemory, counted: str) -> list[_Share]:
    """Split what a rank held, as far as its moments tell kinds apart."""
    state, name = stage.weights + stage.gradients + stage.master_weights, "weights, gradients, master weights"
    held = memory.loaded
    if memory.stepped:
        state, name, held = state + stage.optimizer_state, "weights, gradients, optimizer", memory.stepped
    if not held:
        return []
    if counted == "resident":  # building the model loads libraries, too: nobody can tell the two apart
        state, name = state + stage.framework, f"framework, {name}"
    passing = comparable(stage, counted) - state
    return [_Share(name, state, held), _Share("activations, loss, exchanges", passing, max(0, memory.peak - held))]


def _table(memory: RankMemory, stage: StageMemory, counted: str) -> Iterator[str]:
    whole = _Share("all", comparable(stage, counted), memory.peak)
    for row in (*_shares(memory, stage, counted), whole):
        larger = f"  {row.measured / row.planned:.1f} times what was planned" if row.is_larger and row.planned else ""
        yield f"    {row.name:<47} planned {size(row.planned):>9}, was {size(row.measured):>9}{larger}"


def _out_of_memory(run: _Run) -> Iterator[str]:
    """Say what was held when memory ended, what was larger than planned, and what helps."""
    planned = (run.record.as_trained() or (run.record.planned(),))[0]
    case, available = planned.case, planned.case.machine.device.memory
    usual = "resident" if case.machine.device.on_cpu else "allocated"
    counted = run.record.measured.counted if run.record.measured else usual
    memory = next((each for each in run.memory if each.rank == run.ended.rank), None) or max(
        run.memory, key=lambda each: each.peak, default=None
    )
    stage = planned.stages[memory.stage] if memory is not None else planned.fullest
    held = f"{size(stage.total)} of {size(available)} for stage {stage.stage} ({parts(stage)})"
    yield f"planned    {held}, with rows of {row_words(case)}"
    expected = comparable(stage, counted)
    if memory is None:
        yield "measured   nothing: it ended before any rank recorded its memory"
    else:
        moment = "before the end of its first step" if memory.loaded else "before its model was built"
        moment = "as last recorded, after its first step or later" if memory.stepped else moment
        yield f"measured   rank {memory.rank}, {moment}:"
        yield from _table(memory, stage, counted)
        if max(memory.peak + stage.total - expected, stage.total) < _CLOSE * available:
            why = "one large allocation, something else that holds the rest, or a lower limit of the process"
            ended = f"memory ended at {size(memory.peak)} of the {size(available)} that were planned with"
            yield f"limit      {ended}: {why} or its container"
    # The run did not get along with what it held: what helps takes less than that.
    share = _LESS * min(1.0, memory.peak / expected if memory else 1.0)
    yield from _listed("helps", savings(planned, room=int(share * min(planned.fullest.total, available))))


def _memory_apart(run: _Run) -> Iterator[str]:
    """Say where memory was planned too small, by kind."""
    measured, trained = run.record.measured, run.record.as_trained()
    if measured is None or trained is None:
        return
    for memory in measured.stages:
        stage = trained[0].stages[memory.stage]
        if memory.peak > _LARGER * comparable(stage, measured.counted):
            yield f"memory     larger than planned on stage {memory.stage}, rank {memory.rank}:"
            yield from _table(memory, stage, measured.counted)


def _pace(run: _Run) -> Iterator[str]:
    """Say whether it was slow, of what a step consists, what else took time, and what helps."""
    measured, trained = run.record.measured, run.record.as_trained()
    if measured is None or trained is None or measured.step_seconds is None:
        yield "nothing    was measured: no step came to its end"
        return
    planned = trained[1]
    ratio = measured.step_seconds / planned.time.total
    slow = ratio > _SLOW and ratio > 1 + planned.time.uncertainty
    yield from _beside_steps(run)
    if not slow:
        yield "it went as planned" if ratio > 1 / _SLOW else "it was faster than planned"
        return
    shares = {part: getattr(planned.time, part) / planned.time.total for part in TIME_PARTS}
    listed = sorted(((share, part) for part, share in shares.items() if share >= 0.01), reverse=True)
    yield f"slow       {ratio:.1f} times what was planned, which is ±{percent(planned.time.uncertainty)}"
    yield f"planned    {', '.join(f'{TIME_WORDS[part]} {percent(share)}' for share, part in listed)}"
    if not planned.case.machine.calibration.num_runs:
        fits = f"`megatune plan --calibrate {run.folder}` fits the planner to this machine"
        yield f"           {fits}; what stays slow after it is the run's"
    yield from _listed("helps", speedups(planned))


def _beside_steps(run: _Run) -> Iterator[str]:
    """Say what share of the time went into anything but steps: data, evaluation, saving."""
    steps = [each for each in metrics(run.folder) if "grad_norm" in each]
    if len(steps) < 2:
        return
    try:
        whole = steps[-1]["elapsed_seconds"] - steps[0]["elapsed_seconds"]
        inside = sum(each["seconds"] for each in steps[1:])
        each_step = [each["seconds"] / each["num_steps"] for each in steps[1:]]
    except (KeyError, TypeError):
        return
    if whole > 0 and 1 - inside / whole > 0.1:
        yield f"other      {percent(1 - inside / whole)} of the time was not in steps: evaluation, saving"
    middle = statistics.median(each_step)
    if len(each_step) >= 5 and max(each_step) > 3 * middle:
        yield f"uneven     the slowest step took {seconds(max(each_step))}, the median {seconds(middle)}"


def _listed(head: str, fixes: list[Fix]) -> Iterator[str]:
    if not fixes:
        yield f"{head:<10} nothing in the settings, by the planner"
        return
    yield f"{head}, by the planner:"
    yield from (f"    {number}. {each}" for number, each in enumerate(fixes, 1))
