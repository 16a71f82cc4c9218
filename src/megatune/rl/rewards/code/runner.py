"""Runs a program on its test cases within limits: one interpreter, from which a process is forked for every case.

Arguments: a folder that the program may write to, and one that it must not touch. stdin has JSON lines: the program
(`sandbox.Job` with limits), then one case per line. stdout gets a line for each case: {"code": exit code, negative for
a signal, null for a timeout}; the output of programs goes to files in the second folder.

A program never runs in this process, and a test runs in a process without the program (`peer`), whose exit code is the
verdict.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatune.rl.rewards.code.peer import Peer

# Linux's Landlock irrevocably restricts what a process can open, and needs no privileges. linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVS, _DUMPABLE = 1, 1, 38, 4
_READ = 1 << 2 | 1 << 3  # files, folders
_WRITE_FILE = 1 << 1
# Writing, creating and removing entries; with later versions of Landlock, linking across folders and truncating.
_WRITE = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_SINCE = {2: 1 << 13, 3: 1 << 14}
_TCP, _SCOPES = 3, 3  # bind and connect, since version 4; abstract sockets and signals to other processes, since 6


def landlock_version() -> int:
    """Return the kernel's version of Landlock, 0 or less without Landlock."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def confine(folder: str) -> None:
    """Restrict this process to writing to a folder and reading Python and system libraries, if Landlock exists."""
    version = landlock_version()
    if version < 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    write = _WRITE | sum(bit for since, bit in _SINCE.items() if version >= since)
    rules = struct.pack("QQQ", _READ | write, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(size), 0)
    readable = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc", "/proc", "/dev")
    allowed = {path: _READ for path in readable if os.path.isdir(path)}
    for path, access in {**allowed, folder: _READ | write, "/dev/null": _READ & ~(1 << 3) | _WRITE_FILE}.items():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        failed = libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, opened), 0)
        os.close(opened)
        if failed:
            raise OSError(ctypes.get_errno(), "landlock_add_rule", path)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def limit(limits: dict[str, int], user: int | None) -> None:
    """Set resource limits that cannot be raised again, and drop to a user's rights."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


class Runner:
    """Runs one program.

    Args:
        job: "program", "prelude", "function".
        folder: the program's folder.
        aside: has stdin and test.json, and gets stdout, stderr and returned.json.
    """

    def __init__(self, job: dict[str, Any], folder: str, aside: str) -> None:
        self._job, self._folder, self._aside = job, folder, aside
        self._names: dict[str, Any] = {}
        exec(compile(job["prelude"], "prelude.py", "exec"), self._names)

    def case(self, kind: str, seconds: float, calls: list[list[object]]) -> int | None:
        """Run a case in new processes; return the exit code of the one that decides, None after a timeout."""
        for name in ("stdout", "stderr", "returned.json"):
            open(os.path.join(self._aside, name), "wb").close()
        if kind == "test":
            ours, theirs = socket.socketpair()
            program = _fork(lambda: self._serve(theirs, ours), self._streams)
            theirs.close()
            decides = _fork(lambda: self._test(ours), self._streams)
            ours.close()
            children = [decides, program]
        else:
            decides = _fork(lambda: self._read(calls) if kind == "calls" else self._run("__main__"), self._streams)
            children = [decides]
        return _ended(children, seconds)

    def _streams(self) -> None:
        """Replace the pipes to the parent by files as stdin, stdout and stderr of a child."""
        append = os.O_WRONLY | os.O_APPEND
        for number, (name, flags) in enumerate((("stdin", os.O_RDONLY), ("stdout", append), ("stderr", append))):
            opened = os.open(os.path.join(self._aside, name), flags)
            os.dup2(opened, number)
            os.close(opened)
        # Python's stream objects belong to the pipes and may have buffered input.
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, mode, closefd=False), encoding="utf-8", line_buffering=number == 2)
            for number, mode in enumerate("rww")
        )

    def _run(self, name: str) -> types.ModuleType:
        """Run the program as a module."""
        confine(self._folder)
        os.chdir(self._folder)
        sys.argv[:] = ["program.py"]
        sys.path.insert(0, self._folder)
        module = types.ModuleType(name)
        sys.modules["solution"] = sys.modules[name] = module
        module.__dict__.update({key: each for key, each in self._names.items() if not key.startswith("__")})
        exec(compile(self._job["program"], "program.py", "exec"), module.__dict__)
        return module

    def _read(self, calls: list[list[object]]) -> None:
        """Call the function, and write its return values."""
        with open(os.path.join(self._aside, "returned.json"), "w", encoding="utf-8") as result:
            try:
                names = vars(self._run("solution"))
                owner, name = names.get("Solution"), self._job["function"]
                function = getattr(owner(), name) if owner is not None else names[name]
                json.dump([function(*arguments) for arguments in calls], result, default=_plain)
            except SystemExit as error:
                raise RuntimeError("the program ended before its tests did") from error

    def _serve(self, connection: socket.socket, other: socket.socket) -> None:
        """Load the program, and serve the requests of its test."""
        other.close()
        peer = Peer(connection, is_test=False)
        sys.stdout = io.StringIO()
        builtins.input = self._names["input"] = lambda prompt="": str(peer.ask("input", 0, prompt))
        try:
            module = self._run("solution")
        except BaseException as error:
            return peer.fail(error)
        own = {name: each for name, each in vars(module).items() if self._names.get(name) is not each}
        # A program's own `all` or `len` would change what a test computes.
        peer.export({name: each for name, each in own.items() if not hasattr(builtins, name)})
        peer.serve()
        return None

    def _test(self, connection: socket.socket) -> None:
        """Run the test; an exception is a failure."""
        with open(os.path.join(self._aside, "test.json"), encoding="utf-8") as file:
            test = json.load(file)
        os.chdir(self._aside)
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        names = vars(module)
        names.update({key: each for key, each in self._names.items() if not key.startswith("__")})
        names.update(Peer(connection, is_test=True).imported())
        try:
            _run_pytest(test) if "pytest" in test else _run_functions(test, names)
        except SystemExit as error:
            raise RuntimeError("a test ended itself") from error


def _fork(work: Callable[[], object], streams: Callable[[], None]) -> int:
    """Run a function in a child process with its own session; the child's exit code is 0 on success."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        streams()
        work()
        code = 0
    except SystemExit as error:  # a normal end of a program that reads stdin
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)


def _ended(children: list[int], seconds: float) -> int | None:
    """Wait for the first child, and kill all children with their sessions; return its exit code, None on timeout."""
    until, code, wait = time.monotonic() + seconds, None, 0.001
    left = set(children)
    while children[0] in left and time.monotonic() < until:
        ended, status = os.waitpid(children[0], os.WNOHANG)
        if ended:
            left.discard(ended)
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(wait)
            wait = min(wait * 1.5, 0.02)
    for child in children:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(child, signal.SIGKILL)
    for child in left:
        os.waitpid(child, 0)
    return code


def _run_functions(test: str, names: dict[str, Any]) -> None:
    """Run a test, and the functions that it defines with names that start with "test"."""
    before = set(names)
    exec(compile(test, "test.py", "exec"), names)
    for each in [each for each in names if each.startswith("test") and each not in before]:
        if callable(names[each]):
            names[each]()


def _run_pytest(test: str) -> None:
    import pytest

    with open("test_program.py", "w", encoding="utf-8") as file:
        names = "{name: each for name, each in vars(_solution).items() if not name.lower().startswith('test')}"
        file.write(f"import solution as _solution\nglobals().update({names})\n{test}\n")
    if code := pytest.main(["-x", "-q", "-p", "no:cacheprovider", "test_program.py"]):
        raise AssertionError(f"pytest ends with {code}")


def main(folder: str, aside: str) -> None:
    """Run the cases of one program."""
    job = json.loads(sys.stdin.readline())
    limit(job["limits"], job["user"])
    ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)  # programs cannot read this process's memory or files
    sys.setrecursionlimit(100_000)
    runner = Runner(job, folder, aside)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps({"code": runner.case(case["kind"], case["seconds"], case["calls"])}), flush=True)


def _plain(value: Any) -> object:
    return list(value) if isinstance(value, set | frozenset) or hasattr(value, "popleft") else str(value)
