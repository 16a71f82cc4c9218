"""A run that faults strike again and again, and whose command is typed again each time."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatune.training.storage.store import checkpoint_step, list_checkpoints
from soaking.command import OUTPUT, Command
from soaking.faults import FAULTS, Fault, damage_newest
from soaking.history import Trained, broken

_JITTER_SECONDS = 0.1  # of a moment within a step, or a save
_START_SECONDS = 2.0  # of one before the first step


@dataclass
class Struck:
    """A fault that has struck.

    Attributes:
        layout: of the command.
        step, phase: of rank 0, as its heartbeat said.
        time: seconds since the epoch.
        noticed: seconds until the command said so, or ended.
        code: the command's exit code, None where it went on.
        line: what it said.
        damaged: the checkpoint that was damaged.
    """

    fault: Fault
    attempt: int
    layout: str
    step: int
    phase: str
    time: float
    noticed: float = 0.0
    code: int | None = None
    line: str = ""
    damaged: Path | None = None


class Chain:
    """One run: its commands, and what struck them.

    Args:
        folder: has run.yaml, whose output_dir is OUTPUT.
        layouts: words of each by its name; where there are several, each command takes another one.
        steps: of the run.
        every: steps from one fault to the next, at least and at most.
        seed: of the faults, and of what chooses layouts.
        faults: all of them come before one comes again.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[str, Sequence[str]],
        steps: int,
        every: tuple[int, int],
        seed: int,
        faults: Sequence[Fault] = FAULTS,
    ) -> None:
        self.folder, self._layouts, self.steps, self._every, self._faults = folder, layouts, steps, every, faults
        self._chance = random.Random(seed)
        self._deck: list[Fault] = []
        self._layout = ""
        self._damaged: set[Path] = set()
        self._newest = 0
        self.attempts = 0
        self.checked = 0  # visible checkpoints that were read whole
        self.struck: list[Struck] = []
        self.seconds = 0.0

    def run(self) -> None:
        """Run to the end.

        Raises:
            AssertionError: a command ended otherwise than it should, or left a checkpoint that is visible and broken.
        """
        began, target, command = time.monotonic(), self._chance.randint(*self._every), None
        try:
            while target < self.steps - self._every[0]:  # there is a step to train after the last fault
                fault = self._draw(command)
                command = command or self._type(fault.words)
                self._strike(fault, command, target)
                target = self.struck[-1].step + self._chance.randint(*self._every)
                if fault.code is not None:
                    command = None
            command = command or self._type(())
            code = command.wait()
            assert code == 0, f"exit code {code}: {command.errors}"
            self._check(command)
        finally:
            if command is not None:
                command.end()
        self._say_passed_over()
        self.seconds = time.monotonic() - began

    def _draw(self, command: Command | None) -> Fault:
        """Draw the next kind, all of them before one comes again; for a command that runs, one that can strike it."""
        if not self._deck:
            self._deck = self._chance.sample(self._faults, len(self._faults))
        found = next((fault for fault in self._deck if command is None or fault.is_for_any), None)
        if found is None:
            self._deck = []
            return self._draw(command)
        self._deck.remove(found)
        return found

    def _type(self, words: Sequence[str]) -> Command:
        self._layout = self._chance.choice([name for name in self._layouts if name != self._layout] or [self._layout])
        self.attempts += 1
        return Command(self.folder, [*self._layouts[self._layout], *words], self.attempts)

    def _strike(self, fault: Fault, command: Command, target: int) -> None:
        def has_come() -> bool:
            beat = command.beat
            if beat is None or fault.moment == "start":
                return beat is not None
            saves = any((self.folder / OUTPUT).glob(".checkpoint-*.partial"))
            return beat.step >= target and (fault.moment == "step" or saves)

        assert command.wait_for(has_come), f"it ended before {fault.name}: {command.errors}"
        time.sleep(self._chance.uniform(0, _START_SECONDS if fault.moment == "start" else _JITTER_SECONDS))
        beat = command.beat
        assert beat is not None
        step = beat.step or self._newest
        struck = Struck(fault, self.attempts, self._layout, step, beat.phase, time.time())
        self.struck.append(struck)
        before, began = command.errors, time.monotonic()
        noticed = fault.strike(command, self._chance)
        if fault.code is None:
            assert command.wait_for(lambda: fault.said in command.errors), f"{fault.name}: {command.errors}"
        else:
            struck.code = command.wait()
        struck.noticed = noticed or time.monotonic() - began
        errors = command.errors.removeprefix(before)
        said = f"{fault.name} at step {step} ({beat.phase}), attempt {self.attempts}: exit {struck.code}\n{errors}"
        assert struck.code == fault.code, said
        assert fault.said in errors + command.printed, said
        lines = [line for line in errors.splitlines() if line.startswith("megatune: ")]
        lines += [line for line in command.printed.splitlines() if line.startswith("stopped on request")]
        struck.line = "; ".join(lines)
        print(f"{self.folder.name} step {step}: {fault.name} -> {struck.code}, {struck.noticed:.1f} s", flush=True)
        if fault.code is not None:
            self._check(command)
            struck.damaged, _ = damage_newest(fault, self.folder, self._chance)
            if struck.damaged is not None:
                self._damaged.add(struck.damaged)
                self._newest = min(self._newest, (checkpoint_step(struck.damaged) or 0) - 1)

    def _check(self, command: Command) -> None:
        """Read every visible checkpoint: each is whole, but for what was damaged here; and the newest is no older than
        the newest before."""
        output = self.folder / OUTPUT
        checkpoints = list_checkpoints(output)
        found = broken(output)
        self._damaged &= found.keys()  # what was replaced since, or deleted, is no longer damaged
        bad = {path.name: why for path, why in found.items() if path not in self._damaged}
        assert not bad, f"visible and broken after attempt {self.attempts}: {bad}"
        self.checked += len(checkpoints) - len(found)
        whole = [checkpoint_step(path) or 0 for path in checkpoints if path not in found]
        newest = max(whole, default=0)
        assert newest >= self._newest, f"a checkpoint is lost: {newest} after {self._newest}: {command.errors}"
        self._newest = newest

    def _say_passed_over(self) -> None:
        """Note what a later command said of a checkpoint that was damaged."""
        for struck in self.struck:
            if struck.damaged is None:
                continue
            later = (self.folder / f"attempt-{number}.out" for number in range(struck.attempt + 1, self.attempts + 1))
            lines = (line for path in later for line in path.read_text().splitlines())
            struck.line = next(line for line in lines if "passed over" in line and struck.damaged.name in line)


@dataclass(frozen=True)
class Cost:
    """What a fault took: seconds until a step was trained after it, and steps that were trained again."""

    back: float
    steps: int


def cost_of(struck: Struck, trained: Sequence[Trained]) -> Cost:
    """Find in what rank 0 has trained what a fault took."""
    first = [each for each in trained if each.rank == 0]
    own = {(each.attempt, each.process) for each in first if each.time <= struck.time}
    goes_on = struck.fault.code is None and not struck.fault.words
    begun = struck.time + struck.noticed if goes_on else struck.time
    later = next(each for each in first if each.time > begun and (goes_on or (each.attempt, each.process) not in own))
    before = [each for each in first if each.attempt == struck.attempt and each.time < later.time]
    again = before[-1].step - later.step + 1 if before and not goes_on else 0
    return Cost(later.time - struck.time, max(0, again))
