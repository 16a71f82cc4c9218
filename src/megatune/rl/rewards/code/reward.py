"""code_sandbox: 1 where the program in a response passes all tests of its row, else 0.

ROLL takes the first block of code, lets a program pass that exits before its tests, passes rows without tests, runs
tests of texts within the worker itself, gives -1 by HTTP where it gives 0 locally, also for what the sandbox failed at,
and runs no more than one line of a check's asserts at a time: computed rightly here.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatune.rl.rewards.answer import Answer, RewardError, Verdict
from megatune.rl.rewards.code.compare import OTHER_OUTPUT, same_output, same_value
from megatune.rl.rewards.code.extract import Program, find_program, of_text, read_text
from megatune.rl.rewards.code.remote import HttpSandbox
from megatune.rl.rewards.code.sandbox import PRELUDE, Job, Sandbox

CASE_SECONDS = 20.0
SECONDS = 360.0  # for all cases of a row
FUNCTION_TESTS = ("assert", "pytest", "check_based")

Case = Mapping[str, Any]


class CodeSandbox:
    """Args:
    use_local: run programs here; only Python is.
    code_url: of an HTTP sandbox, used where use_local is false.
    """

    def __init__(self, use_local: bool = True, code_url: str | None = None) -> None:
        if not use_local and not code_url:
            raise ValueError("use_local: false needs code_url, of an HTTP sandbox")
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
    """Return the tests of a row, as objects.

    Raises:
        RewardError: there are none, or they lack what their kind needs.
    """
    cases = row.get("test_cases")
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except ValueError as error:
            raise RewardError(f"test_cases is not valid JSON: {error}") from error
    if not isinstance(cases, Sequence) or not cases:
        raise RewardError("the row has no test_cases")
    keys = ("assert_code",) if kind in (*FUNCTION_TESTS, "text") else ("stdin", "expected_stdout")
    read = [{"assert_code": case} if isinstance(case, str) else case for case in cases]
    missing = sorted({key for case in read for key in keys if key not in case})
    if missing:
        raise RewardError(f"test_cases of case_type {kind} lack {', '.join(missing)}")
    return read


def run_cases(program: str, kind: str, function: str, cases: Sequence[Case]) -> tuple[str, int]:
    """Run a program on its tests until one fails; return why, "" where none did, and how many passed.

    Cases of a check have imports of their own, which go before the program: it is started anew where they differ.
    """
    until, number = time.monotonic() + SECONDS, 0
    for imports, own in itertools.groupby(cases, key=lambda case: str(case.get("import_prefix") or "")):
        is_test = kind in (*FUNCTION_TESTS, "text")
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
    if kind == "text":
        return sandbox.test(of_text(str(case["assert_code"])), seconds).failure
    if kind in FUNCTION_TESTS:
        test = str(case["assert_code"])
        if "pytest" in test and importlib.util.find_spec("pytest") is None:
            raise RewardError("the tests of this row need pytest, which is not installed")
        if kind == "check_based":
            test += f"\ncheck({case.get('entry_point') or 'candidate'})\n"
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


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
