"""The training loop: reads the rows of a step, trains on them, and evaluates and saves when the schedule says so.

Everything else is a callback (on rank 0) or part of the objective (`objectives.base`).
"""

from __future__ import annotations

import gc
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from megatune.bridge.assemble import Assembly
from megatune.bridge.parameters import parameters_norm
from megatune.config.settings import Settings
from megatune.data.batches import Batch, TokenValues, Unreadable
from megatune.data.rows import TokenRows
from megatune.engine import device, groups
from megatune.engine.layers.noise import noise_keys
from megatune.engine.model import gather_parameters
from megatune.engine.sequences import NOISE
from megatune.engine.step import NO_VOTES, StepTotals, Votes, evaluate
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.objectives.base import TrainingObjective, check_first_step
from megatune.objectives.choose import evaluation_objective
from megatune.plan.run.record import RankMemory
from megatune.progress import say
from megatune.training.agreement import on_rank_0
from megatune.training.answers import Answerer
from megatune.training.bad_steps import BadSteps
from megatune.training.callbacks import CallbackList
from megatune.training.callbacks.base import EvalReport, TrainSummary
from megatune.training.feed import Feed
from megatune.training.loaders import Loaders, without_unreadable
from megatune.training.measurements import MemoryLog, RankLocation, StepClock, StepProfiler, Stragglers, step_report
from megatune.training.reference import Reference
from megatune.training.run_schedule import RunSchedule, TimeBudget
from megatune.training.saving import CheckpointSaver
from megatune.training.storage.store import CheckpointStore
from megatune.training.train_state import TrainState
from megatune.training.train_step import LearningRateSchedule, StepResult, not_finite_gradients, train_step

Outcome = Literal["finished", "stopped"]


class StepBatches(NamedTuple):
    """The micro-batches of one step on this data-parallel rank.

    Attributes:
        companions: one list of micro-batches that the objective reads before the step, or none.
        waited: seconds spent waiting for the data.
    """

    batches: list[Batch]
    companions: list[list[Batch]]
    waited: float


@dataclass(slots=True)
class Trainer:
    """The training state and loop of one rank.

    Attributes:
        reference: the reference model of the objective, or None.
        feed: the rows of each step and of evaluation.
        schedule: the steps that end an epoch, save or evaluate, and the number of steps.
        state: the progress of the run, as checkpoints store it.
        source: the folder of the initial model.
        memory: the memory use of this rank.
        bad_steps: detects and handles bad steps.
        answerer: generates answers for evaluation, or None.
        budget: the time limit of the run.
    """

    settings: Settings
    assembly: Assembly
    objective: TrainingObjective
    reference: Reference | None
    feed: Feed
    loaders: Loaders
    schedule: RunSchedule
    state: TrainState
    learning_rate: LearningRateSchedule
    callbacks: CallbackList
    store: CheckpointStore
    context: RankContext
    source: Path
    memory: MemoryLog
    bad_steps: BadSteps
    answerer: Answerer | None = None
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(None, 0.0))
    _saver: CheckpointSaver = field(init=False)
    _first_step: int = field(default=0, init=False)
    _saved_step: int = field(default=-1, init=False)
    _clock: StepClock = field(init=False)
    _stragglers: Stragglers = field(init=False)

    def __post_init__(self) -> None:
        self._saver = CheckpointSaver(self.store, self.assembly, self.settings, self.source, self._beat_save)
        self.objective.load_state_dict(self.state.objective)

    def run(self) -> Outcome:
        """Train from the current state to the end or until a stop is requested. The last step is always saved."""
        began = time.monotonic()
        outcome: Outcome | Literal["interrupted", "failed"] = "failed"
        self._first_step = self._saved_step = self.state.step
        self.callbacks.on_train_begin(self.schedule)
        memory: list[RankMemory] | None = None
        # With automatic garbage collection, each rank pauses at other steps for tens of milliseconds, and all others
        # wait for it in the next collective operation.
        manual_gc = self.settings.performance.manual_gc
        if manual_gc:
            gc.disable()
        try:
            try:
                outcome = self._train()
            except MegatuneError as error:
                if error.exit_code == ExitCode.NOT_FINITE:  # raised on all ranks
                    self._settle()
                raise
            except KeyboardInterrupt:
                outcome = "interrupted"
                raise
            memory = groups.all_gather_object(self.memory.now)
        finally:
            if manual_gc:
                gc.enable()
            summary = TrainSummary(
                outcome=outcome,
                step=self.state.step,
                total_steps=self.schedule.total_steps,
                seconds=time.monotonic() - began,
                memory=tuple(memory or [self.memory.now]),
                best_checkpoint=self.best_checkpoint,
                best_loss=self.state.best_loss,
            )
            self.callbacks.on_train_end(summary)
        return outcome

    def _train(self) -> Outcome:
        steps = range(self.state.step, self.schedule.total_steps)
        location = RankLocation(socket.gethostname(), self.assembly.coords.pp_rank)
        self._stragglers = Stragglers(groups.all_gather_object(location))
        self._clock, read = StepClock(), self._read(steps)
        if self.settings.evaluation.eval_on_start and self.state.step == 0:
            self.callbacks.on_evaluate(self._evaluate())
        with StepProfiler(self.settings, self.assembly.coords.rank) as profiler:
            for step in steps:
                if self._stops_early:
                    break
                profiler.begin(step)
                batches = next(read)
                votes = self._step(step, batches)
                self._end_step(step)
                profiler.end(step + 1)
                with self._clock.paused():
                    self._evaluate_and_save(votes)
                if votes.stop and step + 1 < self.schedule.total_steps:
                    return "stopped"
        last = self.store.checkpoint(self.state.step)
        if self.state.step == self._first_step and not on_rank_0(last.is_dir):
            self._saved_step = -1  # of a run in another folder, which had no step left
            self._save(background=False)
        return "finished"

    # Read

    def _read(self, steps: range) -> Iterator[StepBatches]:
        """Yield the micro-batches of each step."""
        rows = iter(self.loaders.training(self.feed.rows, steps))
        others = None if self.feed.companions is None else iter(self.loaders.training(self.feed.companions, steps))
        for step in steps:
            began = time.monotonic()
            if self.feed.follower is not None:
                self.context.beat("data", step + 1)
                self.feed.follower.before(step)
            _, batches = next(rows)
            companions = [] if others is None else [next(others)[1]]
            yield StepBatches(batches, companions, time.monotonic() - began)

    def _readable(self, batches: list[Batch]) -> tuple[list[Batch], list[Unreadable]]:
        """Mask the labels of sequences with unreadable images and videos; return the micro-batches and these media."""
        if self.loaders.vision is None:
            return batches, []
        refuse = self.settings.data.on_bad_row == "error"
        return without_unreadable(batches, self.assembly.coords, refuse=refuse)

    def _prepared(self, batches: list[Batch]) -> tuple[list[Batch], int]:
        """Return micro-batches with the reference's values, and the number of unreadable images and videos."""
        batches, unreadable = self._readable(batches)
        if unreadable:
            self.callbacks.on_unreadable(unreadable)
        if self.reference is not None and self.feed.follower is not None:
            batches = self.reference.of_step(self.assembly.model, batches)
        return batches, len(unreadable)

    # Train

    def _step(self, step: int, read: StepBatches) -> Votes:
        """Train one step, counted from 0, and report it. Return the votes of all ranks."""
        self.context.beat("train", step + 1)
        if step + 1 in self.bad_steps.left_out:
            self.callbacks.on_notice(self.bad_steps.skip(step))
            self.state.step = step + 1
            self._clock.lap()
            return NO_VOTES
        interval = self.settings.run.check_agreement_interval
        self.objective.before_step(self.assembly.model, (self._readable(each)[0] for each in read.companions))
        batches, unreadable = self._prepared(read.batches)
        if self.settings.finetuning.neftune_noise_alpha is not None:
            keys = partial(noise_keys, seed=self.settings.run.seed, step=step)
            batches = [replace(each, extras={**each.extras, NOISE: TokenValues(keys(each))}) for each in batches]
        result = train_step(
            self.assembly,
            batches,
            self.objective,
            learning_rate=self.learning_rate.at(step),
            check=self.bad_steps.check,
            votes=Votes(
                stop=self.context.stop_requested() or self.budget.is_spent(),
                save=self.context.save_requested(),
                settle=self._saver.has_ended(),
            ),
            checked_step=step + 1 if interval and (step + 1) % interval == 0 else None,
            timed=self.settings.logging.log_timers,
            busy=self._clock.busy,
        )
        seconds = self._clock.lap()
        if step == 0 and self.reference is not None and self.reference.is_start:
            self._check_first(result)
        if result.updated:
            self.objective.after_step(result.totals)
        self._check_step(step, result)
        self._report(step, batches, result, seconds, read.waited, unreadable)
        return result.totals.votes

    def _check_first(self, result: StepResult) -> None:
        if result.updated and result.totals.normalizer:
            line = check_first_step(self.objective, result.totals, self.settings.precision)
            if self.context.rank == 0:
                say(line)

    def _check_step(self, step: int, result: StepResult) -> None:
        """Handle a bad step, and report slow ranks."""
        if result.problem is not None:
            self._settle()  # the run may go back to the checkpoint that is being written
            notice = self.bad_steps.handle(step, result, not_finite_gradients(self.assembly))
            self.callbacks.on_notice(notice)
        elif result.updated:
            self.bad_steps.note_good(result)
        measured = step + 1 - self._clock.busy.lag
        for slow in self._stragglers.notices(measured, self._clock.busy.wall, result.totals.busy_seconds):
            self.callbacks.on_notice(slow)

    def _report(
        self, step: int, batches: list[Batch], result: StepResult, seconds: float, waited: float, unreadable: int
    ) -> None:
        with self._clock.paused():
            measured = self._measured(step, result, waited)
        self.state.step = step + 1
        report = step_report(
            self.settings,
            self.assembly,
            self.feed.rows,
            batches,
            result,
            step=self.state.step,
            total_steps=self.schedule.total_steps,
            epoch=self._epoch,
            learning_rate=self.learning_rate.at(step),
            seconds=seconds,
            data_seconds=waited,
            unreadable_pictures=unreadable,
            metrics={**self.objective.reported(result.totals.metrics), **measured},
        )
        self.callbacks.on_step_end(report)

    def _measured(self, step: int, result: StepResult, waited: float) -> dict[str, float]:
        """Return the metrics that logging settings add to a step. Collective."""
        logs, found = self.settings.logging, {}
        done = step + 1
        # Whether a log line ends with this step. A stop may add one.
        is_logged = step == self._first_step or done == self.schedule.total_steps or done % logs.logging_steps == 0
        if logs.log_timers:
            found = {f"time_{part}": seconds for part, seconds in result.seconds.items()} | {"time_data": waited}
        if is_logged and logs.log_params_norm and result.updated:
            gather_parameters(self.assembly.model)
            found["params_norm"] = parameters_norm(
                self.assembly.parameters, self.assembly.architecture, self.assembly.coords
            )
        if is_logged and logs.log_memory:
            found |= device.memory_in_gib()
        return found

    @property
    def _epoch(self) -> float | None:
        if self.feed.follower is not None:
            return self.feed.follower.epoch_after(self.state.step)
        return self.schedule.epoch_of(self.state.step)

    def _end_step(self, step: int) -> None:
        """Record the memory use of a step, and free what later steps do not need."""
        self.memory.stepped()
        if self.feed.follower is not None:
            self.feed.follower.after(step)
        performance = self.settings.performance
        if performance.manual_gc and (step + 1) % performance.manual_gc_interval == 0:
            gc.collect()

    # Evaluate and save

    def _evaluate_and_save(self, votes: Votes) -> None:
        """Evaluate and save after a step if the schedule or a rank requests it."""
        if votes.settle:
            self._settle()
        report = self._evaluate() if self.schedule.evaluates_at(self.state.step) else None
        if self.schedule.generates_at(self.state.step):
            report = self._generate(report)
        if report is not None:
            self.callbacks.on_evaluate(report)
        ends = votes.stop or self.state.step == self.schedule.total_steps or self._stops_early
        if ends or votes.save or self.schedule.saves_at(self.state.step):
            self._save(background=self.settings.checkpoint.async_save and not ends)

    @property
    def _stops_early(self) -> bool:
        """Whether early_stopping_steps evaluations have passed since the best one."""
        patience, best = self.settings.evaluation.early_stopping_steps, self.state.best_step
        if patience is None or best is None:
            return False
        every = self.schedule.evaluate_every
        return self.state.step // every - best // every >= patience

    def _evaluate(self) -> EvalReport:
        """Compute the loss over all evaluation rows, in their order."""
        assert self.feed.evaluation is not None, "refused by the settings' rules"
        step, began, unreadable = self.state.step, time.monotonic(), 0
        self.context.beat("evaluate", step)

        def batches_of(rows: TokenRows | None) -> Iterator[list[Batch]]:
            for index, batches in () if rows is None else self.loaders.evaluation(rows):
                self.context.beat(f"evaluate batch {index}", step)
                yield batches

        def prepared(rows: TokenRows) -> Iterator[list[Batch]]:
            nonlocal unreadable
            for batches in batches_of(rows):
                batches, number = self._prepared(batches)
                unreadable += number
                yield batches

        model = self.assembly.model
        self.objective.before_step(
            model, (self._readable(batches)[0] for batches in batches_of(self.feed.companions_evaluation))
        )
        objective = evaluation_objective(self.objective, self.settings)
        parts = self.feed.each or {"": self.feed.evaluation}
        each = {name: evaluate(model, prepared(rows), objective) for name, rows in parts.items()}
        found = StepTotals.summed([*each.values()])
        # A loss that is not a number is not the best one, after which no other would be.
        if step and found.loss < (math.inf if self.state.best_loss is None else self.state.best_loss):
            self.state.best_loss, self.state.best_step = found.loss, step
        return EvalReport(
            step=step,
            epoch=self._epoch,
            loss=found.loss,
            perplexity=math.exp(min(found.loss, 700)) if self.objective.has_perplexity else None,
            num_tokens=found.num_tokens,
            seconds=time.monotonic() - began,
            unreadable_pictures=unreadable,
            metrics={**self.objective.reported(found.metrics), **(_named(each) if self.feed.each else {})},
        )

    def _generate(self, report: EvalReport | None) -> EvalReport:
        """Generate answers, and add their scores to the report of the loss, if there is one."""
        assert self.answerer is not None, "created if the settings request answers"
        step, began = self.state.step, time.monotonic()
        answers = self.answerer.write(
            self.assembly.model, lambda number: self.context.beat(f"token {number + 1} of answers", step)
        )
        report = report or EvalReport(
            step=step, epoch=self._epoch, loss=None, perplexity=None, num_tokens=sum(map(len, answers)), seconds=0.0
        )
        scores: Mapping[str, float] = {}
        if self.context.rank == 0:  # only rank 0 has callbacks
            generated = self.answerer.report(step, answers)
            self.callbacks.on_generate(generated)
            scores = generated.scores
        seconds = report.seconds + time.monotonic() - began
        return replace(report, seconds=seconds, metrics={**report.metrics, **scores})

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the lowest evaluation loss, if that step was saved."""
        if self.state.best_step is None:
            return None
        path = self.store.checkpoint(self.state.best_step)
        return path if path.is_dir() else None

    def _save(self, *, background: bool) -> None:
        if self._saved_step == self.state.step:
            return
        self._settle()
        self._beat_save()
        if self.feed.follower is not None:
            self.state.stream = self.feed.follower.state(self.state.step)
        self.state.objective = self.objective.state_dict()
        path = self._saver.save(self.state, background=background)
        self._saved_step = self.state.step
        if path is not None:
            self._committed(path)

    def _beat_save(self) -> None:
        self.context.beat("save", self.state.step, limit=self.settings.run.ddp_timeout)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written in the background, if any."""
        if self._saver.in_flight:
            self._beat_save()
            path = self._saver.settle()
            assert path is not None
            self._committed(path)

    def _committed(self, path: Path) -> None:
        self.budget.saved(self._saver.seconds)
        self.callbacks.on_save(path)


def _named(each: Mapping[str, StepTotals]) -> dict[str, float]:
    """Name the loss and metrics of each data set as LLaMA-Factory does, without its prefix `eval_`."""
    found = ((name, {"loss": totals.loss, **totals.metrics}) for name, totals in each.items())
    return {f"{name}_{metric}": value for name, values in found for metric, value in values.items()}
