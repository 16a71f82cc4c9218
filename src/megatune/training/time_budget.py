"""exit_duration_in_mins: a run ends by itself, with a checkpoint, before its time is over."""

from __future__ import annotations

import time

# The last save may be slower than those before: others use the disk, too.
_SAVES = 2


class TimeBudget:
    """The time that a run may take, of this rank's clock.

    What is to come is judged by what was: the longest stretch from one step to the next, with whatever came between,
    and the longest save. Before the first save, loading stands for it, which moves as many bytes.

    Args:
        minutes: from `began` on; None for no limit.
        began: when the run was started, seconds of `time.monotonic`, which is the same in all processes of a machine.

    Attributes:
        spent: what `is_spent` has returned last.
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
        """Return whether the step that begins now must be the last, to be saved in time; call it before each."""
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
        """Note how long a save kept training waiting."""
        self._longest_save = max(self._longest_save or 0.0, seconds)
