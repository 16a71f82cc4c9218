"""Runs one program within limits; started by `sandbox` as a file of its own, with nothing else of this project.

Arguments: a folder that the program may write in, with job.json (`sandbox.Job` and what the machine adds), and the file
descriptor for the result, once the program and its test or its calls went through: {"nonce", "returned": [...]}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
import types
from typing import Any

# Landlock, of Linux: what a process may still open, for good and without rights of any kind. linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_READ = 1 << 2 | 1 << 3  # files, folders
_WRITE_FILE = 1 << 1
# Writing, and making and removing entries; then, by the version of Landlock: linking across folders, truncating.
_WRITE = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_SINCE = {2: 1 << 13, 3: 1 << 14}
_TCP, _OTHERS = 3, 3  # binding and connecting, since 4; abstract sockets and signals of other processes, since 6


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 or less: it has none."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def confine(folder: str) -> None:
    """Let this process write in a folder only, read Python and the system's libraries, and no more, where Linux can."""
    version = landlock_version()
    if version < 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    write = _WRITE | sum(bit for since, bit in _SINCE.items() if version >= since)
    rules = struct.pack("QQQ", _READ | write, _TCP if version >= 4 else 0, _OTHERS if version >= 6 else 0)
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
    """Take limits, of which none can be raised again, and the user's rights."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def run(job: dict[str, Any]) -> list[object]:
    """Run a program as the module `solution`, or as __main__ where it reads stdin; then its test, or calls of it."""
    name = "solution" if job["test"] or job["function"] else "__main__"
    module = types.ModuleType(name)
    sys.modules["solution"] = sys.modules[name] = module
    exec(compile(job["prelude"], "prelude.py", "exec"), module.__dict__)
    exec(compile(job["program"], "program.py", "exec"), module.__dict__)
    if "pytest" in job["test"]:
        _run_pytest(job["test"])
    elif job["test"]:
        before = set(vars(module))
        exec(compile(job["test"], "test.py", "exec"), module.__dict__)
        for each in [each for each in vars(module) if each.startswith("test") and each not in before]:
            if callable(vars(module)[each]):
                vars(module)[each]()
    if not job["function"]:
        return []
    owner = vars(module).get("Solution")
    function = getattr(owner(), job["function"]) if owner is not None else vars(module)[job["function"]]
    return [function(*arguments) for arguments in job["calls"]]


def _run_pytest(test: str) -> None:
    import pytest

    with open("test_program.py", "w", encoding="utf-8") as file:
        file.write(f"import solution as _solution\nglobals().update(vars(_solution))\n{test}\n")
    if code := pytest.main(["-x", "-q", "-p", "no:cacheprovider", "test_program.py"]):
        raise AssertionError(f"pytest ends with {code}")


def main() -> None:
    folder, channel = sys.argv[1], int(sys.argv[2])
    place = os.path.join(folder, "job.json")
    with open(place, encoding="utf-8") as file:
        job = json.load(file)
    os.unlink(place)
    os.chdir(folder)
    limit(job["limits"], job["user"])
    confine(folder)
    sys.setrecursionlimit(100_000)
    sys.argv[:] = ["program.py"]
    sys.path.insert(0, folder)
    nonce = job.pop("nonce")
    try:
        returned = run(job)
    except SystemExit as error:
        if job["test"] or job["function"] or error.code:  # only a program that reads stdin may end so
            raise
        returned = []
    sys.stdout.flush()
    with os.fdopen(channel, "w", encoding="utf-8") as result:
        json.dump({"nonce": nonce, "returned": returned}, result, default=_plain)


def _plain(value: Any) -> object:
    return list(value) if isinstance(value, set | frozenset) or hasattr(value, "popleft") else str(value)


if __name__ == "__main__":
    main()
