"""An HTTP sandbox, for programs in any language: the interface of SandboxFusion's /run_code, as ROLL uses it.

Asked: {code, language, stdin, compile_timeout, run_timeout}. Answered: {status: Success | Failed | SandboxError,
message, run_result: {stdout, stderr, return_code}}.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatune.rl.rewards.answer import RewardError
from megatune.rl.rewards.code.compare import same_output
from megatune.rl.rewards.code.extract import Program
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
        code, stdin = program.text, ""
        expected: str | None = None
        language = program.language
        if kind == "text":
            code = f"response = {code}\n" + str(case["assert_code"]).replace("{response}", "response")
        elif "assert_code" in case:
            code = f"{case.get('import_prefix') or ''}\n{code}\n{case['assert_code']}\n"
            if kind == "check_based":
                code += f"check({case.get('entry_point') or 'candidate'})\n"
            language = "pytest" if kind == "pytest" else language
        if kind != "pytest" and "assert_code" in case:  # a program that exits before its tests must not pass
            expected = secrets.token_hex(16)
            code += _TESTS.format(mark=expected)
        if "assert_code" not in case:
            stdin, expected = str(case["stdin"]), str(case["expected_stdout"])
            code += _CALL.format(name=function) if function else ""
        if language in ("python", "pytest"):
            code = PRELUDE + code
        message = {"code": code, "language": language, "stdin": stdin,
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
        printed = str(result.get("stdout") or "")
        if "assert_code" in case:
            printed = printed.strip().rpartition("\n")[2]
        right = expected is None or same_output(printed, expected)
        return "" if right else "another output than expected"
