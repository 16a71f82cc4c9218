"""Workers of roles that are trained: updates, checkpoints, and the critic."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatune.bridge.assemble import Assembly, attach_optimizer, load_model
from megatune.config.settings import with_settings
from megatune.data.batches import Batch
from megatune.engine import device
from megatune.engine.groups import build
from megatune.engine.step import Objective, StepTotals
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.objectives.policy.objective import ValueObjective
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import mini_batches
from megatune.rl.worker.model import ModelWorker, WorkerInfo, offload_of
from megatune.training.agreement import on_rank_0
from megatune.training.checkpoint import check_continues, load_checkpoint
from megatune.training.measurements import StepProfiler
from megatune.training.resume import choose_checkpoint, digest_base
from megatune.training.saving import CheckpointSaver
from megatune.training.storage.files import writing
from megatune.training.storage.store import CheckpointStore, clean_partials
from megatune.training.train_state import TrainState
from megatune.training.train_step import (
    LearningRateSchedule,
    StepResult,
    not_finite_gradients,
    train_step,
)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The results of one step's updates; the same on all ranks.

    Attributes:
        updates: number of optimizer updates.
        loss, grad_norm: means over the updates; skipped updates do not count for the norm.
        learning_rate: of the last update.
        num_tokens: number of trained tokens, over all updates.
        memory_gib: peak device memory of this rank.
        metrics: means of the objective's metrics over the updates.
    """

    updates: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    memory_gib: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class TrainedWorker(ModelWorker):
    """One rank of a trained role. See `ModelWorker`."""

    loaded: Assembly
    # Names of `Rollouts`' values that micro-batches need in addition to tokens.
    token_extras: Sequence[str] = ()
    document_extras: Sequence[str] = ()

    @abstractmethod
    def objective(self, num_samples: int) -> Objective:
        """Return the loss of an update on `num_samples` samples."""

    @property
    def output_dir(self) -> Path:
        """The folder of the role's checkpoints; for the policy the run's output_dir."""
        folder = Path(self.rl.run.output_dir)
        return folder if self.role.name == "actor_train" else folder / self.role.name

    def find_checkpoint(self, asked: bool | str | None) -> tuple[str | None, list[str]]:
        """Choose the checkpoint to resume from, after `join` and before `load`, verified by all ranks together.

        Args:
            asked: None for the newest complete one of the role's folder, if any; True requires one; a path names one;
                False for none.

        Returns:
            Its path, and lines for the user.

        Raises:
            MegatuneError: INPUT, if the requested checkpoint is incomplete, or all that exist are.
        """
        self.context.beat("tidy", 0, limit=float("inf"))
        on_rank_0(self._clean_up, is_long=True)
        self.context.beat("find a checkpoint", 0)
        settings = with_settings(self.settings, {"run.resume_from_checkpoint": asked})
        path, notes = choose_checkpoint(self.context, settings, self.output_dir)
        return None if path is None else str(path), notes

    def _clean_up(self) -> None:
        with writing(self.output_dir):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            clean_partials(self.output_dir)

    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        resumed = None if checkpoint is None else Path(checkpoint)
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, settings = self._source(resumed)
        # The critic is saved before the policy, so a run that ends in between resumes from the critic's last but one.
        limit = self.rl.run.max_ckpt_to_keep
        kept = limit + (self.role.name != "actor_train") if limit else None
        self.settings = settings = with_settings(settings, {"checkpoint.save_total_limit": kept})
        has_adapters = settings.finetuning.finetuning_type == "lora"
        base = digest_base(self.context, source, settings) if has_adapters else ""
        coords = build(settings.parallel, seed=settings.run.seed, timeout=settings.run.ddp_timeout)
        self.state = TrainState(0, "", self.rl.samples_per_step, settings.run.seed, base=base)
        if resumed is not None:
            check_continues(resumed, load_architecture(source, settings.run.stage), settings, self.state)
        model = load_model(source if has_adapters else resumed or source, settings, coords, adapter=resumed)
        self.loaded = attach_optimizer(model, settings)
        self._offload = offload_of(self.loaded)
        if resumed is not None:
            self.state = load_checkpoint(resumed, self.loaded, settings)
        self.step = self.state.step
        self.learning_rate = self._schedule()
        self._profiler = StepProfiler(self.settings, self.context.rank)
        self._saver = CheckpointSaver(CheckpointStore(self.output_dir), self.loaded, settings, source)
        return self._info()

    @property
    def samples_per_update(self) -> int:
        """Samples of a mini-batch, over all ranks."""
        batch = self.settings.batch
        of_rank = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
        return of_rank * self.loaded.coords.dp_size

    def _schedule(self) -> LearningRateSchedule:
        """Return the learning rate schedule over the updates of a run in which every step has all of its samples."""
        mini_batches = math.ceil(self.rl.samples_per_step / self.samples_per_update)
        updates = self.rl.run.max_steps * mini_batches * self.rl.algorithm.ppo_epochs
        return LearningRateSchedule.of(self.settings.optimizer, updates)

    def train(self, rollouts: Rollouts, step: int) -> TrainResult:
        """Update on a step's samples: `ppo_epochs` passes over shuffled mini-batches of per_device_train_batch_size ·
        gradient_accumulation_steps · data-parallel size samples. Mini-batches without trained tokens are skipped.

        Args:
            rollouts: with the per-token and per-sample values that the loss needs; some tokens must be trained.
            step: of the run, counted from 0; it seeds the order of samples.

        Raises:
            MegatuneError: NOT_FINITE, naming gradients; that update has not changed the weights.
        """
        self._need("weights", "gradients", "optimizer")
        seed, epochs = self.settings.run.seed, self.rl.algorithm.ppo_epochs
        counts = [float(mask.sum()) for mask in rollouts.per_token["mask"]]
        plan = mini_batches(len(rollouts), self.samples_per_update, epochs, seed, step)
        # Without gradients Adam would still move the weights: by its moments, and by weight decay.
        plan = [samples for samples in plan if any(counts[sample] for sample in samples)]
        results: list[StepResult] = []
        self._profiler.begin(step)
        for number, samples in enumerate(plan, 1):
            self.context.beat(f"train, update {number} of {len(plan)}", step)
            rate = self.learning_rate.at(self.state.updates)
            results.append(self._update(rollouts, samples, rate, step))
            self.state.updates += 1
        self.step = self.state.step = step + 1
        self._profiler.end(self.step)
        return _combine(results, rate)

    def _update(self, rollouts: Rollouts, samples: Sequence[int], learning_rate: float, step: int) -> StepResult:
        layout, lengths = self._batch_layout(training=True), rollouts.lengths
        assigned = layout.assign([lengths[sample] for sample in samples])
        by_rank = [[[samples[index] for index in each] for each in of_rank] for of_rank in assigned]
        batches = self._batches(rollouts, by_rank, layout, self.token_extras, self.document_extras)
        objective = self.objective(len(samples))
        result = train_step(self.loaded, self._update_batches(batches), objective, learning_rate=learning_rate)
        if result.problem is not None:
            raise self._not_finite(result, step)
        self._after_update(rollouts, by_rank[self.loaded.coords.dp_rank], batches, objective)
        return result

    def _update_batches(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add a subclass's extra inputs to the micro-batches of an update. Collective."""
        return batches

    def _after_update(
        self, rollouts: Rollouts, mine: Sequence[Sequence[int]], batches: Sequence[Batch], objective: Objective
    ) -> None:
        """Store the values of this update that later updates of the step need. Collective."""

    def _not_finite(self, result: StepResult, step: int) -> MegatuneError:
        by_rank = list(not_finite_gradients(self.loaded).items())[:3]
        where = "; ".join(f"rank {rank}: {', '.join(names[:2])} …" for rank, names in by_rank)
        what = f"{self.role.name}, step {step + 1}: loss {result.totals.loss}, gradient norm {result.grad_norm}"
        why = f"gradients that are not finite on {where or 'no rank: their norm overflows'}; nothing was updated"
        fix = "lower learning_rate, write dtype: bf16 instead of fp16, or inspect the samples in rollout_dump_dir"
        return MegatuneError(Finding(what, why=why, fix=fix), ExitCode.NOT_FINITE)

    def save(self, step: int, extra_files: Mapping[str, bytes] | None = None) -> str:
        """Save checkpoint-STEP atomically into the role's folder: the model and its training state.

        Args:
            step: number of completed steps.
            extra_files: small files by name for its training/ folder, such as the driver's state.

        Returns:
            The path of the checkpoint.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are unchanged.
        """
        self._need("weights", "optimizer")
        self.context.beat("save", step, limit=self.settings.run.ddp_timeout)
        self.step = self.state.step = step
        path = self._saver.save(self.state, extra=extra_files)
        assert path is not None, "not in the background"
        return str(path)


def _combine(results: Sequence[StepResult], learning_rate: float) -> TrainResult:
    """Combine the results of several updates."""
    totals = StepTotals.summed([result.totals for result in results])
    norms = [result.grad_norm for result in results if result.updated]
    return TrainResult(
        updates=len(results),
        loss=sum(result.totals.loss for result in results) / len(results),
        grad_norm=sum(norms) / len(norms) if norms else math.inf,
        learning_rate=learning_rate,
        num_tokens=totals.num_tokens,
        memory_gib=device.peak_memory_bytes() / 2**30,
        metrics=totals.metrics,
    )


class ValueWorker(TrainedWorker):
    """One rank of the critic, whose settings have stage rm. See `ModelWorker`."""

    token_extras = ValueObjective.token_extras

    def objective(self, num_samples: int) -> ValueObjective:
        return ValueObjective(self.rl.algorithm.value_clip)
