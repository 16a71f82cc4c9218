"""plan.json: what was planned for the run, and what was measured."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from megatune.engine import device
from megatune.errors import MegatuneError
from megatune.plan.case import Case
from megatune.plan.run.record import (
    PLAN_NAME,
    Measured,
    Outcome,
    RankMemory,
    RunRecord,
    dump_records,
    fullest_of,
    read_records,
    verdict,
)
from megatune.training.callbacks.base import Callback, StepReport, TrainSummary
from megatune.training.storage.files import write_atomically

_WARM_UP = 2  # steps that are not timed, of a run that has more


def begin_record(output_dir: Path, case: Case, first_step: int) -> None:
    """Note what is planned, before anything can go wrong. Of a resumed run, what it noted before stays."""
    earlier: list[RunRecord] = []
    if first_step:
        try:
            earlier = [record for record in read_records(output_dir) if record.measured is not None]
        except MegatuneError:  # there is none, or it is of another version
            earlier = []
    record = RunRecord(case=case, first_step=first_step)
    write_atomically(output_dir / PLAN_NAME, dump_records([*earlier, record]))


class Prediction(Callback):
    """Completes what `begin_record` wrote, at every save and at any end, and says at the end how good the plan was."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        *self._earlier, self._record = read_records(output_dir)
        self._steps: list[StepReport] = []

    def on_step_end(self, report: StepReport) -> None:
        self._steps.append(report)

    def on_save(self, path: Path) -> None:
        self._write(self._record.outcome, ())

    def on_train_end(self, summary: TrainSummary) -> None:
        self._write(summary.outcome, summary.memory)
        if summary.outcome != "failed":
            print("\n".join(verdict(self._record)), flush=True)

    def _write(self, outcome: Outcome, memory: tuple[RankMemory, ...]) -> None:
        self._record = replace(self._record, outcome=outcome, measured=self._measured(memory))
        write_atomically(self._output_dir / PLAN_NAME, dump_records([*self._earlier, self._record]))

    def _measured(self, memory: tuple[RankMemory, ...]) -> Measured:
        if not self._steps:
            return Measured(counted=device.COUNTED, stages=fullest_of(memory))
        timed = self._steps[min(_WARM_UP, len(self._steps) - 1) :]
        documents = [step.document_tokens for step in timed if step.document_tokens is not None]
        return Measured(
            counted=device.COUNTED,
            stages=fullest_of(memory),
            peaks=tuple(each.peak for each in memory) if len(memory) == self._record.case.world_size else (),
            step_seconds=statistics.median(step.seconds for step in timed),
            num_steps=len(timed),
            row_tokens=statistics.fmean(step.row_tokens for step in timed),
            longest_row=max(step.longest_row for step in self._steps),
            document_tokens=statistics.fmean(documents) if documents else None,
            tokens_per_step=statistics.fmean(step.num_input_tokens for step in timed),
        )
