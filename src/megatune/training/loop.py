"""The training loop: three named steps for each batch, everything else beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from megatune.bridge.assemble import Assembly
from megatune.config.settings import Settings
from megatune.data.batches import Batch, Collator
from megatune.data.loader import StepLoader
from megatune.data.rows import TokenRows
from megatune.data.steps import PreparedSteps, StepRows
from megatune.engine import device, groups, optimizer
from megatune.engine.model import gather_parameters
from megatune.engine.step import StepTotals, forward_backward
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.objectives.language_model import CrossEntropy
from megatune.plan.catalogue import device_by_driver_name
from megatune.plan.flops import train_flops
from megatune.plan.run.record import RankMemory
from megatune.training.agreement import on_rank_0
from megatune.training.callbacks import CallbackList, EvalReport, StepReport, TrainInfo, TrainSummary
from megatune.training.checkpoint import TrainState, save_checkpoint
from megatune.training.copies import check_gradients, check_weights
from megatune.training.course import Course
from megatune.training.garbage import collect_after, collection_by_hand
from megatune.training.memory import MemoryLog
from megatune.training.schedule import LearningRateSchedule
from megatune.training.storage import CheckpointStore, rotate
from megatune.training.streaming import StreamFollower

Outcome = Literal["finished", "stopped"]


@dataclass(slots=True)
class Trainer:
    """One rank's part of a run.

    Attributes:
        rows: what each step trains.
        evaluation: None where nothing is evaluated.
        follower: of streamed rows; None where all are prepared.
        course: which step ends an epoch, is saved, is evaluated, is the last.
        state: how far the run has come.
        source: the folder of the model that the run started from.
        memory: what this rank holds.
    """

    settings: Settings
    assembly: Assembly
    rows: StepRows
    evaluation: TokenRows | None
    course: Course
    state: TrainState
    schedule: LearningRateSchedule
    callbacks: CallbackList
    store: CheckpointStore
    context: RankContext
    source: Path
    pad_token_id: int
    memory: MemoryLog
    follower: StreamFollower | None = None
    _saved_step: int = field(default=-1, init=False)
    _objective: CrossEntropy = field(default_factory=CrossEntropy, init=False)

    def run(self) -> Outcome:
        """Train from the state to the end, or until someone asks to stop; the last step is always saved."""
        began = time.monotonic()
        outcome: Literal["finished", "stopped", "failed"] = "failed"
        self._saved_step = self.state.step
        self.callbacks.on_train_begin(
            TrainInfo(
                total_steps=self.course.total_steps,
                num_train_epochs=self.course.num_epochs,
                global_batch_size=self.course.global_batch_size,
            )
        )
        memory: list[RankMemory] | None = None
        try:
            with collection_by_hand(self.settings.performance):
                outcome = self._train()
            memory = groups.gather(self.memory.now)
        finally:
            self.callbacks.on_train_end(
                TrainSummary(
                    outcome=outcome,
                    step=self.state.step,
                    total_steps=self.course.total_steps,
                    seconds=time.monotonic() - began,
                    memory=tuple(memory or [self.memory.now]),
                    best_checkpoint=self.best_checkpoint,
                    best_loss=self.state.best_loss,
                )
            )
        return outcome

    @property
    def best_checkpoint(self) -> Path | None:
        """Where the evaluation loss was lowest, if that step was saved."""
        if self.state.best_step is None:
            return None
        path = self.store.checkpoint(self.state.best_step)
        return path if path.is_dir() else None

    def _train(self) -> Outcome:
        for step, batches in self._batches():
            self.context.beat("train", step + 1)
            started = time.monotonic()
            totals = forward_backward(
                self.assembly.model, batches, self._objective, stop_requested=self.context.stop_requested()
            )
            interval = self.settings.run.check_agreement_interval
            checks = interval is not None and (step + 1) % interval == 0
            if checks:
                check_gradients(self.assembly, step + 1)
            updated, grad_norm = optimizer.step(self.assembly.optimizer, self.schedule.at(step))
            self._report(step, batches, totals, updated, grad_norm, started)
            self.memory.stepped()
            if self.follower is not None:
                self.follower.after(step)
            if checks:
                check_weights(self.assembly, step + 1, grad_norm=grad_norm, learning_rate=self.schedule.at(step))
            collect_after(self.state.step, self.settings.performance)
            stops = totals.stop_requested
            if self.course.evaluates_at(self.state.step):
                self._evaluate()
            if stops or self.course.saves_at(self.state.step):
                self._save()
            if stops and self.state.step < self.course.total_steps:
                return "stopped"
        return "finished"

    def _batches(self) -> Iterator[tuple[int, list[Batch]]]:
        batch, data = self.settings.batch, self.settings.data
        batches = iter(
            StepLoader(
                self.rows,
                self._collator(self.rows.is_packed, batch.per_device_train_batch_size),
                data_parallel_rank=self.assembly.place.dp_rank,
                data_parallel_size=self.assembly.place.dp_size,
                num_micro_batches=batch.gradient_accumulation_steps,
                same_length=self._same_length,
                start_step=self.state.step,
                stop_step=self.course.total_steps,
                num_workers=data.dataloader_num_workers,
                pin_memory=data.dataloader_pin_memory,
            )
        )
        for step in range(self.state.step, self.course.total_steps):
            if self.follower is not None:
                self.context.beat("data", step + 1)
                self.follower.before(step)
            yield next(batches)

    def _collator(self, packed: bool, micro_batch_size: int) -> Collator:
        parallel = self.settings.parallel
        return Collator(
            micro_batch_size=micro_batch_size,
            packed=packed,
            sequence_multiple=parallel.sequence_multiple,
            document_multiple=parallel.document_multiple,
            pad_token_id=self.pad_token_id,
        )

    @property
    def _same_length(self) -> bool:
        """Pipelines send one shape from stage to stage."""
        return self.settings.parallel.pipeline_model_parallel_size > 1

    def _report(
        self,
        step: int,
        batches: list[Batch],
        totals: StepTotals,
        updated: bool,
        grad_norm: float,
        started: float,
    ) -> None:
        loss = totals.loss
        skipped = not updated and self.settings.precision.fp16 and math.isfinite(loss)
        if not updated and not skipped:
            raise self._not_finite(step, loss, grad_norm)
        seconds = time.monotonic() - started
        lengths = [int(length) for row in self.rows.lengths(step) for length in row]
        flops = train_flops(self.assembly.architecture, lengths) / self.assembly.place.world_size / seconds
        planned = device_by_driver_name(device.name())
        peak = planned.flops[self.settings.precision.params_dtype] if planned else None
        rows = [batch.input_ids.numel() / self.settings.batch.per_device_train_batch_size for batch in batches]
        self.state.step = step + 1
        self.callbacks.on_step_end(
            StepReport(
                step=self.state.step,
                total_steps=self.course.total_steps,
                epoch=self._epoch,
                loss=loss,
                learning_rate=self.schedule.at(step),
                grad_norm=grad_norm,
                num_tokens=int(totals.normalizer),
                num_input_tokens=sum(lengths),
                seconds=seconds,
                tokens_per_second=sum(lengths) / seconds,
                model_tflops=flops / 1e12,
                mfu=flops / peak if peak else None,
                memory_gib=device.peak_memory_bytes() / 2**30,
                row_tokens=sum(rows) / len(rows),
                longest_row=math.ceil(max(rows)),
                document_tokens=sum(lengths) / len(lengths) if self.rows.is_packed else None,
                skipped=skipped,
                **totals.metrics,
            )
        )

    @property
    def _epoch(self) -> float | None:
        """Passes done."""
        if self.follower is not None:
            return self.follower.epoch_after(self.state.step)
        return self.course.epoch_of(self.state.step)

    def _not_finite(self, step: int, loss: float, grad_norm: float) -> MegatuneError:
        """Name the step, the rows and the gradients; nothing was updated."""
        shards = optimizer.main_shards(self.assembly.optimizer)
        mine = [
            name
            for local in self.assembly.parameters
            if local.parameter in shards and not shards[local.parameter].grad.isfinite().all()
            for name in local.hf_shapes(self.assembly.architecture)
        ]
        by_rank = {rank: names for rank, names in enumerate(groups.gather(mine)) if names}
        where = "; ".join(f"rank {rank}: {', '.join(names[:2])} …" for rank, names in list(by_rank.items())[:3])
        return MegatuneError(
            Finding(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm}",
                why=f"gradients that are not finite on {where or 'no rank: their norm overflows'}; the step's rows are "
                f"{', '.join(self.rows.names(step)[:8])}; the weights are as they were before the step",
                fix="lower learning_rate, train in bf16 instead of fp16, or look at those rows",
            ),
            ExitCode.NOT_FINITE,
        )

    def _evaluate(self) -> None:
        """Loss over all evaluation rows, in their order."""
        rows = self.evaluation
        assert rows is not None, "refused by the settings' rules"
        self.context.beat("evaluate", self.state.step)
        started = time.monotonic()
        gather_parameters(self.assembly.model)
        micro, micro_batches = (
            self.settings.batch.per_device_eval_batch_size,
            self.settings.parallel.pipeline_model_parallel_size,
        )
        steps = PreparedSteps(rows, micro * micro_batches * self.assembly.place.dp_size, shuffle=False)
        loader = StepLoader(
            steps,
            self._collator(rows.is_packed, micro),
            data_parallel_rank=self.assembly.place.dp_rank,
            data_parallel_size=self.assembly.place.dp_size,
            num_micro_batches=micro_batches,
            same_length=self._same_length,
            stop_step=steps.steps_per_epoch,
        )
        loss_sum = num_tokens = 0.0
        for index, batches in loader:
            self.context.beat(f"evaluate batch {index}", self.state.step)
            with torch.no_grad():
                totals = forward_backward(self.assembly.model, batches, self._objective, forward_only=True)
            loss_sum, num_tokens = loss_sum + totals.loss_sum, num_tokens + totals.normalizer
        loss = loss_sum / num_tokens
        if self.state.best_loss is None or loss < self.state.best_loss:
            self.state.best_loss, self.state.best_step = loss, self.state.step
        self.callbacks.on_evaluate(
            EvalReport(
                step=self.state.step,
                epoch=self._epoch,
                loss=loss,
                perplexity=math.exp(min(loss, 700)),
                num_tokens=int(num_tokens),
                seconds=time.monotonic() - started,
            )
        )

    def _save(self) -> None:
        if self._saved_step == self.state.step:
            return
        self.context.beat("save", self.state.step, limit=self.settings.run.ddp_timeout)
        if self.follower is not None:
            self.state.stream = self.follower.state(self.state.step)
        path = save_checkpoint(self.store, self.assembly, self.settings, self.state, self.source)
        self._saved_step = self.state.step
        keep = {path} | ({self.best_checkpoint} if self.best_checkpoint else set())
        limit = self.settings.checkpoint.save_total_limit
        on_rank_0(lambda: rotate(self.store.output_dir, limit, keep))
        self.callbacks.on_save(path)
