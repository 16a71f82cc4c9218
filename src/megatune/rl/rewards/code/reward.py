"""code_sandbox: 1 if the program in a response passes all tests of its row, else 0. docs/rl-rewards.md lists the errors
of ROLL's reward that are corrected here."""

from __future__ import annotations

import importlib.util
import itertools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatune.rl.rewards.answer import Answer, RewardError, Verdict, post_json
from megatune.rl.rewards.code.program import (
    OTHER_OUTPUT,
    Program,
    bind_response,
    find_program,
    read_text,
    same_output,
    same_value,
)
from megatune.rl.rewards.code.sandbox import PRELUDE, Job, Sandbox

CASE_SECONDS = 20.0
SECONDS = 360.0  # for all cases of a row
FUNCTION_TESTS = ("assert", "pytest", "check_based")
_WITH_TESTS = (*FUNCTION_TESTS, "text")
_HTTP_SECONDS, _HTTP_REQUESTS = 30, 8  # per case, and concurrent

Case = Mapping[str, Any]


class CodeSandbox:
    """Args:
    use_local: run programs on this machine, which supports only Python.
    code_url: URL of an HTTP sandbox, used if use_local is false.
    """

    def __init__(self, use_local: bool = True, code_url: str | None = None) -> None:
        if not use_local and not code_url:
            raise ValueError("use_local: false needs code_url, the URL of an HTTP sandbox")
        self._remote = None if use_local else HttpSandbox(code_url or "")

    def __call__(self, answer: Answer) -> Verdict:
        kind = str(answer.row.get("case_type") or "input")
        cases = read_cases(answer.row, kind)
        function = str(answer.row.get("test_case_function") or "").strip()
        function = "" if function == "None" else function
        details: dict[str, Any] = {"format": float("```" in answer.text)}
        if kind == "text":
            program: Program | None = Program(repr(read_text(answer.text)))
        else:
            program = find_program(answer.text, needs_definition=kind in FUNCTION_TESTS or bool(function))
        if program is None:
            return Verdict(0.0, 0.0, {**details, "failure": "no program"})
        if self._remote is not None:
            failure, passed = self._remote.run(program, kind, function, cases)
        elif program.language != "python":
            failure, passed = f"{program.language} is not run here", 0
        else:
            failure, passed = run_cases(program.text, kind, function, cases)
        details |= {"passed_share": passed / len(cases), **({"failure": failure} if failure else {})}
        return Verdict(float(not failure), float(not failure), details)


def read_cases(row: Mapping[str, Any], kind: str) -> list[Case]:
    """Return the tests of a row.

    Raises:
        RewardError: there are none, or they lack keys that their kind needs.
    """
    cases = row.get("test_cases")
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError as error:
            raise RewardError(f"test_cases is not valid JSON: {error}") from error
    if not isinstance(cases, Sequence) or not cases:
        raise RewardError("the row has no test_cases")
    keys = ("assert_code",) if kind in _WITH_TESTS else ("stdin", "expected_stdout")
    read = [{"assert_code": case} if isinstance(case, str) else case for case in cases]
    missing = sorted({key for case in read for key in keys if key not in case})
    if missing:
        raise RewardError(f"test_cases of case_type {kind} lack {', '.join(missing)}")
    return read


def run_cases(program: str, kind: str, function: str, cases: Sequence[Case]) -> tuple[str, int]:
    """Run a program on its tests until one fails; return the reason, "" if all passed, and the number of passed tests.

    Cases of a check have imports that precede the program, which is restarted if they change.
    """
    until, number = time.monotonic() + SECONDS, 0
    for imports, own in itertools.groupby(cases, key=lambda case: str(case.get("import_prefix") or "")):
        is_test = kind in _WITH_TESTS
        prelude = PRELUDE + imports if is_test else PRELUDE
        text = f"response = {program}" if kind == "text" else program
        with Sandbox(Job(text, prelude, "" if is_test else function), seconds=CASE_SECONDS) as sandbox:
            for case in own:
                seconds = min(CASE_SECONDS, until - time.monotonic())
                if seconds <= 0:
                    return f"the tests took longer than {SECONDS:g} seconds", number
                if failure := _run_case(sandbox, kind, function, case, seconds):
                    return failure, number
                number += 1
    return "", number


def _run_case(sandbox: Sandbox, kind: str, function: str, case: Case, seconds: float) -> str:
    if kind in _WITH_TESTS:
        test = _test(kind, case)
        if "pytest" in test and importlib.util.find_spec("pytest") is None:
            raise RewardError("the tests of this row need pytest, which is not installed")
        return sandbox.test(test, seconds).failure
    if not function:
        outcome = sandbox.read(_text(case["stdin"]), seconds)
        right = outcome.passed and same_output(outcome.stdout, _text(case["expected_stdout"]))
    else:
        try:
            arguments = [json.loads(line) for line in _text(case["stdin"]).split("\n")]
            expected = json.loads(_text(case["expected_stdout"]))
        except ValueError as error:
            raise RewardError(f"stdin and expected_stdout of a function's test are not valid JSON: {error}") from error
        outcome = sandbox.call([arguments], seconds)
        right = outcome.passed and same_value(outcome.returned[0], expected)
    return "" if right else outcome.failure or OTHER_OUTPUT


def _test(kind: str, case: Case) -> str:
    """Return the code of a test."""
    test = str(case["assert_code"])
    if kind == "text":
        return bind_response(test)
    return f"{test}\ncheck({case.get('entry_point') or 'candidate'})\n" if kind == "check_based" else test


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# Calls the function with each line of stdin as an argument and prints the result.
_CALL = """
import json, sys
_given = [json.loads(_line) for _line in sys.stdin.read().split("\\n")]
_owner = globals().get("Solution")
print(json.dumps((getattr(_owner(), {name!r}) if _owner else {name})(*_given)))
"""
# Calls the test functions, and prints a mark at the end.
_TESTS = """
for _name in [_name for _name in globals() if _name.startswith("test")]:
    if callable(globals()[_name]):
        globals()[_name]()
print()
print({mark!r})
"""


class HttpSandbox:
    """Runs programs in any language with an HTTP sandbox that has the interface of SandboxFusion's /run_code, as in
    ROLL.

    Request: {code, language, stdin, compile_timeout, run_timeout}. Reply: {status: Success | Failed | SandboxError,
    message, run_result: {stdout, stderr, return_code}}.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, program: Program, kind: str, function: str, cases: Sequence[Case]) -> tuple[str, int]:
        """Run a program on all its tests; return the first failure, "" if all passed, and the number of passed tests.

        Raises:
            RewardError: the sandbox cannot be reached, or reports its own failure.
        """
        with ThreadPoolExecutor(_HTTP_REQUESTS) as pool:
            failures = list(pool.map(lambda case: self._failure(program, kind, function, case), cases))
        return next(filter(None, failures), ""), failures.count("")

    def _failure(self, program: Program, kind: str, function: str, case: Case) -> str:
        request = _request(program, kind, function, case)
        message = {"code": request.code, "language": request.language, "stdin": request.stdin,
                   "compile_timeout": _HTTP_SECONDS, "run_timeout": _HTTP_SECONDS}  # fmt: skip
        reply = post_json(self._url, message, timeout=3 * _HTTP_SECONDS)
        status = reply.get("status") if isinstance(reply, dict) else None
        if status not in ("Success", "Failed"):
            detail = reply.get("message") if isinstance(reply, dict) else reply
            raise RewardError(f"{self._url}: {status}: {str(detail)[:200]}")
        result = reply.get("run_result") or {}
        if status == "Failed":
            error = str(result.get("stderr") or reply.get("message") or "").strip().splitlines()
            return error[-1] if error else f"ended with code {result.get('return_code')}"
        printed = str(result.get("stdout") or "").strip()
        if request.mark:
            return "" if printed.endswith(request.mark) else "it ended before its tests did"
        return "" if request.expected is None or same_output(printed, request.expected) else OTHER_OUTPUT


@dataclass(frozen=True, slots=True)
class _Request:
    """A request, and the expected output: all of it, or a mark at the end."""

    code: str
    language: str
    stdin: str = ""
    expected: str | None = None
    mark: str = ""


def _request(program: Program, kind: str, function: str, case: Case) -> _Request:
    python = program.language == "python"
    if "assert_code" not in case:
        code = program.text + (_CALL.format(name=function) if function else "")
        stdin, expected = _text(case["stdin"]), _text(case["expected_stdout"])
        return _Request(PRELUDE + code if python else code, program.language, stdin, expected)
    if kind == "text":
        return _marked(f"response = {program.text}\n{_test(kind, case)}\n")
    code = f"{case.get('import_prefix') or ''}\n{program.text}\n{_test(kind, case)}\n"
    if not python:
        return _Request(code, program.language)
    return _Request(PRELUDE + code, "pytest") if kind == "pytest" else _marked(code)


def _marked(code: str) -> _Request:
    """Add the output of a mark after the tests, so that a program that exits before them does not pass."""
    mark = secrets.token_hex(16)
    return _Request(PRELUDE + code + _TESTS.format(mark=mark), "python", mark=mark)
