"""Engines that run by themselves: which engine gets which group, in how many calls, and what comes back of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatune.config.rl.rollout import Generating, GroupFilter
from megatune.config.rl.settings import InferRole, ModelRole
from megatune.config.settings import Settings
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.environments import OBSERVATION
from megatune.rl.pipeline.collector import Collector
from megatune.rl.pipeline.groups import RequestBuilder
from megatune.rl.pipeline.roles import EngineGroup, ModelGroup
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.rollout.server import EngineServer
from megatune.rl.samples import Problem, Request, Response, Sample

ROLE = InferRole(device_mapping=[0], model_name_or_path="model")


def _requests(group: int, count: int, tokens: int = 3) -> list[Request]:
    return [Request(f"train-{group}-{place}-0", np.array([1]), 0, tokens) for place in range(count)]


def _response(request: Request, tokens: int, finish: Any = "stop") -> Response:
    ids, log_probs = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
    return Response(request.id, ids, log_probs, finish, ((0, 1),), observed=request.observed)


class Engine:
    """A `RolloutEngine` that samples a token a step, once it may."""

    def __init__(self) -> None:
        self.flight: dict[str, tuple[Request, int]] = {}
        self.submitted: list[list[str]] = []
        self.may, self.threads, self.error = threading.Event(), set[int](), ""

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted.append([request.id for request in requests])
        self.flight |= {request.id: (request, 0) for request in requests}

    def step(self) -> list[Response]:
        self.threads.add(threading.get_ident())
        if self.error:
            raise RuntimeError(self.error)
        if not self.may.wait(0.01):
            return []
        self.flight = {key: (request, tokens + 1) for key, (request, tokens) in self.flight.items()}
        ended = [pair for pair in self.flight.values() if pair[1] == pair[0].max_new_tokens]
        return [_response(*self.flight.pop(request.id)) for request, _ in ended]

    def abort(self) -> list[Response]:
        flight, self.flight = self.flight, {}
        return [_response(request, tokens, "abort") for request, tokens in flight.values()]

    def sleep(self, level: int) -> int:
        self.threads.add(threading.get_ident())
        return level


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine: Engine, tmp_path: Path) -> EngineServer:
    context = RankContext(RankEnv(0, 0, 1, 1, "127.0.0.1", 1, 0), tmp_path)
    return EngineServer(context, lambda: engine, _decode)  # type: ignore[arg-type, return-value]


def _decode(ids: np.ndarray) -> str:
    assert isinstance(ids, np.ndarray)  # of a list Transformers looks at each id in Python
    return f"{len(ids)} tokens"


def test_calls_of_a_burst_begin_together_and_in_order(engine: Engine, server: EngineServer) -> None:
    engine.may.set()
    third = server.ask("generate", 3, 3, _requests(3, 1, tokens=1))
    first = server.ask("generate", 1, 3, _requests(1, 2))
    assert server.ask("sleep", 1).result(60) == 1
    assert not engine.submitted
    second = server.ask("generate", 2, 3, _requests(2, 2))
    assert [len(each.result(60)) for each in (first, second, third)] == [2, 2, 1]
    assert engine.submitted == [["train-1-0-0", "train-1-1-0", "train-2-0-0", "train-2-1-0", "train-3-0-0"]]
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_an_abort_returns_what_there_is_also_of_calls_that_arrive_later(engine: Engine, server: EngineServer) -> None:
    first, second = (server.ask("generate", number, 2, _requests(number, 2)) for number in (1, 2))
    held = server.ask("generate", 4, 4, _requests(4, 2))  # the third has not arrived
    server.ask("abort", 4).result(60)
    assert [(each.finish, each.texts) for call in (first, second) for each in call.result(60)] == [("abort", ())] * 4
    assert held.result(60) == server.ask("generate", 3, 4, _requests(3, 2)).result(60) == []
    engine.may.set()
    assert [len(each.response_ids) for each in server.ask("generate", 5, 5, _requests(5, 1)).result(60)] == [3]


def test_the_engine_decodes_what_has_ended(engine: Engine, server: EngineServer) -> None:
    """Each turn of the model, and the whole response."""
    engine.may.set()
    first, second = _requests(1, 2, tokens=5)
    turns = replace(second, observed=((2, 4),))
    found = server.ask("generate", 1, 1, [first, turns]).result(60)
    assert [each.texts for each in found] == [("5 tokens",) * 2, ("2 tokens", "1 tokens", "5 tokens")]


def test_what_an_engine_raises_answers_its_calls(engine: Engine, server: EngineServer) -> None:
    calls = [server.ask("generate", number, 2, _requests(number, 1)) for number in (1, 2)]
    engine.error = "no more memory"
    for call in calls:
        with pytest.raises(RuntimeError, match="no more memory"):
            call.result(60)
    with pytest.raises(AttributeError, match="dance"):
        server.ask("dance").result(60)


def test_an_engine_that_cannot_be_built_says_so(tmp_path: Path) -> None:
    def build() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineServer(RankContext(RankEnv(0, 0, 1, 1, "127.0.0.1", 1, 0), tmp_path), build)


class Actors:
    """`RoleGroup` of any number of engines, or trainers, that take their time.

    Attributes:
        calls: how often each method was called.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, tokens: Callable[[Request], int]) -> None:
        self.size, self.loop, self.run, self._tokens = size, loop, loop.run_until_complete, tokens
        self.calls, self.given = Counter[str](), list[tuple[int, int, int, list[str]]]()
        self.loads, self.most = [0] * size, 0
        self.aborts = [asyncio.Event() for _ in range(size)]
        self.name, self.present, self.losses = "actor_infer", {*range(size)}, [0] * size
        self.on_loss: Callable[[int], None] = lambda rank: None

    @property
    def ranks(self) -> list[int]:
        return sorted(self.present)

    def lose(self, rank: int) -> None:
        """Let an engine be gone: its calls have no answers."""
        self.present.discard(rank)
        self.losses[rank] += 1
        self.on_loss(rank)

    async def restart(self, rank: int) -> bool:
        self.calls["restart"] += 1
        await asyncio.sleep(0.01)
        return True

    def admit(self, rank: int) -> None:
        self.present.add(rank)

    async def start_one(self, rank: int, method: str, number: int, last: int, requests: list[Request]) -> Any:
        self.calls[method] += 1
        self.given.append((rank, number, last, [request.id for request in requests]))
        self.loads[rank] += len(requests)
        self.most = max(self.most, self.loads[rank])
        told, losses = self.aborts[rank], self.losses[rank]
        for _ in range(max(map(self._tokens, requests))):
            if told.is_set() or self.losses[rank] > losses:
                break
            await asyncio.sleep(0)
        self.loads[rank] -= len(requests)
        if self.losses[rank] > losses:
            return []
        return [[_response(each, 2, "abort" if told.is_set() else "stop") for each in requests]]

    async def start_each(self, method: str, arguments: list[tuple[int]]) -> None:
        assert method == "abort"
        for rank, told in enumerate(self.aborts):
            told.set()
            self.aborts[rank] = asyncio.Event()
        for _ in range(10):  # what it ends may come before its own answer
            await asyncio.sleep(0)

    def call(self, method: str, *args: object) -> list[Any]:
        self.calls[method] += 1
        self.run(asyncio.sleep(0.2))
        return [None] * self.size


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def test_the_engine_with_the_fewest_requests_takes_the_next_group_in_one_call(loop: Any) -> None:
    actors = Actors(2, loop, lambda request: 50)
    engines = EngineGroup(ROLE, actors, max_running=3)  # type: ignore[arg-type]

    async def sampled() -> Any:
        sizes = (2, 4, 2, 2, 4, 9)
        return await asyncio.gather(*(engines.generate(_requests(number, size)) for number, size in enumerate(sizes)))

    assert [len(each) for each in loop.run_until_complete(sampled())] == [2, 4, 2, 2, 4, 9]
    # Twice as many as an engine samples at once; a group that is larger than that has an engine for itself.
    assert [(rank, number, last, len(ids)) for rank, number, last, ids in actors.given] == [
        (0, 1, 3, 2), (0, 2, 3, 2), (0, 3, 3, 2), (1, 1, 1, 4), (0, 4, 4, 4), (1, 2, 2, 9),
    ]  # fmt: skip


def test_an_abort_ends_what_is_in_flight_and_what_waits(loop: Any) -> None:
    actors = Actors(1, loop, lambda request: 10**9)
    engines = EngineGroup(ROLE, actors, max_running=1)  # type: ignore[arg-type]

    async def aborted() -> Any:
        calls = asyncio.gather(*(engines.generate(_requests(number, 2)) for number in range(3)))
        await asyncio.sleep(0.01)
        assert actors.calls["generate"] == 1
        await engines.abort()
        assert engines._loads == [0]
        return await calls

    found = loop.run_until_complete(aborted())
    assert [[response.finish for response in each] for each in found] == [["abort", "abort"], [], []]


def test_what_a_lost_engine_had_begun_is_sampled_by_the_others(loop: Any, capsys: Any) -> None:
    """It takes part again once it was started again and has weights, and counts its calls from the beginning."""
    actors = Actors(2, loop, lambda request: 50)
    engines = EngineGroup(ROLE, actors, max_running=2)  # type: ignore[arg-type]

    async def struck() -> Any:
        calls = asyncio.gather(*(engines.generate(_requests(number, 2)) for number in range(4)))
        while len(actors.given) < 4:
            await asyncio.sleep(0)
        actors.lose(1)
        return await calls

    found = engines.run(struck())
    assert [[response.id for response in each] for each in found] == [
        [request.id for request in _requests(number, 2)] for number in range(4)
    ]
    assert {rank for rank, *_ in actors.given[4:]} == {0}
    engines.run(asyncio.sleep(0.05))
    assert engines.admit()
    engines.run(engines.generate(_requests(4, 2)))
    assert actors.given[-1][0] == 0, "it has no weights yet"
    engines.mark_updated()
    engines.run(asyncio.wait_for(asyncio.gather(*map(engines.generate, map(_requests, (5, 6), (2, 2)))), 5))
    assert {(rank, number) for rank, number, *_ in actors.given[-2:]} >= {(1, 1)}
    assert capsys.readouterr().out == "actor_infer-1 was started again, has the weights, and samples\n"


@pytest.mark.parametrize("static_weights", [False, True])
def test_without_an_engine_left_what_is_asked_waits_for_one(loop: Any, static_weights: bool) -> None:
    actors = Actors(1, loop, lambda request: 50)
    engines = EngineGroup(ROLE, actors, max_running=2, static_weights=static_weights)  # type: ignore[arg-type]
    filled = list[int]()

    def refill() -> None:
        filled.append(len(actors.ranks))
        engines.wake()
        engines.mark_updated()

    async def struck() -> Any:
        call = asyncio.ensure_future(engines.generate(_requests(0, 2)))
        while not actors.given:
            await asyncio.sleep(0)
        actors.lose(0)
        return await call

    engines.resend_weights = refill
    assert len(engines.run(struck())) == 2
    assert filled == ([] if static_weights else [1])


class Pool:
    """Scores at once; every third problem has two turns."""

    async def score(self, sample: Sample) -> None:
        sample.score = float(sample.group % 5)
        if sample.problem.row["index"] % 3 == 0 and len(sample.turns) < 2:
            sample.details = {OBSERVATION: "more"}


def _extend(problem: Problem, response: Response, observation: str) -> Response:
    return Response(
        response.id, np.zeros(4, np.int64), np.zeros(4, np.float32), "abort", response.versions, observed=((2, 4),)
    )


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_64_engines_get_a_call_a_group_and_turn(loop: Any, ratio: float) -> None:
    """Whatever the tokens are; the trainers one call each. An asynchronous run samples while they work."""
    actors = Actors(64, loop, lambda request: 200)
    trainers = Actors(8, loop, lambda request: 0)
    role = ModelRole(name="actor_train", device_mapping=[*range(8)], settings=Settings(), training=True)
    engines = EngineGroup(ROLE, actors, max_running=16)  # type: ignore[arg-type]
    policy = ModelGroup(role, trainers)  # type: ignore[arg-type]
    sampling = RequestBuilder(Generating(), seed=1, response_length=8)
    asked = list[int]()

    def problem_at(domain: str, index: int) -> Problem:
        asked.append(index)
        return Problem(str(index), "", domain, [], np.array([1]), {"index": index})

    sampler = Sampler(engines, Pool(), sampling, _decode, _extend)  # type: ignore[arg-type]
    collector = Collector(sampler, problem_at, {"a": 256}, {"a": GroupFilter()}, 8, ratio)
    for step in range(2):
        taken = engines.run(collector.take())
        assert len(taken.groups) == 256
        before = actors.calls["generate"]
        policy.call("train", step)
        assert (actors.calls["generate"] > before) == bool(ratio)
    turns = [1 + (index % 3 == 0) for index in asked]
    assert set(actors.calls) == {"generate"}
    assert actors.calls["generate"] <= sum(turns) if ratio else actors.calls["generate"] == sum(turns)
    assert trainers.calls == {"train": 2}
    assert actors.most <= 32
    assert Counter(rank for rank, *_ in actors.given).keys() == set(range(64))
