"""What a run reports: numbers of steps and validations, and samples as text."""

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
from megatune.rl.cluster.timeline import Phases
from megatune.rl.pipeline.collector import Taken
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.learn import Learned
from megatune.rl.samples import Sample
from megatune.training.callbacks import CallbackList
from megatune.training.callbacks.base import Callback, Shown, StepReport
from megatune.training.callbacks.console import Console
from megatune.training.callbacks.metrics import Metrics, Results, TensorBoard, TrainerLog
from megatune.training.callbacks.plot import LossPlot
from megatune.training.callbacks.trackers import Trackers
from megatune.training.trackers import WORKERS, asked_trackers

# Of a step's many numbers, what a line on the console has.
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
_OF_SCORES = ("reward", "reward_std", "reward_errors", "accuracy", "zero_std_groups")
_MOST_SKIPPED = 3  # steps in a row without training before a warning
_SAMPLES = 10  # of a logged step, in TensorBoard
_SHOWN, _MOST_CHARACTERS = 2, 300  # on the console


class Reports:
    """Everything that looks on.

    Args:
        name: of the run.
        resume_step: steps done before this process.
    """

    def __init__(self, settings: RLSettings, architecture: Architecture, log_dir: Path, resume_step: int) -> None:
        actor, output_dir = settings.actor_train.settings, Path(settings.run.output_dir)
        self._settings, self._architecture = settings, architecture
        self._is_scored = UNSCORED not in settings.rewards
        name, shown, asked = settings.run.exp_name, Shown(throughput=False, lines=_LINE), asked_trackers(actor)
        self._tensorboard: TensorBoard | None = None
        self._skipped = 0  # steps in a row that have not trained the policy
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

    def step(self, step: int, taken: Taken, learned: Learned, phases: Phases, beside: Mapping[str, float]) -> None:
        """Report a step.

        Args:
            step: steps done, this one among them.
            beside: metrics of the transfer of weights, and of rewards.
        """
        lengths = [
            len(sample.problem.prompt_ids) + len(sample.response.response_ids)
            for group in taken.groups
            for sample in group.samples
        ]
        seconds, trained = phases.total, learned.trained
        flops = train_flops(self._architecture, lengths, self._settings.actor_train.settings.finetuning)
        metrics = {
            **sample_metrics(taken, step),
            **({} if learned.mismatch is None else learned.mismatch.metrics),
            **learned.metrics,
            **beside,
            **{f"seconds/{name}": value for name, value in phases.seconds.items()},
            "waiting": phases.seconds["rollout"] / seconds,
        }
        if not self._is_scored:
            metrics = {name: value for name, value in metrics.items() if name not in _OF_SCORES}
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
        tell_failures(taken.groups, "are left out")
        self._tell_training(step, learned)
        if step % self._settings.run.logging_steps == 0:
            self._show(step, taken.groups)

    def _tell_training(self, step: int, learned: Learned) -> None:
        """Say why a step has trained nothing, and how many tokens were left out because two engines differ."""
        self._skipped = self._skipped + 1 if learned.skipped else 0
        if learned.skipped:
            print(f"  step {step} has not trained the policy: {learned.skipped}", flush=True)
        if self._skipped >= _MOST_SKIPPED and "critic" not in learned.skipped:
            print(f"  warning: {self._skipped} steps in a row; allow longer responses, or fewer masks", flush=True)
        if learned.mismatch is not None and learned.mismatch.outliers:
            found = learned.mismatch
            what = f"{found.outliers:,} of {found.tokens:,} tokens, by {found.max:.3g} at most"
            print(f"  warning: rollout engine and trainer differ much in {what}; log_prob_gap_* has more", flush=True)

    def _show(self, step: int, groups: Sequence[Group]) -> None:
        """Show samples as text: the best and the worst of them, and more in TensorBoard."""
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


def tell_failures(groups: Sequence[Group], what_becomes: str) -> None:
    """Say how many samples have no score, or took too long, and why, for one of each domain."""
    failed: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in (each for group in groups for each in group.samples):
        for kind in ("error", "late"):
            if kind in sample.details:
                failed[sample.problem.domain, kind].append(sample)
    for (domain, kind), own in failed.items():
        what, becomes = ("failed", what_becomes) if kind == "error" else ("took too long", "count as wrong")
        said = f"the reward of {domain} {what} for {len(own)} samples, which {becomes}"
        print(f"  {said}; problem {own[0].problem.id}: {_shortened(own[0].details[kind])}", flush=True)


def sample_metrics(taken: Taken, version: int) -> dict[str, float]:
    """Return what samples say, over all of them and by domain where there are several.

    Args:
        version: of the weights that are trained with them.
    """
    samples = [sample for group in taken.groups for sample in group.samples]
    lengths = [len(sample.response.response_ids) for sample in samples]
    scored = [sample for sample in samples if sample.has_score]
    everyone = [*(sample.score for sample in scored), *taken.dropped_scores]
    lags = [version - own for group in taken.groups if (own := group.oldest_version) is not None]
    return {
        "reward": _mean(sample.score for sample in scored),
        **({"reward_unfiltered": _mean(everyone)} if taken.num_dropped else {}),
        "reward_std": float(np.std([sample.score for sample in scored])) if scored else 0.0,
        "accuracy": _mean(is_correct(sample.details) for sample in scored),
        **_by_name("accuracy", [(sample.problem.domain, is_correct(sample.details)) for sample in scored]),
        **_by_name("reward", [(sample.problem.domain, sample.score) for sample in scored]),
        "response_length": _mean(lengths),
        "response_length_max": float(max(lengths)),
        "prompt_length": _mean(len(group.problem.prompt_ids) for group in taken.groups),
        "truncated": _mean(sample.response.finish == "length" for sample in samples),
        "reward_errors": float(len(samples) - len(scored)),
        "zero_std_groups": _mean(len({*group.scores}) < 2 for group in taken.groups),
        "groups_dropped": float(taken.num_dropped),
        "groups_regenerated": float(taken.num_stale),
        "staleness": _mean(lags),
    }


def validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return means over all samples, and by domain and tag where there are several; pass@k for powers of 2, without
    bias (arXiv:2107.03374)."""
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
    """Return the chance that any of k samples of a group is right: 1 - C(n - c, k) / C(n, k)."""
    size, correct = group.size, sum(is_correct(sample.details) > 0 for sample in group.samples)
    return 1.0 - math.comb(size - correct, k) / math.comb(size, k)


def is_correct(details: Mapping[str, object]) -> float:
    """Return what a reward says of an answer: 1 right, 0 wrong."""
    value = details.get("correct", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0 of nothing."""
    found = [*values]
    return float(np.mean(found)) if found else 0.0


def _by_name(metric: str, values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name as METRIC/NAME, where there are several."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, value in values:
        by_name[name].append(value)
    return {f"{metric}/{name}": _mean(own) for name, own in by_name.items()} if len(by_name) > 1 else {}


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"
