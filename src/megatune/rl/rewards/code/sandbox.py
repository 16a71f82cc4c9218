"""Runs a program in a process of its own: limits, a session, no network, no other processes to see.

This is no boundary against a program that means harm; docs/rl-rewards.md says what it does not protect from.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from megatune.rl.rewards.answer import RewardError
from megatune.rl.rewards.code.runner import landlock_version

RUNNER = Path(__file__).with_name("runner.py")
NOBODY = 65534
OUTPUT_BYTES = 1 << 24  # of stdout, of stderr, and of any file
MEMORY_BYTES = 2 << 30
ERROR_BYTES = 400
LIMITS = {"NOFILE": 256, "NPROC": 256, "CORE": 0}

# Names that programs of contests use without importing them; a module goes before a name of the same spelling.
_MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
            "itertools", "functools", "operator", "io", "sys", "json", "typing")  # fmt: skip
_STARS = "\n".join(f"from {name} import *" for name in (*_MODULES, "builtins"))
PRELUDE = f"{_STARS}\nimport {', '.join(_MODULES)}, os, time\n"


@dataclass(frozen=True, slots=True)
class Job:
    """A program, and what is done with it.

    Attributes:
        test: run after the program, in its module, with all functions whose names start with "test"; by pytest where it
            mentions pytest.
        function: instead: called with each of `calls`; a method where the program defines a class Solution.
    """

    program: str
    prelude: str = PRELUDE
    test: str = ""
    function: str = ""
    calls: Sequence[Sequence[object]] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: it went through, with its test or calls.
        failure: "" where it did; else the last line of its error, or what ended it.
        returned: by each call.
    """

    passed: bool
    failure: str
    stdout: str
    returned: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Walls:
    """What keeps a program from the rest of the machine.

    Attributes:
        prefix: the command before Python's.
        user: that the program runs as; None: as we do.
        text: for the log.
    """

    prefix: tuple[str, ...] = ()
    user: int | None = None
    text: str = ""


def run_program(job: Job, stdin: str = "", seconds: float = 20.0, walls: Walls | None = None) -> Outcome:
    """Run a program for at most `seconds` (of wall time, and of CPU time).

    Raises:
        RewardError: it cannot be started here.
    """
    walls = walls or best_walls()
    limits = {"CPU": int(seconds) + 1, "AS": MEMORY_BYTES, "FSIZE": OUTPUT_BYTES, **LIMITS}
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="megatune-code-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        written = {**asdict(job), "limits": limits, "user": walls.user, "nonce": nonce}
        (folder / "job.json").write_text(json.dumps(written), encoding="utf-8")
        if walls.user is not None:
            for path in (folder, folder / "job.json"):
                os.chown(path, walls.user, walls.user)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            result, code = _wait(walls, folder, (given, out, errors), seconds)
            stdout, stderr = _tail(out, OUTPUT_BYTES), _tail(errors, ERROR_BYTES)
    if result.get("nonce") == nonce:
        return Outcome(True, "", stdout, tuple(result["returned"]))
    return Outcome(False, _failure(code, stderr, seconds), stdout)


def _wait(walls: Walls, folder: Path, files: tuple[Any, Any, Any], seconds: float) -> tuple[dict[str, Any], int | None]:
    """Run the runner to its end; return what it says, and its exit code, None where it took too long."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    given, out, errors = files
    with tempfile.TemporaryFile() as channel:
        python = [sys.executable, "-I", "-B", str(RUNNER), str(folder), str(channel.fileno())]
        try:
            process = subprocess.Popen(
                [*walls.prefix, *python],
                stdin=given,
                stdout=out,
                stderr=errors,
                env=environment,
                start_new_session=True,
                pass_fds=[channel.fileno()],
            )
        except OSError as error:
            raise RewardError(f"a program cannot be started: {error}") from error
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        with suppress(ProcessLookupError):  # also what it left running in its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if "--pid" not in walls.prefix:
            _end_left(str(folder))
        channel.seek(0)
        try:
            said = json.loads(channel.read(OUTPUT_BYTES) or b"{}")
        except (ValueError, RecursionError):
            said = {}
    return (said if isinstance(said, dict) and code == 0 else {}), code


def _end_left(folder: str) -> None:
    """End what a program started in sessions of its own, as far as its environment tells."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder:
                process.kill()


def _tail(file: Any, size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    text: str = file.read().decode(errors="replace")
    return text


def _failure(code: int | None, stderr: str, seconds: float) -> str:
    lines = stderr.strip().splitlines()
    if code is None:
        return f"took longer than {seconds:g} seconds"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return lines[-1][:ERROR_BYTES] if lines else f"ended with code {code}"


@lru_cache(maxsize=1)
def best_walls() -> Walls:
    """Return the strongest walls that work on this machine: it is tried once.

    `unshare` gives a network without any device and its own process numbers, whose end ends every process in it. Root
    runs a program as nobody; others in a user namespace, in which the program keeps their own rights to files. Landlock
    comes on top, in the runner, where the kernel has it.
    """
    files = "writes in its own folder only" if landlock_version() > 0 else "reads and writes what this user may"
    tries = []
    if shutil.which("unshare"):
        own = ("--pid", "--fork", "--kill-child", "--mount-proc")
        tries = [
            Walls(("unshare", "--map-root-user", "--net", *own), None, f"no network, its own processes, {files}"),
            Walls(("unshare", "--map-root-user", "--net"), None, f"no network, {files}"),
        ]
        if os.geteuid() == 0:
            text = f"no network, its own processes, {files}, as nobody"
            tries.insert(0, Walls(("unshare", "--net", *own), NOBODY, text))
    for walls in tries:
        if run_program(Job("print(6 * 7)"), seconds=20.0, walls=walls).stdout == "42\n":
            return walls
    return Walls(text=f"limits of its own process, {files}; it may have the network")
