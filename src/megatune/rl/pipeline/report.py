"""Reports metrics of steps and validations, and samples as text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatune.architecture import Architecture
from megatune.config.rl.settings import UNSCORED, RLSettings
from megatune.plan.flops import train_flops
from megatune.progress import say
from megatune.rl.cluster.timeline import PhaseTimer
from megatune.rl.pipeline.collector import StepGroups
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.learn import LearnResult
from megatune.rl.samples import Sample
from megatune.training.callbacks import CallbackList
from megatune.training.callbacks.base import Callback, Shown, StepReport
from megatune.training.callbacks.console import Console
from megatune.training.callbacks.metrics import Metrics, Results, TensorBoard, TrainerLog
from megatune.training.callbacks.plot import LossPlot
from megatune.training.callbacks.trackers import Trackers
from megatune.training.trackers import WORKERS, asked_trackers

# The metrics in a step's line on the console.
_LINE = (
    *("reward", "reward_unfiltered", "teacher_kl", "teacher_divergence", "answer_loss", "accuracy", "response_length"),
    *("truncated", "critic/kl", "actor/entropy", "actor/ppo_ratio_clipfrac", "log_prob_gap_mean", "staleness"),
    *("seconds/rollout", "seconds/train", "seconds/sync"),
)
_PANELS = (
    *_LINE,
    "actor/kl_loss",
    "actor/pg_loss",
    "critic/loss",
    "groups_dropped",
    "waiting",
    "rollout_tokens_per_second",
)
_SCORE_METRICS = ("reward", "reward_std", "reward_errors", "accuracy", "zero_std_groups")
_MAX_SKIPPED = 3  # consecutive steps without training before a warning
_SAMPLES = 10  # of a logged step, in TensorBoard
_SHOWN, _MAX_CHARACTERS = 2, 300  # on the console


class Reports:
    """The callbacks of a run, and what it prints.

    Args:
        resume_step: steps completed before this process.
    """

    def __init__(self, settings: RLSettings, architecture: Architecture, log_dir: Path, resume_step: int) -> None:
        actor, output_dir = settings.actor_train.settings, Path(settings.run.output_dir)
        self._settings, self._architecture = settings, architecture
        self._is_scored = UNSCORED not in settings.rewards
        name, shown, asked = settings.run.exp_name, Shown(throughput=False, lines=_LINE), asked_trackers(actor)
        self._tensorboard: TensorBoard | None = None
        self._skipped = 0  # consecutive steps that have not trained the policy
        callbacks: list[Callback] = [
            Console(name, resume_step, shown=shown),
            Metrics(output_dir, resume_step),
            TrainerLog(output_dir, resume_step),
            Results(output_dir),
            LossPlot(output_dir, _PANELS),
        ]
        if "tensorboard" in asked:
            events = Path(actor.logging.tensorboard_dir or output_dir / "runs") / name.replace("/", "-")
            self._tensorboard = TensorBoard(events, resume_step)
            callbacks.append(self._tensorboard)
        if workers := {each: WORKERS[each] for each in asked if each in WORKERS}:
            callbacks.append(Trackers(actor, workers, output_dir, log_dir, resume_step))
        self.callbacks = CallbackList(callbacks, settings.run.logging_steps)

    def step(
        self, step: int, batch: StepGroups, learned: LearnResult, phases: PhaseTimer, other: Mapping[str, float]
    ) -> None:
        """Report a step.

        Args:
            step: number of completed steps, including this one.
            other: metrics of the weight transfer and of rewards.
        """
        lengths = [
            len(sample.problem.prompt_ids) + len(sample.response.response_ids)
            for group in batch.groups
            for sample in group.samples
        ]
        seconds, trained = phases.total, learned.trained
        flops = train_flops(self._architecture, lengths, self._settings.actor_train.settings.finetuning)
        metrics = {
            **sample_metrics(batch, step),
            **({} if learned.mismatch is None else learned.mismatch.metrics),
            **learned.metrics,
            **other,
            **{f"seconds/{name}": value for name, value in phases.seconds.items()},
            "waiting": phases.seconds["rollout"] / seconds,
        }
        if not self._is_scored:
            metrics = {name: value for name, value in metrics.items() if name not in _SCORE_METRICS}
        report = StepReport(
            step=step,
            total_steps=self._settings.run.max_steps,
            epoch=None,
            loss=0.0 if trained is None else trained.loss,
            learning_rate=0.0 if trained is None else trained.learning_rate,
            grad_norm=0.0 if trained is None else trained.grad_norm,
            num_tokens=0 if trained is None else trained.num_tokens,
            num_input_tokens=sum(lengths),
            seconds=seconds,
            tokens_per_second=sum(lengths) / seconds,
            model_tflops=flops / seconds / len(self._settings.actor_train.devices) / 1e12,
            mfu=None,
            memory_gib=0.0 if trained is None else trained.memory_gib,
            metrics=metrics,
            row_tokens=sum(lengths) / len(lengths),
            longest_row=max(lengths),
        )
        self.callbacks.on_step_end(report)
        report_failures(batch.groups, "are left out")
        self._report_training(step, learned)
        if step % self._settings.run.logging_steps == 0:
            self._show(step, batch.groups)

    def _report_training(self, step: int, learned: LearnResult) -> None:
        """Print why a step has not trained, and how many tokens were masked because trainer and engine differ."""
        self._skipped = self._skipped + 1 if learned.skipped else 0
        if learned.skipped:
            print(f"  step {step} has not trained the policy: {learned.skipped}", flush=True)
        if self._skipped >= _MAX_SKIPPED and "critic" not in learned.skipped:
            print(f"  warning: {self._skipped} steps in a row; allow longer responses, or fewer masks", flush=True)
        if learned.mismatch is not None and learned.mismatch.outliers:
            found = learned.mismatch
            what = f"{found.outliers:,} of {found.tokens:,} tokens, by {found.max:.3g} at most"
            print(f"  warning: rollout engine and trainer differ much in {what}; log_prob_gap_* has more", flush=True)

    def _show(self, step: int, groups: Sequence[Group]) -> None:
        """Print the best and the worst sample, and write more to TensorBoard."""
        scored = (sample for group in groups for sample in group.samples if sample.has_score)
        samples = sorted(scored, key=lambda sample: -sample.score)
        chosen = samples[:1] + samples[-1:][: _SHOWN - 1]
        for sample in chosen if len(samples) > 1 else samples:
            prompt, text = (_shortened(part) for part in (sample.problem.prompt, sample.text))
            say(f"  {f'{sample.score:g}  ' * self._is_scored}{prompt!r} -> {text!r}")
        if self._tensorboard is not None:
            rows = [
                f"**{sample.score:g}** `{sample.problem.prompt!r}`\n\n    {sample.text!r}"
                for sample in samples[:_SAMPLES]
            ]
            self._tensorboard.add_text("samples", "\n\n".join(rows), step)


def report_failures(groups: Sequence[Group], consequence: str) -> None:
    """Print how many samples of each domain have no score or timed out, and the reason of one of them."""
    failed: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in (each for group in groups for each in group.samples):
        for kind in ("error", "late"):
            if kind in sample.details:
                failed[sample.problem.domain, kind].append(sample)
    for (domain, kind), own in failed.items():
        what, outcome = ("failed", consequence) if kind == "error" else ("took too long", "count as wrong")
        said = f"the reward of {domain} {what} for {len(own)} samples, which {outcome}"
        print(f"  {said}; problem {own[0].problem.id}: {_shortened(own[0].details[kind])}", flush=True)


def sample_metrics(batch: StepGroups, version: int) -> dict[str, float]:
    """Return metrics of samples, over all of them, and by domain if there are several.

    Args:
        version: version of the weights that are trained.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    lengths = [len(sample.response.response_ids) for sample in samples]
    scored = [sample for sample in samples if sample.has_score]
    everyone = [*(sample.score for sample in scored), *batch.dropped_scores]
    lags = [version - own for group in batch.groups if (own := group.oldest_version) is not None]
    return {
        "reward": _mean(sample.score for sample in scored),
        **({"reward_unfiltered": _mean(everyone)} if batch.num_dropped else {}),
        "reward_std": float(np.std([sample.score for sample in scored])) if scored else 0.0,
        "accuracy": _mean(is_correct(sample.details) for sample in scored),
        **_by_name("accuracy", [(sample.problem.domain, is_correct(sample.details)) for sample in scored]),
        **_by_name("reward", [(sample.problem.domain, sample.score) for sample in scored]),
        "response_length": _mean(lengths),
        "response_length_max": float(max(lengths)),
        "prompt_length": _mean(len(group.problem.prompt_ids) for group in batch.groups),
        "truncated": _mean(sample.response.finish == "length" for sample in samples),
        "reward_errors": float(len(samples) - len(scored)),
        "zero_std_groups": _mean(len({*group.scores}) < 2 for group in batch.groups),
        "groups_dropped": float(batch.num_dropped),
        "groups_regenerated": float(batch.num_stale),
        "staleness": _mean(lags),
    }


def validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return means over all samples, and by domain and tag if there are several; unbiased pass@k for powers of 2
    (arXiv:2107.03374)."""
    samples = [sample for group in groups for sample in group.samples]
    found = {
        "reward": _mean(sample.score for sample in samples),
        "accuracy": _mean(is_correct(sample.details) for sample in samples),
        "response_length": _mean(len(sample.response.response_ids) for sample in samples),
        "reward_errors": float(sum(not sample.has_score for sample in samples)),
        "truncated": _mean(sample.response.finish == "length" for sample in samples),
    }
    for k in (2**power for power in range(1, groups[0].size.bit_length())):
        found[f"pass@{k}"] = _mean(pass_at_k(group, k) for group in groups)
    for kind in ("domain", "tag"):
        found |= _by_name("accuracy", [(getattr(each.problem, kind), is_correct(each.details)) for each in samples])
    return found


def pass_at_k(group: Group, k: int) -> float:
    """Return the probability that any of k samples of a group is correct: 1 - C(n - c, k) / C(n, k)."""
    size, correct = group.size, sum(is_correct(sample.details) > 0 for sample in group.samples)
    return 1.0 - math.comb(size - correct, k) / math.comb(size, k)


def is_correct(details: Mapping[str, object]) -> float:
    """Return 1 for a correct answer and 0 for a wrong one."""
    value = details.get("correct", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _mean(values: Iterable[float]) -> float:
    """Return the mean, 0 without values."""
    found = [*values]
    return float(np.mean(found)) if found else 0.0


def _by_name(metric: str, values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name as METRIC/NAME if there are several names."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, value in values:
        by_name[name].append(value)
    return {f"{metric}/{name}": _mean(own) for name, own in by_name.items()} if len(by_name) > 1 else {}


def _shortened(text: str) -> str:
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]} … {text[-half:]}"
