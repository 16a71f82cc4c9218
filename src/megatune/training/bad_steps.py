"""Detects bad steps (loss or gradients that are not finite, or that spike), and handles them as on_bad_step asks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.data.encode import load_tokenizer
from megatune.data.order import StepRows
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.agreement import on_rank_0
from megatune.training.callbacks.base import Notice
from megatune.training.restarts import BadStepsFile
from megatune.training.storage.store import CheckpointStore, checkpoint_step, list_checkpoints
from megatune.training.train_state import TrainState
from megatune.training.train_step import StepResult, not_finite

# The median of the last _WINDOW steps is the baseline; spikes are detected after _MIN_STEPS.
_WINDOW, _MIN_STEPS = 32, 8
_MAX_NAMED = 8  # rows in a message
_SHOWN_TOKENS = 32  # of each sequence in the file


@dataclass(slots=True)
class BadSteps:
    """Checks each step and handles bad ones, in the same way on all ranks.

    Attributes:
        rows: the rows of each step.
        source: the folder of the model, with the tokenizer.
        left_out: steps, counted from 1, to skip after the run went back to a checkpoint.
        times_back: the number of times that it went back.
    """

    settings: Settings
    state: TrainState
    rows: StepRows
    store: CheckpointStore
    source: Path
    left_out: frozenset[int]
    times_back: int

    @classmethod
    def begin(
        cls, settings: Settings, state: TrainState, rows: StepRows, store: CheckpointStore, source: Path, resumes: bool
    ) -> BadSteps:
        """Read the bad steps that earlier processes of the run recorded. Collective.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        file, step = BadStepsFile(store.output_dir), state.step if resumes else None
        back = on_rank_0(lambda: file.begin(step))
        left_out = frozenset(number for record in back for number in record["left_out"])
        return cls(settings, state, rows, store, source, left_out, len(back))

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Return the problem of a step, or None. See `loss_spike_bound` for the formula."""
        if (problem := not_finite(loss, grad_norm)) is not None:
            return problem
        run, state = self.settings.run, self.state
        checks = (
            ("loss", loss, run.loss_spike_bound, state.recent_losses),
            ("gradient norm", grad_norm, run.grad_norm_spike_bound, state.recent_grad_norms),
        )
        return ", ".join(text for each in checks if (text := _spike(*each))) or None

    def note_good(self, result: StepResult) -> None:
        """Record the loss and gradient norm of a good step."""
        values = (self.state.recent_losses, result.totals.loss), (self.state.recent_grad_norms, result.grad_norm)
        for recent, value in values:
            recent.append(value)
            del recent[:-_WINDOW]

    def skip(self, step: int) -> Notice:
        """Return the notice for a step of `left_out`, counted from 0."""
        text = f"step {step + 1}: left out, its rows are not trained: the run went back from here"
        return Notice(step + 1, text, {"bad_step": "left out", "action": "left_out"})

    def handle(self, step: int, result: StepResult, gradients: Mapping[int, list[str]]) -> Notice:
        """Handle a bad step, counted from 0, whose update was skipped. Collective. No checkpoint may be in flight.

        Args:
            gradients: names of the gradients that are not finite, by rank.

        Returns:
            The notice, if the run continues.

        Raises:
            MegatuneError: NOT_FINITE, if the run stops or goes back to a checkpoint.
        """
        number, asked, most = step + 1, self.settings.run.on_bad_step, self.settings.run.max_bad_steps
        skipped, action, ends = self.state.bad_steps + self.times_back, asked, ""
        left_out: list[int] = []
        if asked != "stop" and skipped >= most:
            action, ends = "stop", f"{skipped} bad steps were skipped before it, the limit of max_bad_steps; "
        if action == "go_back":
            newest = on_rank_0(lambda: _newest(self.store))
            # The step before may be the cause: it computed the weights that gave this loss.
            left_out = [] if newest is None else [each for each in (step, number) if each > newest]
            if newest is None:
                action, ends = "stop", "there is no checkpoint to go back to yet; "
        on_rank_0(lambda: self._keep(step, result, gradients, action, left_out))
        if action == "skip":
            self.state.bad_steps += 1
            text = f"step {number}: skipped, the weights stay as they are: {result.problem}; {self._rows_of(step)}"
            text += f" (bad step {skipped + 1} of at most {most}; {self._file.path})"
            return Notice(number, text, {"bad_step": result.problem, "action": action})
        raise self._ended(step, result, gradients, ends, left_out)

    @property
    def _file(self) -> BadStepsFile:
        return BadStepsFile(self.store.output_dir)

    def _rows_of(self, step: int) -> str:
        names = self.rows.names(step)
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"the step's rows are {', '.join(names[:_MAX_NAMED])}{more}"

    def _ended(
        self, step: int, result: StepResult, gradients: Mapping[int, list[str]], ends: str, left_out: list[int]
    ) -> MegatuneError:
        """Return the error that names the step, the rows and the gradients."""
        what = f"step {step + 1}: loss {result.totals.loss}, gradient norm {result.grad_norm}"
        finite = not_finite(result.totals.loss, result.grad_norm) is None
        where = "; ".join(f"rank {rank}: {', '.join(names[:2])} …" for rank, names in list(gradients.items())[:3])
        why = (
            result.problem if finite else f"gradients that are not finite on {where or 'no rank: their norm overflows'}"
        )
        why = f"{ends}{why}; {self._rows_of(step)}; the weights are as they were before the step"
        if left_out:
            steps = " and ".join(map(str, left_out))
            fix = f"the run goes back to its newest checkpoint and leaves out step {steps}, as on_bad_step asks"
        else:
            spikes = "a higher bound, or look at those rows"
            fix = spikes if finite else "train in bf16 instead of fp16, or look at those rows"
            fix = f"lower learning_rate, {fix}: {self._file.path}"
            if self.settings.run.on_bad_step == "stop":
                fix += "; on_bad_step: skip continues without such steps"
        return MegatuneError(Finding(what, "", why, fix), ExitCode.NOT_FINITE)

    def _keep(
        self, step: int, result: StepResult, gradients: Mapping[int, list[str]], action: str, left_out: list[int]
    ) -> None:
        self._file.add({
            "step": step + 1,
            "problem": result.problem,
            "loss": result.totals.loss,
            "grad_norm": result.grad_norm,
            "action": action,
            "left_out": left_out,
            "not_finite": {str(rank): names[:_MAX_NAMED] for rank, names in gradients.items()},
            "rows": list(self._texts(step)),
        })  # fmt: skip

    def _texts(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the names of the step's rows, with the first tokens of each of their sequences."""
        names, tokenizer = self.rows.names(step), load_tokenizer(self.source)
        for name, documents in zip(names, self.rows.documents(step, range(len(names))), strict=True):
            yield {"row": name, "begins": [tokenizer.decode(each.input_ids[:_SHOWN_TOKENS]) for each in documents]}


def _spike(name: str, value: float, bound: float | None, recent: list[float]) -> str:
    if bound is None or len(recent) < _MIN_STEPS:
        return ""
    usual = statistics.median(recent)
    if value <= usual + (bound - 1) * abs(usual):
        return ""
    return f"{name} {value:.4g} is beyond {bound:g} times the median of the last {len(recent)} steps, {usual:.4g}"


def _newest(store: CheckpointStore) -> int | None:
    found = list_checkpoints(store.output_dir)
    return checkpoint_step(found[-1]) if found else None
