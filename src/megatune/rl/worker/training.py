"""Roles that are trained: updates, and checkpoints as those of any run; the critic is one that adds little to that."""

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
from megatune.rl.worker.model import ModelWorker, Ready, offload_of
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
class Trained:
    """What one step's updates came to; the same on all ranks.

    Attributes:
        updates: of the optimizer.
        loss, grad_norm: means over them; of the norm over those that were not skipped.
        learning_rate: of the last one.
        num_tokens: trained, over all of them.
        memory_gib: most that this rank has held.
        metrics: means of the objective's metrics over all of them.
    """

    updates: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    memory_gib: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class TrainedWorker(ModelWorker):
    """One rank of a role that is trained. See `ModelWorker`."""

    loaded: Assembly
    # What micro-batches carry beside tokens, by names of `Rollouts`.
    token_extras: Sequence[str] = ()
    document_extras: Sequence[str] = ()

    @abstractmethod
    def objective(self, num_samples: int) -> Objective:
        """Return the loss of an update on so many samples."""

    @property
    def output_dir(self) -> Path:
        """The folder of the role's checkpoints: of the policy the run's own."""
        folder = Path(self.rl.run.output_dir)
        return folder if self.role.name == "actor_train" else folder / self.role.name

    def find_checkpoint(self, asked: bool | str | None) -> tuple[str | None, list[str]]:
        """Choose the checkpoint to resume from, after `join` and before `load`, verified by all ranks together.

        Args:
            asked: None: the newest whole one of the role's folder if there is one; True insists on one; a path names
                it; False: none.

        Returns:
            Where it is, and lines that a user should see.

        Raises:
            MegatuneError: INPUT, where the one asked for is not whole, or none of those that are there is.
        """
        self.context.beat("tidy", 0, limit=float("inf"))
        on_rank_0(self._tidy, is_long=True)
        self.context.beat("find a checkpoint", 0)
        settings = with_settings(self.settings, {"run.resume_from_checkpoint": asked})
        path, notes = choose_checkpoint(self.context, settings, self.output_dir)
        return None if path is None else str(path), notes

    def _tidy(self) -> None:
        with writing(self.output_dir):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            clean_partials(self.output_dir)

    def load(self, checkpoint: str | None = None) -> Ready:
        resumed = None if checkpoint is None else Path(checkpoint)
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, settings = self._source(resumed)
        kept = {"checkpoint.save_total_limit": self.rl.run.max_ckpt_to_keep or None}
        self.settings = settings = with_settings(settings, kept)
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
        return self._ready()

    @property
    def samples_per_update(self) -> int:
        """Samples of a mini-batch, over all ranks."""
        batch = self.settings.batch
        of_rank = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
        return of_rank * self.loaded.coords.dp_size

    def _schedule(self) -> LearningRateSchedule:
        """The learning rate over the updates of a run of which every step has all its samples."""
        mini_batches = math.ceil(self.rl.samples_per_step / self.samples_per_update)
        updates = self.rl.run.max_steps * mini_batches * self.rl.algorithm.ppo_epochs
        return LearningRateSchedule.of(self.settings.optimizer, updates)

    def train(self, rollouts: Rollouts, step: int) -> Trained:
        """Update on a step's samples: `ppo_epochs` passes over shuffled mini-batches of per_device_train_batch_size ·
        gradient_accumulation_steps · data-parallel size samples. One in which no token counts is left out.

        Args:
            rollouts: with the values that the loss needs, of tokens and of samples; some of their tokens count.
            step: of the run, counted from 0; it seeds the order of samples.

        Raises:
            MegatuneError: NOT_FINITE, naming gradients; the weights are as before that update.
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
        return _summed(results, rate)

    def _update(self, rollouts: Rollouts, samples: Sequence[int], learning_rate: float, step: int) -> StepResult:
        sharing, lengths = self._sharing(training=True), rollouts.lengths
        places = sharing.shares([lengths[sample] for sample in samples])
        shares = [[[samples[place] for place in each] for each in of_rank] for of_rank in places]
        batches = self._batches(rollouts, shares, sharing, self.token_extras, self.document_extras)
        objective = self.objective(len(samples))
        result = train_step(self.loaded, self._update_batches(batches), objective, learning_rate=learning_rate)
        if result.problem is not None:
            raise self._not_finite(result, step)
        self._keep(rollouts, shares[self.loaded.coords.dp_rank], batches, objective)
        return result

    def _update_batches(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add what micro-batches of an update carry besides. Collective."""
        return batches

    def _keep(
        self, rollouts: Rollouts, mine: Sequence[Sequence[int]], batches: Sequence[Batch], objective: Objective
    ) -> None:
        """Keep what later updates of the step need of this one. Collective."""

    def _not_finite(self, result: StepResult, step: int) -> MegatuneError:
        by_rank = list(not_finite_gradients(self.loaded).items())[:3]
        where = "; ".join(f"rank {rank}: {', '.join(names[:2])} …" for rank, names in by_rank)
        what = f"{self.role.name}, step {step + 1}: loss {result.totals.loss}, gradient norm {result.grad_norm}"
        why = f"gradients that are not finite on {where or 'no rank: their norm overflows'}; nothing was updated"
        fix = "lower learning_rate, write dtype: bf16 instead of fp16, or look at rollout_dump_dir's samples"
        return MegatuneError(Finding(what, why=why, fix=fix), ExitCode.NOT_FINITE)

    def save(self, step: int, beside: Mapping[str, bytes] | None = None) -> str:
        """Save checkpoint-STEP into the role's folder: the model and its training state, whole or not at all.

        Args:
            step: steps done.
            beside: small files by name that go into its training/ folder, such as the driver's state.

        Returns:
            Where it is.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are as they were.
        """
        self._need("weights", "optimizer")
        self.context.beat("save", step, limit=self.settings.run.ddp_timeout)
        self.step = self.state.step = step
        path = self._saver.save(self.state, extra=beside)
        assert path is not None, "not in the background"
        return str(path)


def _summed(results: Sequence[StepResult], learning_rate: float) -> Trained:
    """Report several updates as one."""
    totals = StepTotals.summed([result.totals for result in results])
    norms = [result.grad_norm for result in results if result.updated]
    return Trained(
        updates=len(results),
        loss=sum(result.totals.loss for result in results) / len(results),
        grad_norm=sum(norms) / len(norms) if norms else math.inf,
        learning_rate=learning_rate,
        num_tokens=totals.num_tokens,
        memory_gib=device.peak_memory_bytes() / 2**30,
        metrics=totals.metrics,
    )


class ValueWorker(TrainedWorker):
    """One rank of critic; the stage of its settings is rm. See `ModelWorker`."""

    token_extras = ValueObjective.token_extras

    def objective(self, num_samples: int) -> ValueObjective:
        return ValueObjective(self.rl.algorithm.value_clip)
