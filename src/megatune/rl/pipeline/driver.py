"""The loop over steps: weights to the engines, responses, rewards, updates, checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from megatune.config.rl.settings import RLSettings
from megatune.rl.cluster.timeline import Phases
from megatune.rl.pipeline.collector import Collector, ProblemOrder, Taken
from megatune.rl.pipeline.files import Progress, dump_samples, record_step, replay_step
from megatune.rl.pipeline.learn import Learner
from megatune.rl.pipeline.report import Reports, tell_failures, validation_metrics
from megatune.rl.pipeline.sampler import MakeSampler, Sampler, sample_all
from megatune.rl.pipeline.scores import RewardModels
from megatune.rl.pipeline.startup import Roles
from megatune.rl.pipeline.weights import Weights
from megatune.rl.problems import Problems
from megatune.rl.rewards.pool import RewardPool
from megatune.training.callbacks.base import EvalReport
from megatune.training.storage.files import new_folder, writing


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs the steps.

    Attributes:
        scores: adds what reward models say.
        sampler: makes what samples and scores.
        progress: how far the run has come; changed by every step.
        note: told each phase as it begins, and the step, counted from 1.
    """

    settings: RLSettings
    roles: Roles
    weights: Weights
    learner: Learner
    pool: RewardPool
    scores: RewardModels
    sampler: MakeSampler
    problems: Problems
    validation: Problems | None
    reports: Reports
    progress: Progress
    stop_requested: Callable[[], bool]
    note: Callable[[str, int], None]
    _sampler: Sampler = field(init=False)
    _collector: Collector = field(init=False)
    _synced: bool = field(default=False, init=False)
    _version: int = field(default=0, init=False)  # of the engines' weights

    def __post_init__(self) -> None:
        run, rollout = self.settings.run, self.settings.rollout
        order = ProblemOrder(self.problems.by_domain, run.seed)
        self._sampler = self.sampler(self.settings.actor_infer.generating_args, "train")
        self._collector = Collector(
            self._sampler,
            order.at,
            self.settings.data.prompts_of_domains(rollout.rollout_batch_size),
            {name: role.group_filter for name, role in self.settings.rewards.items()},
            rollout.num_return_sequences_in_group,
            rollout.async_generation_ratio,
            rollout.max_additional_running_prompts if rollout.is_use_additional_prompts else 0,
            rollout.partial_rollout_steps,
        )
        if self.progress.step:
            self._collector.load_state(self.progress.collector, self.progress.routing)
            self.learner.state.load_state_dict(self.progress.algorithm)

    def run(self) -> Literal["finished", "stopped"]:
        """Take all steps that are left, or until somebody asks to stop; the last step is always saved."""
        run = self.settings.run
        while self.progress.step < run.max_steps:
            self._step(self.progress.step)
            ends = self.stop_requested() or self.progress.step == run.max_steps
            if ends or self.progress.step % run.save_steps == 0:
                self.note("save", self.progress.step)
                self._save()
            if ends and self.progress.step < run.max_steps:
                return "stopped"
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
        """Take one step, counted from 0; the weights that it begins with are version step + 1."""
        phases, run = Phases(lambda phase: self.note(phase, step + 1)), self.settings.run
        sync: dict[str, float] = {}
        if run.rollout_mock.replays:
            taken = self._replayed(step)
        else:
            samples = self.settings.algorithm.samples_at(step, run.seed)
            validates = self._validates and step % run.eval_steps == 0
            with self._paused():
                if samples or validates:
                    sync = self._synchronized(step, phases)
                else:
                    self._synced = False
                if validates:
                    with phases("validation"):
                        self._validate(step)
                        self._wake(step)
            self._sampler.takes_answers = not samples
            with phases("rollout"):
                taken = self.roles.engines.run(self._collector.take())
            if self.scores:
                with phases("scores"):
                    self.scores.score(taken.groups)
        learned = self.learner.learn(taken.groups, step, phases)
        self._keep(step, taken)
        self.progress.step = step + 1
        self.reports.step(step + 1, taken, learned, phases, self._beside(sync, taken, phases))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Let nothing be sampled inside but what is asked for there."""
        self.roles.engines.run(self._collector.pause())
        yield
        self._collector.resume()

    def _synchronized(self, step: int, phases: Phases) -> dict[str, float]:
        """Bring the engines to the weights of this step, where that is due; every model_update_frequency steps it is,
        and where engines have forgotten theirs. After a checkpoint it is, too: a run that goes on from there has no
        older weights to sample with; and where an engine was started again. Return metrics."""
        often, save_steps = self.settings.actor_train.model_update_frequency, self.settings.run.save_steps
        is_due = not self._synced or step % often == 0 or step % save_steps == 0
        is_due |= self.roles.engines.admit()
        found: dict[str, float] = {}
        if is_due or self.weights.engines_forget:
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
        """Let the engines sample on after a reward model may have had their devices."""
        if self.roles.engines.forgot:
            self._sync(step + 1)
        elif self.scores:
            self.weights.resume()

    def _sync(self, version: int) -> dict[str, float]:
        """Give the engines the weights; those that were started again take part from here on."""
        engines, self._version = self.roles.engines, version
        engines.refill = partial(self._sync, version)
        engines.admit()
        found = self.weights.sync(version)
        engines.note_weights()
        return found

    def _replayed(self, step: int) -> Taken:
        """Read what was recorded of a step."""
        by_id = {(domain, each.id): each for domain, own in self.problems.by_domain.items() for each in own}
        return Taken(replay_step(Path(self.settings.run.rollout_mock.dump_dir), step + 1, by_id))

    def _keep(self, step: int, taken: Taken) -> None:
        """Write rollouts where that is asked for."""
        run = self.settings.run
        if run.rollout_dump_dir:
            dump_samples(Path(run.rollout_dump_dir) / f"step-{step + 1:06d}.jsonl", step + 1, taken.groups)
        if run.rollout_mock.records:
            record_step(Path(run.rollout_mock.dump_dir), step + 1, taken.groups)

    def _validate(self, step: int) -> None:
        assert self.validation is not None
        assert self.settings.validation is not None
        began, generating = time.monotonic(), self.settings.validation.generating_args
        sampler = self.sampler(generating, "eval")
        groups = self.roles.engines.run(sample_all(self.validation.all(), sampler, generating))
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
        tell_failures(groups, "count as wrong")

    def _beside(self, sync: Mapping[str, float], taken: Taken, phases: Phases) -> dict[str, float]:
        """Return what is reported beside samples and updates."""
        num_tokens = sum(len(sample.response.response_ids) for group in taken.groups for sample in group.samples)
        found = {"rollout_tokens_per_second": num_tokens / max(phases.seconds["rollout"], 1e-9), **sync}
        for domain, counts in self.pool.counts.items():
            if counts:
                found |= {f"{kind}/{domain}": float(counts[kind]) for kind in ("errors", "timeouts")}
        return found

    def _save(self) -> None:
        """Save a checkpoint: the critic's first, so that the policy's says that all is there."""
        step = self.progress.step
        with self._paused():
            self.progress.routing = {}
            self.progress.collector = self._collector.state(self.progress.routing)
        self.progress.algorithm = self.learner.state.state_dict()
        if self.roles.critic is not None:
            self.learner.save(self.roles.critic, step)
        path = self.learner.save(self.roles.policy, step, self.progress.files())
        self.reports.callbacks.on_save(path)
        if self.settings.run.checkpoint_config.output_dir:
            _copy(path, Path(self.settings.run.checkpoint_config.output_dir) / path.name)


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint to a second place."""
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    with writing(target), new_folder(target, size) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
