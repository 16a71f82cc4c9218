"""The training loop: train, evaluate and save by the run's schedule, and report each of them to the callbacks."""

from __future__ import annotations

import gc
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatune.bridge.assemble import Assembly
from megatune.bridge.norm import parameters_norm
from megatune.config.settings import Settings
from megatune.data.batch_pictures import Unreadable
from megatune.data.batches import Batch
from megatune.engine import device, groups
from megatune.engine.model import gather_parameters
from megatune.engine.step import StepTotals
from megatune.engine.waiting import BusyTime
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.objectives.kto import KTO, with_margins
from megatune.objectives.language_model import CrossEntropy
from megatune.objectives.preference import Preference, RunningReward
from megatune.plan.run.record import RankMemory
from megatune.training.bad_steps import BadSteps
from megatune.training.callbacks import CallbackList
from megatune.training.callbacks.base import EvalReport, TrainSummary
from megatune.training.feed import Feed
from megatune.training.first_step import check_first_step
from megatune.training.joint_losses import with_joint_losses
from megatune.training.learning_rate import LearningRateSchedule
from megatune.training.loaders import Loaders
from megatune.training.mismatched import with_kl
from megatune.training.objective import Loss
from megatune.training.pace import Pace, Place
from megatune.training.profiling import MemoryLog, StepProfiler
from megatune.training.reference import Reference
from megatune.training.run_schedule import RunSchedule
from megatune.training.saving import CheckpointSaver
from megatune.training.step_report import step_report
from megatune.training.storage.store import CheckpointStore
from megatune.training.time_budget import TimeBudget
from megatune.training.train_state import TrainState
from megatune.training.train_step import StepResult, evaluate, not_finite_gradients, train_step
from megatune.training.unreadable import without_unreadable

Outcome = Literal["finished", "stopped"]


@dataclass(slots=True)
class Trainer:
    """One rank's part of a run.

    Attributes:
        objective: the loss.
        reference: what answers are compared with; None where nothing is.
        feed: the rows of each step, and those to evaluate.
        schedule: which step ends an epoch, is saved, is evaluated, is the last.
        state: how far the run has come.
        source: the folder of the model that the run started from.
        memory: what this rank holds.
        bad_steps: judges steps, and what becomes of those that are bad.
        budget: the time that the run may take.
        running_reward: of BCO.
    """

    settings: Settings
    assembly: Assembly
    objective: Loss
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
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(None, 0.0))
    running_reward: RunningReward = field(init=False)
    _saver: CheckpointSaver = field(init=False)
    _saved_step: int = field(default=-1, init=False)
    _busy: BusyTime = field(init=False)
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._saver = CheckpointSaver(self.store, self.assembly, self.settings, self.source, self._beat_save)
        self.running_reward = RunningReward(self.state.reward_sum, self.state.reward_pairs)

    def run(self) -> Outcome:
        """Train from the state to the end, or until a stop is requested; the last step is always saved."""
        began = time.monotonic()
        outcome: Literal["finished", "stopped", "failed"] = "failed"
        self._saved_step = self.state.step
        self.callbacks.on_train_begin(self.schedule)
        memory: list[RankMemory] | None = None
        # Left alone, each process collects garbage whenever its own counters say so, for some tens of milliseconds, and
        # the others wait for it in the next collective operation.
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
            memory = groups.gather(self.memory.now)
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

    @property
    def best_checkpoint(self) -> Path | None:
        """Where the evaluation loss was lowest, if that step was saved."""
        if self.state.best_step is None:
            return None
        path = self.store.checkpoint(self.state.best_step)
        return path if path.is_dir() else None

    def _train(self) -> Outcome:
        performance = self.settings.performance
        steps = range(self.state.step, self.schedule.total_steps)
        batches = iter(self.loaders.training(self.feed.rows, steps))
        mismatched = None if self.feed.mismatched is None else iter(self.loaders.training(self.feed.mismatched, steps))
        place = self.assembly.place
        self._pace = Pace(groups.gather(Place(socket.gethostname(), place.pp_rank)))
        self._busy = BusyTime()
        with StepProfiler(self.settings, self.assembly.place.rank) as profiler:
            profiler.begin(self.state.step)
            began = time.monotonic()  # of the step: when the work of the one before had ended
            for step in steps:
                waiting = time.monotonic()
                if self.feed.follower is not None:
                    self.context.beat("data", step + 1)
                    self.feed.follower.before(step)
                _, micro_batches = next(batches)
                others = [] if mismatched is None else [next(mismatched)]
                waited = time.monotonic() - waiting
                self.context.beat("train", step + 1)
                totals = None
                if step + 1 in self.bad_steps.left_out:
                    self.callbacks.on_notice(self.bad_steps.pass_over(step))
                    self.state.step = step + 1
                    began = time.monotonic()
                else:
                    totals, began = self._train_on(step, steps.start, micro_batches, others, began, waited)
                self.memory.stepped()
                if self.feed.follower is not None:
                    self.feed.follower.after(step)
                if performance.manual_gc and self.state.step % performance.manual_gc_interval == 0:
                    gc.collect()
                paused = time.monotonic()
                self._busy.pause()
                profiler.end(self.state.step)
                if totals is not None and totals.save_ended:
                    self._settle()
                if self.schedule.evaluates_at(self.state.step):
                    self._evaluate()
                stops = totals is not None and totals.stop_requested
                saves = totals is not None and totals.save_requested
                ends = stops or self.state.step == self.schedule.total_steps
                if ends or saves or self.schedule.saves_at(self.state.step):
                    self._save(background=self.settings.checkpoint.async_save and not ends)
                profiler.begin(self.state.step)
                began += time.monotonic() - paused
                self._busy.resume()
                if stops and self.state.step < self.schedule.total_steps:
                    return "stopped"
        return "finished"

    def _train_on(
        self,
        step: int,
        first: int,
        micro_batches: list[Batch],
        mismatched: list[tuple[int, list[Batch]]],
        began: float,
        waited: float,
    ) -> tuple[StepTotals, float]:
        """Train one step, counted from 0, and report it; return its totals, and when the work of it had ended.

        Args:
            first: step that this process began with.
            began: when the work of the step before had ended.
            waited: seconds for micro-batches.
        """
        interval = self.settings.run.check_agreement_interval
        objective = self._objective_with(mismatched)
        micro_batches, unreadable = self._prepared(micro_batches, objective)
        result = train_step(
            self.assembly,
            micro_batches,
            objective,
            learning_rate=self.learning_rate.at(step),
            judge=self.bad_steps.judge,
            stop_requested=self.context.stop_requested() or self.budget.is_spent(),
            save_ended=self._saver.has_ended(),
            save_requested=self.context.save_requested(),
            checked_step=step + 1 if interval and (step + 1) % interval == 0 else None,
            timed=self.settings.logging.log_timers,
            busy=self._busy,
        )
        ended = time.monotonic()
        measured = self._measured(result, waited, is_logged=self._is_logged(step, first))
        counted = time.monotonic() - ended
        if step == 0:
            self._check_first(result, objective)
        if isinstance(objective, Preference) and result.updated:
            self.running_reward.add(result.totals)
        if result.problem is not None:
            self._settle()  # what is written may be what the run goes back to
            notice = self.bad_steps.act(step, result, not_finite_gradients(self.assembly))
            self.callbacks.on_notice(notice)
        elif result.updated:
            self.bad_steps.note_good(result)
        for slow in self._pace.notices(step + 1, self._busy.wall, result.totals.busy_seconds):
            self.callbacks.on_notice(slow)
        self._report(step, micro_batches, result, ended - began, waited, unreadable, measured)
        return result.totals, ended + counted

    def _objective_with(
        self, mismatched: Iterable[tuple[int, list[Batch]]], on_step: Callable[[int], None] = lambda index: None
    ) -> Loss:
        """Return the loss of the next step, or of an evaluation; of KTO with z, from answers to other prompts."""
        if isinstance(self.objective, KTO) and self.objective.has_kl:
            model, steps = self.assembly.model, (self._readable(batches)[0] for _, batches in mismatched)
            return with_kl(model, steps, self.objective, on_step=on_step)
        if isinstance(self.objective, Preference) and "bco_pair" in self.objective.losses:
            return self.running_reward.of_next_step(self.objective)
        return self.objective

    def _readable(self, batches: list[Batch]) -> tuple[list[Batch], list[Unreadable]]:
        """Return micro-batches without labels of documents that have unreadable pictures, and these pictures."""
        if self.loaders.vision is None:
            return batches, []
        refuse = self.settings.data.on_bad_row == "error"
        return without_unreadable(batches, self.assembly.place, refuse=refuse)

    def _prepared(self, batches: list[Batch], objective: Loss) -> tuple[list[Batch], int]:
        """Return micro-batches with what the objective needs beside rows, of those that are readable; and how many
        pictures are not."""
        batches, unreadable = self._readable(batches)
        if unreadable:
            self.callbacks.on_unreadable(unreadable)
        if self.reference is not None and self.feed.follower is not None:
            batches = self.reference.of_step(self.assembly.model, batches)
        if isinstance(objective, Preference) and objective.joint:
            batches = with_joint_losses(self.assembly.model, batches, objective)
        return batches, len(unreadable)

    def _check_first(self, result: StepResult, objective: Loss) -> None:
        """Hold the first step against a policy that is its reference, where training starts from it."""
        if self.reference is None or not self.reference.is_start or not result.updated or not result.totals.normalizer:
            return
        assert isinstance(objective, Preference | KTO)
        if self.settings.preference.ld_alpha is not None:
            return  # weighs the tokens of the policy alone
        line = check_first_step(objective, result.totals, self.settings.precision)
        if self.context.rank == 0:
            print(line, flush=True)

    def _is_logged(self, step: int, first: int) -> bool:
        """Return whether a log line ends with this step, counted from 0; a stop may add one."""
        done = step + 1
        last = done == self.schedule.total_steps
        return step == first or last or done % self.settings.logging.logging_steps == 0

    def _measured(self, result: StepResult, waited: float, *, is_logged: bool) -> dict[str, float]:
        """Return what switches of logging add to a step's metrics; collective."""
        logs, found = self.settings.logging, {}
        if logs.log_timers:
            found = {f"time_{part}": seconds for part, seconds in result.seconds.items()} | {"time_data": waited}
        if is_logged and logs.log_params_norm and result.updated:
            gather_parameters(self.assembly.model)
            found["params_norm"] = parameters_norm(
                self.assembly.parameters, self.assembly.architecture, self.assembly.place
            )
        if is_logged and logs.log_memory:
            found |= device.memory_in_gib()
        return found

    def _report(
        self,
        step: int,
        batches: list[Batch],
        result: StepResult,
        seconds: float,
        waited: float,
        unreadable: int,
        measured: Mapping[str, float],
    ) -> None:
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
            metrics={**self._metrics(result.totals), **measured},
        )
        self.callbacks.on_step_end(report)

    def _metrics(self, totals: StepTotals) -> dict[str, float]:
        """Return what is reported of a step or an evaluation."""
        return with_margins(totals.metrics) if isinstance(self.objective, KTO) else totals.metrics

    @property
    def _epoch(self) -> float | None:
        if self.feed.follower is not None:
            return self.feed.follower.epoch_after(self.state.step)
        return self.schedule.epoch_of(self.state.step)

    def _evaluate(self) -> None:
        """Compute the loss over all evaluation rows, in their order."""
        assert self.feed.evaluation is not None, "refused by the settings' rules"
        step = self.state.step
        self.context.beat("evaluate", step)
        began = time.monotonic()
        loader = self.loaders.evaluation(self.feed.evaluation)
        others = self.feed.mismatched_evaluation
        mismatched = () if others is None else self.loaders.evaluation(others)
        unreadable = 0

        def on_step(index: int) -> None:
            self.context.beat(f"evaluate batch {index}", step)

        objective = self._objective_with(mismatched, on_step)

        def prepared() -> Iterator[list[Batch]]:
            nonlocal unreadable
            for _, batches in loader:
                batches, number = self._prepared(batches, objective)
                unreadable += number
                yield batches

        found = evaluate(self.assembly.model, prepared(), objective, on_step=on_step)
        if self.state.best_loss is None or found.loss < self.state.best_loss:
            self.state.best_loss, self.state.best_step = found.loss, step
        report = EvalReport(
            step=step,
            epoch=self._epoch,
            loss=found.loss,
            perplexity=math.exp(min(found.loss, 700)) if isinstance(self.objective, CrossEntropy) else None,
            num_tokens=found.num_tokens,
            seconds=time.monotonic() - began,
            unreadable_pictures=unreadable,
            metrics=self._metrics(found),
        )
        self.callbacks.on_evaluate(report)

    def _save(self, *, background: bool) -> None:
        if self._saved_step == self.state.step:
            return
        self._settle()
        self.context.beat("save", self.state.step, limit=self.settings.run.ddp_timeout)
        if self.feed.follower is not None:
            self.state.stream = self.feed.follower.state(self.state.step)
        self.state.reward_sum, self.state.reward_pairs = self.running_reward.total, self.running_reward.pairs
        began = time.monotonic()
        path = self._saver.save(self.state, background=background)
        self.budget.saved(time.monotonic() - began)
        self._saved_step = self.state.step
        if path is not None:
            self.callbacks.on_save(path)

    def _beat_save(self) -> None:
        self.context.beat("save", self.state.step, limit=self.settings.run.ddp_timeout)

    def _settle(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one."""
        if self._saver.in_flight:
            self.context.beat("save", self.state.step, limit=self.settings.run.ddp_timeout)
            path = self._saver.settle()
            assert path is not None
            self.callbacks.on_save(path)
