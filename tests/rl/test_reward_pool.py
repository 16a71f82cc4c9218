"""The pool: samples in any order, rewards that raise, hang, die or print, and what is left of its processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from megatune.config.rl.settings import RewardRole
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.rewards import pool as pool_module
from megatune.rl.rewards.pool import RewardPool, load_rewards
from megatune.rl.samples import Problem, Response, Sample

REWARDS = """
    import os, sys, time

    def length(answer):
        print("a line that a reward prints")
        if answer.text == "raise":
            raise ValueError("no reward for this")
        if answer.text == "exit":
            sys.exit(3)
        if answer.text == "hang":
            time.sleep(60)
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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's, in the working folder."""
    (tmp_path / "own_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    yield "own_rewards"
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in children if "megatune.rl.rewards.process" in each.cmdline()]


def role(function: str, workers: int = 1, **arguments: Any) -> RewardRole:
    return RewardRole("own", "python", workers=workers, function=function, arguments=arguments)


def sample(text: str, domain: str = "own") -> Sample:
    problem = Problem(text, "tag", domain, [], np.zeros(3, np.int64), {"bonus": 7})
    response = Response("r", np.zeros(5, np.int64), np.zeros(5, np.float32), "stop", ())
    return Sample(problem, 0, response, text)


def scored(pool: RewardPool, samples: Iterable[Sample]) -> list[Sample]:
    """Score samples, all at once, and return them."""
    samples = list(samples)

    async def together() -> None:
        await asyncio.gather(*map(pool.score, samples))

    asyncio.run(together())
    return samples


def test_failures_are_named(module: str, tmp_path: Path) -> None:
    texts = ["slow", "raise", "exit", "hang", "kill", "nan", "good", "kill once"]
    with RewardPool({"own": role(f"{module}:length", 2)}, log_dir=tmp_path / "logs", limit=8) as pool:
        found = {each.text: each for each in scored(pool, map(sample, texts))}
        counts = pool.counts["own"]
    assert [found[text].score for text in ("slow", "good", "kill once")] == [1, 1, 2.25]
    assert found["good"].details["correct"] == 1
    assert found["good"].details["bonus"] == 7
    errors = {text: found[text].details["error"] for text in texts[1:6]}
    for text, said in (("raise", "ValueError: no reward"), ("exit", "SystemExit: 3"), ("hang", "longer than 8 seconds"),
                       ("kill", "SIGKILL"), ("nan", "nan")):  # fmt: skip
        assert said in errors[text]
        assert (found[text].score, found[text].details["correct"]) == (0, 0)
    assert (counts.scored, counts.errors, counts.timeouts) == (8, 4, 1)
    assert counts.last_failure.startswith("own, problem ")
    assert "a line that a reward prints" in (tmp_path / "logs" / "reward-own.log").read_text()


def test_a_class_takes_arguments_and_order_is_kept(module: str) -> None:
    with RewardPool({"own": role(f"{module}:Scaled", factor=0.5)}) as pool:
        assert [each.score for each in scored(pool, [sample("a"), sample("b")])] == [2.5, 2.5]


def test_a_reward_that_always_fails_ends_the_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FAILURES_IN_A_ROW", 3)
    with RewardPool({"own": role(f"{module}:length")}) as pool, pytest.raises(MegatuneError) as raised:
        scored(pool, map(sample, ["good", "nan", "raise", "raise", "good"]))
    assert raised.value.exit_code == ExitCode.UNAVAILABLE
    assert "own failed for 3 samples in a row" in str(raised.value)


def test_a_process_ends_when_its_parent_does(module: str) -> None:
    script = f"""
        import asyncio, os, sys
        from test_reward_pool import role, sample, scored
        from megatune.rl.rewards.pool import RewardPool
        pool = RewardPool({{"own": role("{module}:length")}})
        print(scored(pool, [sample("good")])[0].details["process"], flush=True)
        asyncio.new_event_loop().create_task(pool.score(sample("hang")))
        os.kill(os.getpid(), 9)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    number = int(ended.stdout)
    until = time.monotonic() + 60
    while psutil.pid_exists(number) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(number)


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


def test_a_sample_that_nobody_wants_is_not_scored(module: str) -> None:
    """Unless it has begun; and it keeps nobody waiting."""

    async def cancelled(pool: RewardPool) -> None:
        tasks = [asyncio.create_task(pool.score(sample(text))) for text in ("slow", "kill once")]
        while not pool._domains["own"].busy:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await pool.score(sample("good"))

    with RewardPool({"own": role(f"{module}:length")}) as pool:
        asyncio.run(cancelled(pool))
        assert pool.counts["own"].scored == 1
    assert not Path("killed").exists()


def test_a_judge_of_the_run_is_asked_by_threads() -> None:
    asking = threading.Semaphore(0)

    def model(messages: list[dict[str, str]], limit: float) -> str:
        """Answers once four ask."""
        asking.release()
        while asking._value < 4:
            time.sleep(0.01)
        return "Score: 4"

    judge = RewardRole("own", "llm_judge", workers=4, arguments={"judge_model_type": "inference"})
    with RewardPool({"own": judge}) as pool:
        pool.clients["own"] = client = mock.Mock(side_effect=model)
        assert [each.score for each in scored(pool, map(sample, "abcdefgh"))] == [0.4] * 8
    client.close.assert_called_once()
