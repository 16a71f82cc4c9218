"""Programs of a model: which part of a response they are, what runs them, and how they are scored."""

from __future__ import annotations

import json
import textwrap
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
from megatune.rl.pipeline.run import reward_line
from megatune.rl.rewards import answer
from megatune.rl.rewards.answer import Answer, RewardError
from megatune.rl.rewards.code.program import find_program, same_output, same_value
from megatune.rl.rewards.code.reward import CodeSandbox
from megatune.rl.rewards.code.runner import landlock_version
from megatune.rl.rewards.code.sandbox import Isolation, Job, Outcome, Sandbox, best_isolation

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
    for printed, expected in (("²", "2"), ("+-5", "5"), ("1" * 5000, "2" * 5000), ("1" * 5000, "2")):
        assert not same_output(printed, expected)
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


CHEATS = {
    "reads its caller": """
        import inspect, json, os
        def add(a, b):
            for frame in inspect.stack():
                held = {**frame.frame.f_globals, **frame.frame.f_locals}
                if "nonce" in held and "channel" in held:
                    with os.fdopen(held["channel"], "w") as result:
                        json.dump({"nonce": held["nonce"], "returned": []}, result)
            os._exit(0)
    """,
    "answers for the runner": """
        import os
        def add(a, b):
            for number in range(3, 64):
                try:
                    os.write(number, b'{"code": 0}\\n{"value": null}\\n')
                except OSError:
                    pass
            os._exit(0)
    """,
    "has its test run something": """
        import json, os
        def add(a, b):
            forged = json.dumps({"error": ["Any", "exec", ["import os; os._exit(0)"]]}) + chr(10)
            for number in range(3, 64):
                try:
                    os.write(number, forged.encode())
                except OSError:
                    pass
            os._exit(0)
    """,
    "ends its runner": """
        import os, signal
        def add(a, b):
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
    """,
    "equals everything": """
        class Any:
            def __eq__(self, other): return True
        def add(a, b): return Any()
    """,
    "redefines what tests use": """
        def all(values): return True
        def len(values): return 3
        def add(a, b): return 0
    """,
    "changes what asserts raise": """
        import builtins, sys
        builtins.AssertionError = type("Nothing", (Exception,), {})
        sys.settrace(None)
        def add(a, b): return 0
    """,
    "finds what is expected": """
        import gc
        def add(a, b):
            found = [each for each in gc.get_objects() if isinstance(each, dict) and each.get("EXPECTED")]
            return found[0]["EXPECTED"] if found else 0
    """,
}


@pytest.mark.parametrize("kind", ["assert", "pytest"])
@pytest.mark.parametrize("name", CHEATS)
def test_a_program_has_no_say_in_its_verdict(name: str, kind: str) -> None:
    tests = [{"assert_code": "EXPECTED = 30\ndef test_add():\n    assert add(10, 20) == EXPECTED\n"},
             {"assert_code": "def test_add():\n    assert all([add(1, 2) == 3]) and len('ab') == 2\n"}]  # fmt: skip
    verdict = CodeSandbox()(Answer(block(textwrap.dedent(CHEATS[name])), row=row(kind, tests)))
    assert (verdict.score, verdict.details["passed_share"]) == (0, 0)


LIBRARY = """
from collections import namedtuple
from decimal import Decimal

class Empty(ValueError): pass
class Point(namedtuple("Point", "x y")): pass

class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing is there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __iter__(self): return iter(self.items)

def order(values, key=None): values.sort(key=key)
def squares(n):
    for i in range(n): yield i * i
def ask(): print("hello " + input("who? "))
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def price(): return Decimal("1.10")
async def later(x): return x + 1
"""
USES = """
import asyncio
from decimal import Decimal
import pytest
from solution import *

class Node:
    def __init__(self, left=None, right=None): self.left, self.right = left, right

def test_objects():
    stack = Stack([1]).push(2)
    assert isinstance(stack, Stack) and len(stack) == 2 and list(stack) == [1, 2] and stack == Stack([1, 2])
    assert stack.items == [1, 2] and stack.pop() == 2 and 1 in stack
    stack.items = []
    with pytest.raises(Empty, match="nothing"): stack.pop()
    with pytest.raises(ValueError): Stack().pop()
    with pytest.raises(AttributeError): stack.missing
    assert Point(1, 2) == (1, 2) and Point(1, 2).y == 2

def test_values():
    values = [[3, 1], [2, 2]]
    order(values, key=lambda pair: pair[1])
    assert values == [[3, 1], [2, 2]]
    order(values)
    assert values == [[2, 2], [3, 1]]
    assert list(squares(4)) == [0, 1, 4, 9] and price() == Decimal("1.10")
    assert asyncio.run(later(2)) == 3
    assert depth(Node(Node(), Node(Node()))) == 3

def test_streams(capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "you")
    ask()
    assert capsys.readouterr().out == "hello you\\n"
"""


def test_a_test_uses_objects_of_the_program() -> None:
    with Sandbox(Job(LIBRARY)) as sandbox:
        assert sandbox.test(USES, 20.0).failure == ""
        assert "pytest ends" in sandbox.test(USES.replace("== 3", "== 4"), 20.0).failure


def test_cases_share_an_interpreter_and_nothing_else() -> None:
    """Each begins anew, and takes a fork's time, not that of a start."""
    program = "import os\nseen = []\ndef count(x):\n    seen.append(x)\n    return len(seen)"
    with Sandbox(Job(program)) as sandbox:
        assert [sandbox.test("assert count(1) == 1 and count(2) == 2", 10.0).failure for _ in range(20)] == [""] * 20
        assert sandbox._process.poll() is None, "one process for all"


def test_rows_without_usable_tests_are_errors() -> None:
    for fields in (row("pytest", []), row("input", [{"stdin": "1"}]), {"test_cases": "[", "case_type": "input"}):
        with pytest.raises(RewardError, match="test_cases"):
            score(CodeSandbox(), block(ADD), fields)


def isolated(program: str, seconds: float = 10.0, isolation: Isolation | None = None) -> Outcome:
    with Sandbox(Job(program), isolation, seconds) as sandbox:
        return sandbox.read("", seconds)


def test_a_run_says_what_programs_can_do() -> None:
    said = reward_line(RewardRole("code", "code_sandbox", workers=2))
    assert said.startswith(f"code_sandbox, 2 processes; programs run here: {best_isolation().text}")
    remote = RewardRole("code", "code_sandbox", arguments={"use_local": False, "code_url": "http://x"})
    assert "programs" not in reward_line(remote)


def is_running(folder: str) -> bool:
    return any(folder in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


def test_a_program_is_ended_at_its_limits() -> None:
    assert "longer than 1 " in isolated("while True: pass", 1).failure
    assert isolated("a = [0] * 10**10").failure == "MemoryError"
    assert "File too large" in isolated("open('big', 'wb').write(b'x' * 10**8)").failure
    program = "import os, time\nprint(os.getcwd(), flush=True)\nif os.fork() == 0: os.setsid()\ntime.sleep(99)"
    for isolation in {best_isolation(), Isolation()}:
        runaway = isolated(program, 3, isolation)
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
    if best_isolation().prefix:
        assert "unreachable" in isolated(connect).failure or "Permission" in isolated(connect).failure
    if landlock_version() > 0:
        for isolation in (best_isolation(), Isolation()):
            assert "Permission" in isolated(f"open({str(secret)!r})", isolation=isolation).failure
            assert "Permission" in isolated(f"import os; os.unlink({str(secret)!r})", isolation=isolation).failure
    assert secret.exists()
    assert isolated("import os; print(sorted(os.environ))").stdout.count("TOKEN") == 0


class _Sandbox(BaseHTTPRequestHandler):
    """What SandboxFusion answers, by the sandbox of this project; the first request of each server fails."""

    failures: list[int]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.failures:
            self.send_response(self.failures.pop())
            self.end_headers()
            return
        with Sandbox(Job(asked["code"], prelude="")) as sandbox:
            outcome = sandbox.read(asked["stdin"], 20.0)
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
    monkeypatch.setattr(answer, "RETRY_SECONDS", (0.01, 0.01))
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
