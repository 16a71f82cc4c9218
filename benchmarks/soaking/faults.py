"""The faults that strike a command: what is done to which process, when, and what the user is owed."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from megatune.training.storage.store import list_checkpoints
from soaking.command import OUTPUT, Command

_PAUSE_SECONDS = 2.0
_FULL_BYTES = 50_000, 500_000  # the largest file that a full disk still takes: less than logs have, than a model has


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: as the report has it.
        strike: does it; returns after how many seconds it was noticed, where that is not the end of the command.
        code: with which the command ends; None where it goes on.
        said: what the user is told, on stderr or stdout; "" where nobody is left to say anything.
        moment: in a step, in a save, or before the first step of a command.
        words: that the command has in addition.
        damage: done to the newest checkpoint before the command is typed again.
    """

    name: str
    strike: Callable[[Command, random.Random], float | None]
    code: int | None
    said: str = ""
    moment: Literal["step", "save", "start"] = "step"
    words: tuple[str, ...] = ()
    damage: Callable[[Path, random.Random], str] | None = None

    @property
    def is_for_any(self) -> bool:
        """Whether it may strike a command that runs already, and would start its ranks again after a crash."""
        return self.moment != "start" and not self.words and self.code not in (76, 73)


def _signal(process: psutil.Process | int, number: int) -> None:
    os.kill(process if isinstance(process, int) else process.pid, number)


def _to_rank(number: int) -> Callable[[Command, random.Random], None]:
    return lambda command, chance: _signal(chance.choice(command.ranks), number)


def _pause_rank(command: Command, chance: random.Random) -> None:
    victim = chance.choice(command.ranks)
    _signal(victim, signal.SIGSTOP)
    time.sleep(_PAUSE_SECONDS)
    _signal(victim, signal.SIGCONT)


def _to_launcher(number: int) -> Callable[[Command, random.Random], None]:
    return lambda command, chance: _signal(command.pid, number)


def _hang_up(command: Command, chance: random.Random) -> None:
    """A closed terminal tells its whole group, and so does the shell."""
    for _ in range(2):
        os.killpg(command.pid, signal.SIGHUP)


def _stopped_launcher_and(then: Callable[[Command, random.Random], None]) -> Callable[[Command, random.Random], float]:
    def strike(command: Command, chance: random.Random) -> float:
        began = time.monotonic()
        _signal(command.pid, signal.SIGSTOP)
        assert command.wait_for(lambda: "is stopped" in command.errors)
        noticed = time.monotonic() - began
        then(command, chance)
        return noticed

    return strike


def _fill_disk(command: Command, chance: random.Random) -> None:
    """No process of the run can make a file larger than so many bytes; as on a full disk, the write fails."""
    size = chance.choice(_FULL_BYTES)
    for rank in command.ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (size, size))


def _flip(checkpoint: Path, chance: random.Random) -> str:
    file = _any_file(checkpoint, chance)
    place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))
    return f"a bit of {file.relative_to(checkpoint.parent)}"


def _cut(checkpoint: Path, chance: random.Random) -> str:
    file = _any_file(checkpoint, chance)
    os.truncate(file, chance.randrange(file.stat().st_size))
    return f"the end of {file.relative_to(checkpoint.parent)}"


def _any_file(checkpoint: Path, chance: random.Random) -> Path:
    """A file of a checkpoint; each is as likely, however large."""
    return chance.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size))


def damage_newest(fault: Fault, folder: Path, chance: random.Random) -> tuple[Path | None, str]:
    """Damage the newest of at least two checkpoints, and return it and what was done."""
    checkpoints = list_checkpoints(folder / OUTPUT)
    if fault.damage is None or len(checkpoints) < 2:
        return None, ""
    return checkpoints[-1], fault.damage(checkpoints[-1], chance)


_KILLED = "was killed by SIGKILL"
_STOPPED = "stopped on request after step"
_LAUNCHER_STOPPED = "is stopped"
FAULTS = (
    Fault("SIGKILL of a rank", _to_rank(signal.SIGKILL), 76, _KILLED),
    Fault("SIGKILL of a rank in a save", _to_rank(signal.SIGKILL), 76, _KILLED, moment="save"),
    Fault("SIGKILL of a rank that starts", _to_rank(signal.SIGKILL), 76, _KILLED, moment="start"),
    Fault("SIGKILL of the launcher", _to_launcher(signal.SIGKILL), -9),
    Fault("SIGKILL of the launcher in a save", _to_launcher(signal.SIGKILL), -9, moment="save"),
    Fault("SIGKILL of the fork server", lambda command, _: _signal(command.fork_server, signal.SIGKILL), 76,
          "starts the ranks was killed by SIGKILL"),
    Fault("SIGSTOP of a rank", _to_rank(signal.SIGSTOP), 76, "its process is stopped"),
    Fault("SIGSTOP of a rank, SIGCONT after 2 s", _pause_rank, None),
    Fault("SIGSTOP of the launcher, then SIGKILL of a rank", _stopped_launcher_and(_to_rank(signal.SIGKILL)), 76,
          _LAUNCHER_STOPPED),
    Fault("SIGSTOP of the launcher, then SIGTERM", _stopped_launcher_and(_to_launcher(signal.SIGTERM)), 75,
          _LAUNCHER_STOPPED),
    Fault("SIGTERM", _to_launcher(signal.SIGTERM), 75, _STOPPED),
    Fault("SIGTERM of a rank alone", _to_rank(signal.SIGTERM), 75, _STOPPED),
    Fault("SIGHUP: a closed terminal", _hang_up, 75, _STOPPED),
    Fault("SIGINT: Ctrl-C", _to_launcher(signal.SIGINT), 130, "interrupted"),
    Fault("a file named STOP", lambda command, _: (command.folder / OUTPUT / "STOP").touch(), 75, _STOPPED),
    Fault("disk full", _fill_disk, 73, "rite"),
    Fault("SIGKILL, and a flipped bit", _to_launcher(signal.SIGKILL), -9, damage=_flip),
    Fault("SIGKILL, and a truncated file", _to_launcher(signal.SIGKILL), -9, damage=_cut),
    Fault("SIGKILL of a rank, max_restarts: 2", _to_rank(signal.SIGKILL), None, "restart 1 of 2",
          words=("max_restarts=2",)),
)  # fmt: skip
