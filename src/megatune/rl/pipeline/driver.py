"""The training loop: send weights, sample responses, score them, update the models, save checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from megatune.config.rl.settings import RLSettings
from megatune.data.encode import load_tokenizer
from megatune.rl.cluster.timeline import PhaseTimer
from megatune.rl.pipeline.collector import Collector, ProblemOrder, StepGroups
from megatune.rl.pipeline.files import Progress, dump_samples, record_step, replay_step
from megatune.rl.pipeline.learn import Learner
from megatune.rl.pipeline.report import Reports, report_failures, validation_metrics
from megatune.rl.pipeline.roles import DeviceScheduler
from megatune.rl.pipeline.sampler import make_sampler_factory, sample_all
from megatune.rl.pipeline.scores import RewardModels
from megatune.rl.pipeline.startup import Roles
from megatune.rl.pipeline.weights import Weights
from megatune.rl.problems import Problems
from megatune.rl.rewards.pool import RewardPool
from megatune.training.callbacks.base import EvalReport
from megatune.training.storage.files import new_folder, writing


class Driver:
    """Runs the steps of a run.

    Args:
        source: the folder of the initial policy.
        progress: the state of the run; every step updates it.
        note: called with each phase as it begins, and the step, counted from 1.
    """

    def __init__(
        self,
        settings: RLSettings,
        source: Path,
        problems: Problems,
        validation: Problems | None,
        roles: Roles,
        scheduler: DeviceScheduler,
        pool: RewardPool,
        reports: Reports,
        progress: Progress,
        stop_requested: Callable[[], bool],
        note: Callable[[str, int], None],
    ) -> None:
        self.settings, self.problems, self.validation = settings, problems, validation
        self.engines, self.pool, self.reports, self.progress = roles.engines, pool, reports, progress
        self.stop_requested, self.note = stop_requested, note
        self.weights = Weights(settings, scheduler, roles.models["actor_train"], roles.engines)
        self.learner = Learner(settings, scheduler, roles.models)
        self.scores = RewardModels(settings, scheduler, roles.models, pool, load_tokenizer(source))
        self._make_sampler = make_sampler_factory(settings, roles.engines, pool, source)
        self._synced, self._version = False, 0  # whether the engines have weights of this process, and their version
        run, rollout = settings.run, settings.rollout
        order = ProblemOrder(problems.by_domain, run.seed)
        self._sampler = self._make_sampler(settings.actor_infer.generating_args, "train")
        self._collector = Collector(
            self._sampler,
            order.at,
            settings.data.prompts_of_domains(rollout.rollout_batch_size),
            {name: role.group_filter for name, role in settings.rewards.items()},
            rollout.num_return_sequences_in_group,
            rollout.async_generation_ratio,
            rollout.max_additional_running_prompts if rollout.is_use_additional_prompts else 0,
            rollout.partial_rollout_steps,
        )
        if progress.step:
            self._collector.load_state(progress.collector, progress.routing)
            self.learner.state.load_state_dict(progress.algorithm)

    def run(self) -> Literal["finished", "stopped"]:
        """Run the remaining steps, or until a stop is requested; the last step is always saved."""
        run = self.settings.run
        while self.progress.step < run.max_steps:
            self._step(self.progress.step)
            ends = self.stop_requested() or self.progress.step == run.max_steps
            if ends or self.progress.step % run.save_steps == 0:
                self.note("save", self.progress.step)
                self._save()
            if ends and self.progress.step < run.max_steps:
                return "stopped"
        if not (Path(run.output_dir) / f"checkpoint-{self.progress.step}").is_dir():
            self._save()  # resumed from the last checkpoint of a run in another folder
        if self._validates and not run.rollout_mock.replays:
            with self._paused():
                self.note("sync", run.max_steps)
                self._sync(run.max_steps + 1)
                self.note("validation", run.max_steps)
                self._validate(run.max_steps)
        return "finished"

    @property
    def _validates(self) -> bool:
        return self.validation is not None and self.settings.run.eval_steps > 0

    @property
    def _is_asynchronous(self) -> bool:
        run = self.settings.run
        return self.settings.rollout.async_generation_ratio > 0 and not run.rollout_mock.replays

    def _step(self, step: int) -> None:
        """Run one step, counted from 0; it begins with version step + 1 of the weights."""
        phases, run = PhaseTimer(lambda phase: self.note(phase, step + 1)), self.settings.run
        sync: dict[str, float] = {}
        if run.rollout_mock.replays:
            batch = self._replay(step)
        else:
            samples = self.settings.algorithm.samples_at(step, run.seed)
            validates = self._validates and step % run.eval_steps == 0
            with self._paused():
                if samples or validates:
                    sync = self._sync_if_due(step, phases)
                else:
                    self._synced = False
                if validates:
                    with phases("validation"):
                        self._validate(step)
                        self._wake(step)
            self._sampler.takes_answers = not samples
            with phases("rollout"):
                batch = self.engines.run(self._collector.take())
            if self.scores:
                with phases("scores"):
                    self.scores.score(batch.groups)
        learned = self.learner.learn(batch.groups, step, phases)
        self._dump(step, batch)
        self.progress.step = step + 1
        self.reports.step(step + 1, batch, learned, phases, self._other_metrics(sync, batch, phases))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause the sampling of training groups inside the block."""
        self.engines.run(self._collector.pause())
        yield
        self._collector.resume()

    def _sync_if_due(self, step: int, phases: PhaseTimer) -> dict[str, float]:
        """Send the weights of this step to the engines if due, and return metrics of the transfer.

        It is due every model_update_frequency steps, after a checkpoint (a run that resumes from it has no older
        weights to sample with), when an engine was restarted, and when the engines have lost their weights."""
        often, save_steps = self.settings.actor_train.model_update_frequency, self.settings.run.save_steps
        is_due = not self._synced or step % often == 0 or step % save_steps == 0
        is_due |= self.engines.admit()
        found: dict[str, float] = {}
        if is_due or self.weights.engines_lose_weights:
            with phases("sync"):
                found = self._sync(step + 1)
            self._synced = True
            if self._is_asynchronous:
                with phases("probe"):
                    self.weights.probe(self.problems.all(), step + 1, self.learner)
        else:
            self.weights.resume()
        self._collector.regenerate_stale(step + 1, self._version)
        return found

    def _wake(self, step: int) -> None:
        """Give the engines their devices back, which a reward model may have used during the validation."""
        if self.engines.needs_weights:
            self._sync(step + 1)
        elif self.scores:
            self.weights.resume()

    def _sync(self, version: int) -> dict[str, float]:
        """Send the weights to the engines, including restarted ones, which sample again from here on."""
        self._version = version
        self.engines.resend_weights = partial(self._sync, version)
        self.engines.admit()
        found = self.weights.sync(version)
        self.engines.mark_updated()
        return found

    def _replay(self, step: int) -> StepGroups:
        """Read the recorded groups of a step."""
        by_id = {(domain, each.id): each for domain, own in self.problems.by_domain.items() for each in own}
        return StepGroups(replay_step(Path(self.settings.run.rollout_mock.dump_dir), step + 1, by_id))

    def _dump(self, step: int, batch: StepGroups) -> None:
        """Write the rollouts if rollout_dump_dir or rollout_mock is set."""
        run = self.settings.run
        if run.rollout_dump_dir:
            dump_samples(Path(run.rollout_dump_dir) / f"step-{step + 1:06d}.jsonl", step + 1, batch.groups)
        if run.rollout_mock.records:
            record_step(Path(run.rollout_mock.dump_dir), step + 1, batch.groups)

    def _validate(self, step: int) -> None:
        assert self.validation is not None
        assert self.settings.validation is not None
        began, generating = time.monotonic(), self.settings.validation.generating_args
        sampler = self._make_sampler(generating, "eval")
        groups = self.engines.run(sample_all(self.validation.all(), sampler, generating))
        self.scores.score(groups)
        report = EvalReport(
            step=step,
            epoch=None,
            loss=None,
            perplexity=None,
            num_tokens=sum(len(sample.response.response_ids) for group in groups for sample in group.samples),
            seconds=time.monotonic() - began,
            metrics=validation_metrics(groups),
        )
        self.reports.callbacks.on_evaluate(report)
        report_failures(groups, "count as wrong")

    def _other_metrics(self, sync: Mapping[str, float], batch: StepGroups, phases: PhaseTimer) -> dict[str, float]:
        """Return the metrics of transfers, engines and rewards."""
        num_tokens = sum(len(sample.response.response_ids) for group in batch.groups for sample in group.samples)
        found = {"rollout_tokens_per_second": num_tokens / max(phases.seconds["rollout"], 1e-9), **sync}
        for domain, counts in self.pool.counts.items():
            if counts:
                found |= {f"{kind}/{domain}": float(counts[kind]) for kind in ("errors", "timeouts")}
        return found

    def _save(self) -> None:
        """Save a checkpoint."""
        with self._paused():
            self.progress.routing = {}
            self.progress.collector = self._collector.state(self.progress.routing)
        self.progress.algorithm = self.learner.state.state_dict()
        path = self.learner.save(self.progress.step, self.progress.files())
        self.reports.callbacks.on_save(path)
        if self.settings.run.checkpoint_config.output_dir:
            _copy(path, Path(self.settings.run.checkpoint_config.output_dir) / path.name)


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint to a second folder."""
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    with writing(target), new_folder(target, size) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
