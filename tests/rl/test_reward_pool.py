"""The pool: samples in any order, rewards that raise, loop, die or print, and what is left of its processes."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from digits import make_model
from kill_kit import settings, write

from megatune.config.rl.settings import RewardRole
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.cluster import session
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.report import report_failures
from megatune.rl.reading import read_file
from megatune.rl.rewards import pool as pool_module
from megatune.rl.rewards import task
from megatune.rl.rewards.answer import Answer
from megatune.rl.rewards.pool import RewardPool, load_rewards
from megatune.rl.rewards.task import RewardSpec, Scorer, ray_scorer
from megatune.rl.samples import Problem, Response, Sample

REWARDS = """
    import os, re, signal, subprocess, sys, time

    def length(answer):
        print("a line that a reward prints")
        if answer.text == "raise":
            raise ValueError("no reward for this")
        if answer.text == "exit":
            sys.exit(3)
        if answer.text == "loop":
            open("child", "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
            while True:
                pass
        if answer.text == "loop outside of Python":
            re.match("(a+)+$", "a" * 60 + "b")
        if answer.text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if answer.text == "kill":
            os.kill(os.getpid(), 9)
        if answer.text == "kill once" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        if answer.text == "nan":
            return float("nan")
        time.sleep(0.2 * (answer.text == "slow"))
        return len(answer.text) / 4, {"bonus": answer.row["bonus"], "process": os.getpid()}

    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, answer):
            return self.factor * answer.num_tokens
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    """Ray, once for all tests here, with two machines, as it were."""
    with session.ray_session(2, 0, 256 * 2**20, tmp_path_factory.mktemp("ray")):
        yield ray_scorer(["DEFAULT", "SPREAD"])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's, in the working folder."""
    (tmp_path / "own_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return "own_rewards"


def role(function: str, workers: int = 1, **arguments: Any) -> RewardRole:
    return RewardRole("own", "python", workers=workers, function=function, arguments=arguments)


def sample(text: str, domain: str = "own") -> Sample:
    problem = Problem(text, "tag", domain, [], np.zeros(3, np.int64), {"bonus": 7})
    response = Response("r", np.zeros(5, np.int64), np.zeros(5, np.float32), "stop", ())
    return Sample(problem, 0, response, text)


async def nobody(job: RewardSpec, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
    raise AssertionError("a judge needs no process")


def scored(pool: RewardPool, samples: Iterable[Sample]) -> list[Sample]:
    """Score samples, all at once, and return them."""
    samples = list(samples)

    async def together() -> None:
        await asyncio.gather(*map(pool.score, samples))

    asyncio.run(together())
    return samples


def test_failures_are_named(scorer: Scorer, module: str, tmp_path: Path) -> None:
    texts = ["slow", "raise", "exit", "loop", "kill", "nan", "good", "kill once"]
    pool = RewardPool({"own": role(f"{module}:length", 2)}, scorer, log_dir=tmp_path / "logs", limit=5)
    found = {each.text: each for each in scored(pool, map(sample, texts))}
    counts = pool.counts["own"]
    assert [found[text].score for text in ("slow", "good", "kill once")] == [1, 1, 2.25]
    assert found["good"].details["correct"] == 1
    assert found["good"].details["bonus"] == 7
    errors = {text: found[text].details["error"] for text in texts[1:6]}
    for text, said in (("raise", "ValueError: no reward"), ("exit", "SystemExit: 3"), ("loop", "longer than 5 seconds"),
                       ("kill", "died; its output is in"), ("nan", "nan")):  # fmt: skip
        assert said in errors[text]
        assert (found[text].score, found[text].details["correct"]) == (0, 0)
    assert (counts["errors"], counts["timeouts"]) == (4, 1)
    log = (tmp_path / "logs" / "reward-own.log").read_text()
    assert "a line that a reward prints" in log
    assert "in length" in log, "the stack of what took too long"
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_math_that_takes_too_long_is_wrong_and_trained_on(scorer: Scorer, capfd: pytest.CaptureFixture[str]) -> None:
    """Its process is killed before math-verify itself gives up."""
    pool = RewardPool({"own": RewardRole("own", "math_rule")}, scorer, limit=4)
    samples = [sample(rf"\boxed{{{text}}}") for text in ("7", "(1+x)^{100000}", "7")]
    for each in samples:
        each.problem.row["ground_truth"] = "7"  # type: ignore[index]
    good, late, other = scored(pool, samples)
    assert [each.score for each in (good, late, other)] == [1, 0, 1]
    assert late.has_score
    assert pool.counts["own"] == {"timeouts": 1}
    report_failures([Group(late.problem, 0, 0, 3, samples=samples)], "are left out")
    said = "the reward of own took too long for 1 samples, which count as wrong"
    assert f"{said}; problem {late.problem.id}: the reward took longer than 4 seconds" in capfd.readouterr().out


@pytest.mark.extended("stop")
@pytest.mark.parametrize("text", ["loop outside of Python", "stop"])
def test_a_process_that_cannot_end_itself(
    scorer: Scorer, module: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It is ended from outside, and another one scores the next sample."""
    monkeypatch.setattr(task, "START_SECONDS", 30.0)
    pool = RewardPool({"own": role(f"{module}:length")}, scorer, limit=2)
    late, good = scored(pool, [sample(text), sample("good")])
    assert "longer than 2 seconds" in late.details["error"]
    assert good.score == 1


def test_a_class_takes_arguments_and_order_is_kept(scorer: Scorer, module: str) -> None:
    pool = RewardPool({"own": role(f"{module}:Scaled", factor=0.5)}, scorer)
    assert [each.score for each in scored(pool, [sample("a"), sample("b")])] == [2.5, 2.5]


def test_a_reward_that_always_fails_ends_the_run(scorer: Scorer, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_CONSECUTIVE_FAILURES", 3)
    pool = RewardPool({"own": role(f"{module}:length")}, scorer)
    with pytest.raises(MegatuneError) as raised:
        scored(pool, map(sample, ["good", "nan", "raise", "raise", "good"]))
    assert raised.value.exit_code == ExitCode.UNAVAILABLE
    assert "own failed for 3 samples in a row" in str(raised.value)


def test_what_a_pool_cannot_use_is_refused_all_at_once(module: str) -> None:
    rewards = {
        "a": RewardRole("a", "maths_rule"),
        "b": role(f"{module}:nothing"),
        "c": role(f"{module}:length", factor=2),
        "d": RewardRole("d", "crossthinkqa", arguments={"reward_type": "kind"}),
        "e": RewardRole("e", "math_rule", arguments={"code_url": "http://x"}),
    }
    with pytest.raises(MegatuneError) as raised:
        load_rewards(rewards)
    assert raised.value.exit_code == ExitCode.SETTINGS
    assert [each.where for each in raised.value.findings] == [f"rewards.{name}" for name in rewards]
    for said in ("maths_rule", "own_rewards:nothing", "takes no factor", "'kind'", "code_url"):
        assert said in str(raised.value)


def test_functions_that_cannot_be_loaded_are_named_with_their_places(module: str, tmp_path: Path) -> None:
    """And no module of a user's ends a command with a traceback."""
    (tmp_path / "broken.py").write_text("def reward(:")
    make_model(tmp_path / "model")
    file = write(tmp_path / "run.yaml", settings(tmp_path, tmp_path / "out", 1, "small"))
    words = ["rewards.digits.worker_cls=broken.reward", "advantage_function=own_rewards.nothing"]
    with pytest.raises(MegatuneError) as raised:
        read_file(str(file), words, runs=True)
    assert raised.value.exit_code == ExitCode.SETTINGS
    places = [f"{words[0]}: rewards.digits", f"{words[1]}: advantage_function"]
    assert [each.where for each in raised.value.findings] == places
    assert "SyntaxError: invalid syntax (broken.py, line 1)" in str(raised.value)


def test_a_sample_that_nobody_wants_is_not_scored(scorer: Scorer, module: str) -> None:
    """Unless it has begun; and it keeps nobody waiting."""

    async def cancelled(pool: RewardPool) -> None:
        tasks = [asyncio.create_task(pool.score(sample(text))) for text in ("slow", "kill once")]
        await asyncio.sleep(0.1)
        for each in tasks:
            each.cancel()
        await pool.score(sample("good"))

    pool = RewardPool({"own": role(f"{module}:length")}, scorer)
    asyncio.run(cancelled(pool))
    assert not Path("killed").exists()


def test_a_judge_is_asked_as_often_at_once_as_it_has_workers() -> None:
    """And one that never answers is a timeout, which keeps nobody waiting."""
    asking: list[bool] = []

    async def model(messages: list[dict[str, str]]) -> str:
        """Never answers the first four."""
        asking.append(True)
        await asyncio.sleep(600 if len(asking) <= 4 else 0)
        return "Score: 4"

    judge = RewardRole("own", "llm_judge", workers=4, arguments={"judge_model_type": "inference"})
    pool = RewardPool({"own": judge}, nobody, limit=0.5)
    pool.clients["own"] = model
    began = time.monotonic()
    found = scored(pool, map(sample, "abcdefgh"))
    assert time.monotonic() - began < 30
    assert [each.details.get("error") for each in found] == ["the reward took longer than 0.5 seconds"] * 4 + [None] * 4
    assert [each.score for each in found[4:]] == [0.4] * 4
    assert (pool.counts["own"]["timeouts"], pool.counts["own"]["errors"]) == (4, 0)
