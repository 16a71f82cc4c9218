"""Programs of a model: which part of a response they are, what runs them, and how they are scored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from megatune.config.rl.settings import RewardRole
from megatune.rl.pipeline.lines import reward_line
from megatune.rl.rewards import http
from megatune.rl.rewards.answer import Answer, RewardError
from megatune.rl.rewards.code.compare import same_output, same_value
from megatune.rl.rewards.code.extract import find_program
from megatune.rl.rewards.code.reward import CodeSandbox
from megatune.rl.rewards.code.runner import landlock_version
from megatune.rl.rewards.code.sandbox import Job, Outcome, Walls, best_walls, run_program

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
TEST = {"assert_code": "def test_add():\n    assert add(1, 2) == 3\n"}


def block(code: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{code}\n```\n"


def row(kind: str, cases: list[Any], function: str = "") -> dict[str, Any]:
    return {"case_type": kind, "test_cases": json.dumps(cases), "test_case_function": function}


def score(reward: CodeSandbox, text: str, fields: dict[str, Any]) -> float:
    return reward(Answer(text, row=fields)).score


def test_the_last_program_counts() -> None:
    text = f"Draft:\n{block(WRONG)}\nBetter:\n{block(ADD)}\nUse:\n{block('add(1, 2)')}\nPrints:\n```\n3\n```"
    program = find_program(text, needs_definition=True)
    assert program is not None
    assert program.text.strip() == ADD.strip()
    last = find_program(text, needs_definition=False)
    assert last is not None
    assert last.text.strip() == "add(1, 2)"
    cpp = find_program(block("int main() {}", "cpp"), needs_definition=False)
    assert cpp is not None
    assert cpp.language == "cpp"
    assert find_program("", needs_definition=False) is None


def test_outputs_are_compared_as_values() -> None:
    assert same_output("1.0000001  2\n\n", "1 2")
    assert not same_output("1 2 3", "1 2")
    assert not same_output("10000000001", "10000000002")  # whole numbers are no floats
    assert same_value((1, 2), [1, 2])
    assert same_value(5, [5])
    assert not same_value([1, 2], [2, 1])


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (block(ADD), row("pytest", [TEST]), 1),
        (block(WRONG), row("pytest", [TEST]), 0),
        (block("import os; os._exit(0)"), row("pytest", [TEST]), 0),
        (block(f"{ADD}\nexit()"), row("assert", ["assert add(1, 2) == 3"]), 0),
        (block(ADD), row("assert", ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]), 0),
        (
            block(ADD),
            row(
                "check_based",
                [{"assert_code": "def check(f):\n    assert f(1,\n        2) == 3", "entry_point": "add"}],
            ),
            1,
        ),
        (block("print(int(input()) + 1)"), row("input", [{"stdin": "1\n", "expected_stdout": "2"}]), 1),
        (block("print(2); exit()"), row("input", [{"stdin": "1", "expected_stdout": "2"}]), 1),
        (block("print(int(input()))"), row("input", [{"stdin": "1\n", "expected_stdout": "2"}]), 0),
        (
            block("class Solution:\n    def add(self, a, b): return (a, b)"),
            row("input", [{"stdin": "1\n[2]", "expected_stdout": "[1, [2]]"}], "add"),
            1,
        ),
        ("Say '''hi''' to me", row("text", [{"assert_code": "assert 'hi' in {response}"}]), 1),
        ("'''+open('/etc/passwd').read()+'''", row("text", ["assert {response}.startswith(chr(39) * 3)"]), 1),
        ("no program but prose", row("assert", ["assert add(1, 2) == 3"]), 0),
    ],
)
def test_programs_are_scored_by_their_tests(text: str, fields: dict[str, Any], expected: float) -> None:
    assert score(CodeSandbox(), text, fields) == expected


def test_rows_without_usable_tests_are_errors() -> None:
    for fields in (row("pytest", []), row("input", [{"stdin": "1"}]), {"test_cases": "[", "case_type": "input"}):
        with pytest.raises(RewardError, match="test_cases"):
            score(CodeSandbox(), block(ADD), fields)


def walled(program: str, seconds: float = 10.0, walls: Walls | None = None) -> Outcome:
    return run_program(Job(program), "", seconds, walls)


def test_a_run_says_what_programs_can_do() -> None:
    said = reward_line(RewardRole("code", "code_sandbox", workers=2))
    assert said.startswith(f"code_sandbox, 2 processes; programs run here: {best_walls().text}")
    remote = RewardRole("code", "code_sandbox", arguments={"use_local": False, "code_url": "http://x"})
    assert "programs" not in reward_line(remote)


def is_running(folder: str) -> bool:
    return any(folder in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


def test_a_program_is_ended_at_its_limits() -> None:
    assert "longer than 1 " in walled("while True: pass", 1).failure
    assert walled("a = [0] * 10**10").failure == "MemoryError"
    assert "File too large" in walled("open('big', 'wb').write(b'x' * 10**8)").failure
    program = "import os, time\nprint(os.getcwd(), flush=True)\nif os.fork() == 0: os.setsid()\ntime.sleep(99)"
    for walls in {best_walls(), Walls()}:
        runaway = walled(program, 3, walls)
        assert "longer than 3 " in runaway.failure
        assert runaway.stdout
        until = time.monotonic() + 60  # a kill takes a moment
        while is_running(runaway.stdout.strip()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(runaway.stdout.strip())


def test_a_program_has_no_network_and_no_files_but_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    connect = "import socket; socket.create_connection(('127.0.0.1', 9), timeout=2)"
    if best_walls().prefix:
        assert "unreachable" in walled(connect).failure or "Permission" in walled(connect).failure
    if landlock_version() > 0:
        for walls in (best_walls(), Walls()):
            assert "Permission" in walled(f"open({str(secret)!r})", walls=walls).failure
            assert "Permission" in walled(f"import os; os.unlink({str(secret)!r})", walls=walls).failure
    assert secret.exists()
    assert walled("import os; print(sorted(os.environ))").stdout.count("TOKEN") == 0


class _Sandbox(BaseHTTPRequestHandler):
    """What SandboxFusion answers, by the sandbox of this project; the first request of each server fails."""

    failures: list[int]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.failures:
            self.send_response(self.failures.pop())
            self.end_headers()
            return
        outcome = run_program(Job(asked["code"], prelude=""), asked["stdin"])
        result = {"stdout": outcome.stdout, "stderr": outcome.failure, "return_code": int(not outcome.passed)}
        body = {"status": "Success" if outcome.passed else "Failed", "run_result": result}
        if asked["language"] == "go":
            body = {"status": "SandboxError", "message": "no go here"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(failures: list[int]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Sandbox,), {"failures": failures}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run_code"
    finally:
        server.shutdown()
        server.server_close()


def test_an_http_sandbox_scores_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WAITS", (0.01, 0.01))
    asserts, given = row("assert", [TEST]), row("input", [{"stdin": "1\n", "expected_stdout": "2"}])
    with serving([503]) as url:
        remote = CodeSandbox(use_local=False, code_url=url)
        assert score(remote, block(ADD), asserts) == 1
        assert score(remote, block(WRONG), asserts) == 0  # ROLL: -1
        assert score(remote, block("exit()"), asserts) == 0
        assert score(remote, block("print(int(input()) + 1)"), given) == 1
        with pytest.raises(RewardError, match="no go here"):
            score(remote, block("x", "go"), given)
    with serving([400]) as url, pytest.raises(RewardError, match="answers 400"):
        score(CodeSandbox(use_local=False, code_url=url), block(ADD), asserts)
