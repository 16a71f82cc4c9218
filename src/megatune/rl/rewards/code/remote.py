"""An HTTP sandbox, for programs in any language: the interface of SandboxFusion's /run_code, as ROLL uses it.

Asked: {code, language, stdin, compile_timeout, run_timeout}. Answered: {status: Success | Failed | SandboxError,
message, run_result: {stdout, stderr, return_code}}.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatune.rl.rewards.answer import RewardError
from megatune.rl.rewards.code.compare import OTHER_OUTPUT, same_output
from megatune.rl.rewards.code.extract import Program, of_text
from megatune.rl.rewards.code.sandbox import PRELUDE
from megatune.rl.rewards.http import post_json

CASE_SECONDS = 30
REQUESTS_AT_ONCE = 8

# Calls the function with each line of stdin as an argument and prints the result.
_CALL = """
import json, sys
_given = [json.loads(_line) for _line in sys.stdin.read().split("\\n")]
_owner = globals().get("Solution")
print(json.dumps((getattr(_owner(), {name!r}) if _owner else {name})(*_given)))
"""


# Calls the functions that test, and prints a mark at the end.
_TESTS = """
for _name in [_name for _name in globals() if _name.startswith("test")]:
    if callable(globals()[_name]):
        globals()[_name]()
print()
print({mark!r})
"""


class HttpSandbox:
    """Runs programs at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, program: Program, kind: str, function: str, cases: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
        """Run a program on all its tests; return why the first that failed did, "" where none did, and how many passed.

        Raises:
            RewardError: the sandbox cannot be had, or says that it failed itself.
        """
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            failures = list(pool.map(lambda case: self._failure(program, kind, function, case), cases))
        return next(filter(None, failures), ""), failures.count("")

    def _failure(self, program: Program, kind: str, function: str, case: Mapping[str, Any]) -> str:
        asked = _asked(program, kind, function, case)
        message = {"code": asked.code, "language": asked.language, "stdin": asked.stdin,
                   "compile_timeout": CASE_SECONDS, "run_timeout": CASE_SECONDS}  # fmt: skip
        reply = post_json(self._url, message, timeout=3 * CASE_SECONDS)
        status = reply.get("status") if isinstance(reply, dict) else None
        if status not in ("Success", "Failed"):
            said = reply.get("message") if isinstance(reply, dict) else reply
            raise RewardError(f"{self._url}: {status}: {str(said)[:200]}")
        result = reply.get("run_result") or {}
        if status == "Failed":
            error = str(result.get("stderr") or reply.get("message") or "").strip().splitlines()
            return error[-1] if error else f"ended with code {result.get('return_code')}"
        printed = str(result.get("stdout") or "").strip()
        if asked.mark:
            return "" if printed.endswith(asked.mark) else "it ended before its tests did"
        return "" if asked.expected is None or same_output(printed, asked.expected) else OTHER_OUTPUT


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, and what the program should print: all of it, or a mark at the end."""

    code: str
    language: str
    stdin: str = ""
    expected: str | None = None
    mark: str = ""


def _asked(program: Program, kind: str, function: str, case: Mapping[str, Any]) -> _Asked:
    python = program.language == "python"
    if "assert_code" not in case:
        code = program.text + (_CALL.format(name=function) if function else "")
        stdin, expected = str(case["stdin"]), str(case["expected_stdout"])
        return _Asked(PRELUDE + code if python else code, program.language, stdin, expected)
    test = str(case["assert_code"])
    if kind == "text":
        return _marked(f"response = {program.text}\n{of_text(test)}\n")
    if kind == "check_based":
        test += f"\ncheck({case.get('entry_point') or 'candidate'})\n"
    code = f"{case.get('import_prefix') or ''}\n{program.text}\n{test}\n"
    if not python:
        return _Asked(code, program.language)
    return _Asked(PRELUDE + code, "pytest") if kind == "pytest" else _marked(code)


def _marked(code: str) -> _Asked:
    """Let a program print a mark after its tests: one that exits before them must not pass."""
    mark = secrets.token_hex(16)
    return _Asked(PRELUDE + code + _TESTS.format(mark=mark), "python", mark=mark)
