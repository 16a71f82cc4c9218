"""Runs a program in separate processes with limits, and without network and access to other processes where possible.

This is no security boundary against malicious programs; docs/rl-rewards.md lists what it does not protect from.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import psutil

from megatune.rl.rewards.answer import RewardError
from megatune.rl.rewards.code.runner import landlock_version

PACKAGES = Path(__file__).parents[4]  # the folder with the package megatune
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from megatune.rl.rewards.code.runner import main; "
    "del sys.path[0]; main(*sys.argv[2:])"
)
START_SECONDS = 20.0  # for starting an interpreter
NOBODY = 65534
OUTPUT_BYTES = 1 << 24  # limit of stdout, of stderr, and of any file
MEMORY_BYTES = 2 << 30
ERROR_BYTES = 400
LIMITS = {"NOFILE": 256, "NPROC": 256, "CORE": 0}

# Names that contest programs use without importing them; modules take precedence over names from them.
_MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
            "itertools", "functools", "operator", "io", "sys", "json", "typing")  # fmt: skip
_STARS = "\n".join(f"from {name} import *" for name in (*_MODULES, "builtins"))
PRELUDE = f"{_STARS}\nimport {', '.join(_MODULES)}, os, time\n"


@dataclass(frozen=True, slots=True)
class Job:
    """A program.

    Attributes:
        function: the function that cases call; a method if the program defines a class Solution.
    """

    program: str
    prelude: str = PRELUDE
    function: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case.

    Attributes:
        passed: whether the program, or its test, succeeded.
        failure: "" on success; else the last line of its error, or how it ended.
        returned: return value of each call.
    """

    passed: bool
    failure: str
    stdout: str
    returned: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a program is isolated from the rest of the machine.

    Attributes:
        prefix: command that starts Python.
        user: user id of the program; None for ours.
        text: description for the log.
    """

    prefix: tuple[str, ...] = ()
    user: int | None = None
    text: str = ""


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs one program on cases sequentially, with one interpreter that is forked for each case.

    Args:
        seconds: limit of a process's CPU time.

    Raises:
        RewardError: no program can be started on this machine.
    """

    def __init__(self, job: Job, isolation: Isolation | None = None, seconds: float = 20.0) -> None:
        self._isolation = isolation or best_isolation()
        with ExitStack() as stack:
            new = partial(tempfile.TemporaryDirectory, prefix="megatune-code-", ignore_cleanup_errors=True)
            self._folder, self._aside = (Path(stack.enter_context(new())) for _ in range(2))
            for name in ("stdin", "stdout", "stderr", "returned.json"):
                (self._aside / name).touch()
            limits = {"CPU": int(seconds) + 1, "AS": MEMORY_BYTES, "FSIZE": OUTPUT_BYTES, **LIMITS}
            user = self._isolation.user
            if user is not None:
                for path in (self._folder, self._aside, *self._aside.iterdir()):
                    os.chown(path, user, user)
            self._process = self._start()
            stack.callback(self._end)
            self._send({**asdict(job), "limits": limits, "user": user})
            self._stack = stack.pop_all()

    def test(self, test: str, seconds: float) -> Outcome:
        """Run a test: code that raises if the program is wrong, and its functions with names that start with "test";
        with pytest if it mentions pytest."""
        (self._aside / "test.json").write_text(json.dumps(test), encoding="utf-8")
        return self._case("test", "", seconds)

    def read(self, stdin: str, seconds: float) -> Outcome:
        """Run the program with this stdin."""
        return self._case("stdin", stdin, seconds)

    def call(self, calls: Sequence[Sequence[object]], seconds: float) -> Outcome:
        """Call the program's function with each list of arguments."""
        return self._case("calls", "", seconds, calls)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _case(self, kind: str, stdin: str, seconds: float, calls: Sequence[Sequence[object]] = ()) -> Outcome:
        (self._aside / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        self._send({"kind": kind, "seconds": seconds, "calls": calls})
        code = self._answer(seconds + START_SECONDS)
        stdout = _tail(self._aside / "stdout", OUTPUT_BYTES)
        returned = None
        if kind == "calls" and code == 0:
            with suppress(ValueError, RecursionError):
                returned = json.loads(_tail(self._aside / "returned.json", OUTPUT_BYTES))
        if code == 0 and (kind != "calls" or isinstance(returned, list)):
            return Outcome(True, "", stdout, tuple(returned or ()))
        return Outcome(False, _failure(code, _tail(self._aside / "stderr", ERROR_BYTES), seconds), stdout)

    def _answer(self, seconds: float) -> int | None:
        """Return the exit code that the runner reports, 1 if the runner was killed by a program."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return None
        line = self._process.stdout.readline()
        code: int | None = json.loads(line)["code"] if line else 1
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self._folder),
            "TMPDIR": str(self._folder),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }
        python = [sys.executable, "-I", "-B", "-c", _MAIN, str(PACKAGES), str(self._folder), str(self._aside)]
        pipe = subprocess.PIPE
        with (self._aside / "stderr").open("ab") as errors:
            try:
                return subprocess.Popen(
                    [*self._isolation.prefix, *python],
                    stdin=pipe,
                    stdout=pipe,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise RewardError(f"a program cannot be started: {error}") from error

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` notices it
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        if "--pid" not in self._isolation.prefix:
            _end_left(str(self._folder))


def _end_left(folder: str) -> None:
    """Kill processes that a program started in other sessions, found by their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder:
                process.kill()


def _tail(path: Path, size: int) -> str:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        return file.read().decode(errors="replace")


def _failure(code: int | None, stderr: str, seconds: float) -> str:
    lines = stderr.strip().splitlines()
    if code is None:
        return f"took longer than {seconds:g} seconds"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return lines[-1][:ERROR_BYTES] if lines else f"ended with code {code}"


@lru_cache(maxsize=1)
def best_isolation() -> Isolation:
    """Return the strongest isolation that works on this machine, found by trying, once.

    `unshare` gives an empty network namespace and a PID namespace, whose end kills all of its processes. As root,
    programs run as nobody; for other users in a user namespace, with the user's rights to files. The runner adds
    Landlock if the kernel has it.
    """
    files = "writes in its own folder only" if landlock_version() > 0 else "reads and writes what this user may"
    tries = []
    if shutil.which("unshare"):
        own = ("--pid", "--fork", "--kill-child", "--mount-proc")
        tries = [
            Isolation(("unshare", "--map-root-user", "--net", *own), None, f"no network, its own processes, {files}"),
            Isolation(("unshare", "--map-root-user", "--net"), None, f"no network, {files}"),
        ]
        if os.geteuid() == 0:
            text = f"no network, its own processes, {files}, as nobody"
            tries.insert(0, Isolation(("unshare", "--net", *own), NOBODY, text))
    for isolation in tries:
        with Sandbox(Job("print(6 * 7)"), isolation) as sandbox:
            if sandbox.read("", START_SECONDS).stdout == "42\n":
                return isolation
    return Isolation(text=f"limits of its own process, {files}; it may have the network")
