"""The schedule of a run: epochs, the steps that evaluate and save, the number of steps, and the time limit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from megatune.config.settings import Settings, whole_steps
from megatune.data.order import steps_per_epoch

# The last save may be slower than those before, since others use the disk, too.
_SAVES = 2


@dataclass(frozen=True, slots=True)
class RunSchedule:
    """The steps of a run, counted from 1.

    Attributes:
        global_batch_size: rows per optimizer step.
        steps_per_epoch: the last one may be short; None for streamed data, whose length is unknown.
        save_every, evaluate_every, generate_every: steps; 0 for never (the last step is always saved).
        delay: number of steps before the first evaluation and the first answers, except for those of the last step.
    """

    global_batch_size: int
    steps_per_epoch: int | None
    total_steps: int
    save_every: int
    evaluate_every: int
    generate_every: int = 0
    delay: float = 0.0

    @classmethod
    def plan(cls, settings: Settings, num_rows: int | None, dp_size: int) -> RunSchedule:
        """Derive the schedule from the settings. `num_rows` is None for streamed data, which requires max_steps."""
        batch = settings.batch
        size = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * dp_size
        per_epoch = None if num_rows is None else steps_per_epoch(num_rows, size)
        max_steps = settings.optimizer.max_steps
        total = max_steps if max_steps > 0 else math.ceil(settings.optimizer.num_train_epochs * (per_epoch or 0))
        save = {"steps": whole_steps(settings.checkpoint.save_steps, total), "epoch": per_epoch or 0, "no": 0}
        evaluate = {"steps": whole_steps(settings.eval_interval, total), "epoch": per_epoch or 0, "no": 0}
        every = save[settings.checkpoint.save_strategy], evaluate[settings.evaluation.eval_strategy]
        generate = settings.evaluation.eval_generate_steps or (every[1] if settings.generates else 0)
        is_of_steps = settings.evaluation.eval_strategy == "steps"
        delay = settings.evaluation.eval_delay * (1 if is_of_steps else per_epoch or 0)
        return cls(size, per_epoch, total, *every, generate, delay)

    @property
    def num_epochs(self) -> float | None:
        """Epochs of the whole run."""
        return self.epoch_of(self.total_steps)

    def epoch_of(self, step: int) -> float | None:
        """Return the number of epochs after `step` steps."""
        return None if self.steps_per_epoch is None else step / self.steps_per_epoch

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint follows this step."""
        return step == self.total_steps or bool(self.save_every and step % self.save_every == 0)

    def evaluates_at(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return self._is_due(step, self.evaluate_every)

    def generates_at(self, step: int) -> bool:
        """Return whether answers are generated after this step."""
        return self._is_due(step, self.generate_every)

    def _is_due(self, step: int, every: int) -> bool:
        return bool(every and ((step % every == 0 and step >= self.delay) or step == self.total_steps))


class TimeBudget:
    """The time limit of a run (exit_duration_in_mins), by this rank's clock, within which the last checkpoint is saved.

    Estimates use the longest time from one step to the next, including everything in between, and the longest save.
    Before the first save, the time of loading is used instead, which moves as many bytes.

    Args:
        minutes: after `began`; None for no limit.
        began: the start of the run by `time.monotonic`, which is the same in all processes of a machine.

    Attributes:
        spent: the last result of `is_spent`.
    """

    def __init__(self, minutes: float | None, began: float) -> None:
        self.minutes = minutes
        self.spent = False
        self._began = began
        self._last: float | None = None
        self._longest_step = 0.0
        self._longest_save: float | None = None
        self._loading = 0.0

    def is_spent(self) -> bool:
        """Return whether the next step must be the last one to be saved in time. Call it before each step."""
        if self.minutes is None:
            return False
        now = time.monotonic()
        if self._last is None:
            self._loading = now - self._began
        else:
            self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        save = self._loading if self._longest_save is None else _SAVES * self._longest_save
        self.spent = now + 2 * self._longest_step + save >= self._began + 60 * self.minutes
        return self.spent

    def saved(self, seconds: float) -> None:
        """Record how long a save took. Also one in the background, since training waits for the last one."""
        self._longest_save = max(self._longest_save or 0.0, seconds)
