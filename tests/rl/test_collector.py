"""Which groups a step takes, whatever is finished first; what is dropped, what is too old, what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits import with_samples

from megatune.config.rl.rollout import Generating, GroupFilter
from megatune.errors import MegatuneError
from megatune.rl.pipeline.collector import Collector, passes
from megatune.rl.pipeline.files import record_step, replay_step
from megatune.rl.pipeline.groups import Group, RequestBuilder, sample_index, seed_of
from megatune.rl.pipeline.learn import log_probs_of_version
from megatune.rl.pipeline.report import pass_at_k, sample_metrics, validation_metrics
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.samples import Problem, Request, Response, Sample
from megatune.training.storage.files import read_json_lines

SAMPLING = RequestBuilder(Generating(temperature=1.0, top_p=1.0, top_k=0), seed=1, response_length=8)


def _filter(kind: Any, **bounds: float) -> GroupFilter:
    return GroupFilter(type=kind, filter_args=bounds)


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    """Runs coroutines in one loop, as the driver does."""
    with asyncio.Runner() as runner:
        yield runner.run


class Engines:
    """`EngineGroup` that samples a token of each group at a time.

    Args:
        delay: turns of the loop that a token of a group takes, by its number.
    """

    def __init__(self, delay: Callable[[int], int] = lambda number: 1) -> None:
        self.delay, self.version, self.seen = delay, 1, list[Request]()
        self.in_flight = self.aborted = 0

    async def generate(self, requests: Sequence[Request]) -> list[Response]:
        self.seen += requests
        self.in_flight += 1
        aborted, version, number = self.aborted, self.version, int(requests[0].id.split("-")[1])
        ids = {request.id: request.response_ids.tolist() for request in requests}

        def has_ended(request: Request) -> bool:
            return len(ids[request.id]) > request.seed % 5

        while self.aborted == aborted and not all(map(has_ended, requests)):
            for _ in range(self.delay(number)):
                await asyncio.sleep(0)
            for request in requests:
                if not has_ended(request):
                    ids[request.id].append(request.seed % 7)  # a response says which seed it has
        self.in_flight -= 1
        return [
            _response(
                each.id,
                ids[each.id],
                "stop" if has_ended(each) else "abort",
                (*each.versions, (len(each.response_ids), version)),
            )
            for each in requests
        ]

    async def abort(self) -> None:
        self.aborted += 1
        while self.in_flight:
            await asyncio.sleep(0)


class Scores:
    """`RewardPool`: a score is the sum of a response's tokens.

    Attributes:
        may: scores are given while it is set.
        asked: samples that are scored now.
    """

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()
        self.asked: list[Sample] = []

    async def score(self, sample: Sample) -> None:
        self.asked.append(sample)
        await self.may.wait()
        self.asked.remove(sample)
        sample.score = float(sample.response.response_ids.sum())


async def _moments(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def _response(key: str, ids: list[int], finish: Any, versions: Any) -> Response:
    return Response(key, np.array(ids, np.int64), np.full(len(ids), -0.25, np.float32), finish, versions)


def _problem(domain: str, index: int) -> Problem:
    return Problem(f"{domain}{index}", domain, domain, [], np.array([1, 2]), {})


def _sampler(engines: Engines, scores: Scores) -> Sampler:
    return Sampler(engines, scores, SAMPLING, str, None)  # type: ignore[arg-type]


def _collector(engines: Engines, scores: Scores, **changes: Any) -> Collector:
    filters = {"a": _filter("std_filter", std_threshold=0.0), "b": GroupFilter()}
    return Collector(_sampler(engines, scores), _problem, {"a": 3, "b": 1}, filters, 2, **changes)


def test_the_reward_before_the_filter_is_known(run: Any) -> None:
    collector, taken = _collector(Engines(), Scores()), None
    while taken is None or not taken.num_dropped:
        taken = run(collector.take())
    assert len(taken.dropped_scores) == 2 * taken.num_dropped
    kept = [sample.score for group in taken.groups for sample in group.samples]
    found = sample_metrics(taken, 1)
    assert found["reward"] == pytest.approx(np.mean(kept))
    assert found["reward_unfiltered"] == pytest.approx(np.mean([*kept, *taken.dropped_scores]))


async def _step(collector: Collector) -> list[tuple[str, list[float]]]:
    taken = await collector.take()
    return [(group.problem.id, group.scores.tolist()) for group in taken.groups]


def test_a_synchronous_step_does_not_depend_on_timing(run: Any) -> None:
    runs = []
    for delay, extra in ((lambda number: 1, 0), (lambda number: 40 // (1 + number), 0), (lambda number: number, 2)):
        collector = _collector(Engines(delay), Scores(), extra=extra)
        runs.append([run(_step(collector)) for _ in range(3)])
    assert runs[0] == runs[1] == runs[2]
    groups = [group for step in runs[0] for group in step]
    assert len({name for name, _ in groups}) == 12
    assert all(scores[0] != scores[1] for name, scores in groups if name[0] == "a")  # the others were dropped
    assert [name for name, _ in groups if name[0] == "b"] == ["b0", "b1", "b2"]


def test_a_checkpoint_goes_on_where_the_run_was(run: Any) -> None:
    whole = _collector(Engines(), Scores())
    expected = [run(_step(whole)) for _ in range(3)]
    collector = _collector(Engines(), Scores())
    assert run(_step(collector)) == expected[0]
    run(collector.pause())
    state = json.loads(json.dumps(collector.state({})))
    resumed = _collector(Engines(lambda number: 40 // (1 + number)), Scores())
    resumed.load_state(state, {})
    assert [run(_step(resumed)), run(_step(resumed))] == expected[1:]


def test_an_asynchronous_run_keeps_what_it_has_begun_and_samples_anew_what_is_too_old(run: Any) -> None:
    engines = Engines()
    collector = _collector(engines, Scores(), ratio=1.0)
    first = run(_step(collector))
    run(collector.pause())
    state = json.loads(json.dumps(collector.state({})))
    begun = [group for domain in state.values() for group in [*domain["under_way"], *domain["ready"]]]
    assert len(begun) >= 4  # of the next step
    assert any(group["responses"] for group in begun)
    other = _collector(engines, Scores(), ratio=1.0)
    other.load_state(state, {})
    engines.version = 2
    assert not {name for name, _ in run(_step(other))} & {name for name, _ in first}
    engines.version = 4
    run(other.pause())
    other.regenerate_stale(4, 4)
    taken = run(other.take())
    assert all((group.oldest_version or 0) >= 3 for group in taken.groups)
    assert taken.num_stale > 0
    assert any(request.id.endswith("-1") for request in engines.seen)


def test_a_sync_waits_for_no_score(run: Any) -> None:
    """What is scored meanwhile is kept, or sampled again where it is too old then; a checkpoint has it, too."""
    engines, scores = Engines(), Scores()
    scores.may.clear()
    collector = _collector(engines, scores, ratio=1.0)
    run(_until(collector, lambda: len(scores.asked) == 16))
    run(collector.pause())
    scored = {id(sample) for sample in scores.asked}
    routing: dict[str, np.ndarray] = {}
    group = next(iter(collector._domains["b"].under_way.values()))
    group.responses[0] = replace(group.responses[0], routing=np.ones((2, 3, 1), np.int16))
    state = json.loads(json.dumps(collector.state(routing)))
    assert [array.shape for array in routing.values()] == [(2, 3, 1)]
    resumed = _collector(other := Engines(), Scores(), ratio=1.0)
    resumed.load_state(state, routing)
    taken = run(resumed.take())
    assert len(taken.groups) == 4
    assert {group.oldest_version for group in taken.groups} == {1}
    sampled = {int(request.id.split("-")[1]) for request in other.seen}
    assert sampled.isdisjoint({0, 1, 2, 3, 4, 6, 8, 10}), "they are only scored again"
    engines.version = 4
    collector.regenerate_stale(4, 4)
    scores.may.set()
    taken = run(collector.take())
    assert taken.num_stale == 8
    assert not {id(sample) for group in taken.groups for sample in group.samples} & scored
    assert all((group.oldest_version or 0) >= 3 for group in taken.groups)


async def _until(collector: Collector, is_so: Callable[[], bool]) -> None:
    """Let a step be taken until something is so."""
    taking = asyncio.create_task(collector.take())
    while not is_so():
        await asyncio.sleep(0)
    taking.cancel()


def test_a_synchronous_run_waits_for_no_long_group_that_it_carries(run: Any) -> None:
    """It continues with the next weights, from where it was, and begins anew where it is too old."""
    slow = {1}  # b0: the numbers of two domains alternate
    engines = Engines(lambda number: 10**4 if number in slow else 1)
    collector = _collector(engines, Scores(), extra=4, carried=1)
    taken = run(collector.take())
    assert 1 not in {group.number for group in taken.groups}
    assert not engines.in_flight
    sampled = len(engines.seen)
    collector.resume()
    run(_moments(100))
    assert len(engines.seen) == sampled, "nothing is sampled while the trainer works"
    engines.version = 2
    collector.regenerate_stale(2, 2)
    part = collector._domains["b"].under_way[0]
    part.responses = {0: _response("train-1-0-0", [6], "abort", ((0, 1),))}
    state = json.loads(json.dumps(collector.state({})))
    slow.clear()
    collector._domains["b"].ready.clear()
    (group,) = (group for group in run(collector.take()).groups if group.problem.domain == "b")
    assert group.number == 1
    assert group.responses[0].versions[:2] == ((0, 1), (1, 2))
    assert group.responses[0].response_ids[0] == 6
    late = _collector(engines, Scores(), extra=4, carried=1)
    for record in state["b"]["under_way"]:  # as an older version wrote it
        record["parts"] = [each for each in record["responses"] if each[1]["finish"] == "abort"]
        record["responses"] = [each for each in record["responses"] if each not in record["parts"]]
    late.load_state(state, {})
    late.regenerate_stale(3, 1)
    assert late._domains["b"].under_way[0].responses, "the engines have no newer weights"
    engines.version = 3
    late.regenerate_stale(3, 3)
    assert all((group.oldest_version or 0) >= 2 for group in run(late.take()).groups)


def test_the_next_step_is_sampled_while_the_trainer_works(run: Any) -> None:
    """And nothing is, while it does, in a synchronous run: nor is anything left in flight."""
    for ratio, sampled in ((0.0, 0), (1.0, 8)):
        engines = Engines()
        collector = _collector(engines, Scores(), ratio=ratio)
        run(collector.take())
        assert ratio or not engines.in_flight
        run(_moments(100))
        assert len(collector._domains["a"].ready) + len(collector._domains["b"].ready) == sampled
        assert len(engines.seen) == 2 * (4 + sampled) or not ratio


def test_recorded_rollouts_are_replayed_with_any_text(tmp_path: Path) -> None:
    """Also with what ends a line elsewhere than in JSON lines."""
    problem, text = _problem("a", 0), "one\u2028two\x85three\x0cfour"
    group = Group(problem, 3, 3, 1)
    group.responses = {0: _response("a-0", [5, 6], "stop", ((0, 1),))}
    record_step(tmp_path, 1, [with_samples(group, [text])])
    (again,) = replay_step(tmp_path, 1, {("a", problem.id): problem})
    assert [sample.text for sample in again.samples] == [text]
    assert [record["number"] for record in read_json_lines(tmp_path / "rollouts-000001.jsonl")] == [3]


def test_a_part_goes_on_with_what_it_has(run: Any) -> None:
    engines = Engines(lambda number: 3)
    sampler = _sampler(engines, Scores())
    group = Group(_problem("a", 0), 3, 0, 4)

    async def paused() -> None:
        task = asyncio.create_task(sampler.finish(group))
        await _moments(3)
        await sampler.pause()
        engines.version = 2
        await _moments(30)
        assert len(engines.seen) == 4
        sampler.resume()
        await task

    run(paused())
    again = {sample_index(request.id): request for request in engines.seen[4:]}
    assert again
    assert all(len(request.response_ids) == 1 for request in again.values())
    assert all(request.seed == seed_of(1, "train", 3, place, 0) for place, request in again.items())
    assert all(group.responses[place].versions == ((0, 1), (1, 2)) for place in again)


def test_a_run_that_drops_every_group_ends(run: Any) -> None:
    never = {"a": _filter("mean_filter", threshold_down=1e9)}
    collector = Collector(_sampler(Engines(), Scores()), _problem, {"a": 2}, never, 2)
    with pytest.raises(MegatuneError, match="drops nearly every group"):
        run(collector.take())


@pytest.mark.parametrize(
    ("rule", "scores", "kept"),
    [
        (_filter("mean_filter", threshold_up=0.9, threshold_down=0.1), [1, 0], True),
        (_filter("mean_filter", threshold_up=0.9, threshold_down=0.5), [1, 0], False),  # at a bound
        (_filter("std_filter", std_threshold=0), [1, 1], False),
        (_filter("std_filter", std_threshold=0), [0.1] * 6, False),  # whose computed deviation is 1.5e-17
        (_filter("std_filter", std_threshold=0.7), [1, 0], True),  # of n - 1: 0.707
        (_filter("mean_filter", threshold_up=0.9, threshold_down=0.1), [1], True),  # a single sample
        (_filter("std_filter", std_threshold=0), [1, 1, None], False),  # None: its reward failed
        (_filter("mean_filter", threshold_up=0.9, threshold_down=0.5), [1, 0.4, None], True),
        (
            _filter("mean_filter", threshold_up=0.9, threshold_down=0.1),
            [0.5, None],
            False,
        ),
    ],
)
def test_filters(rule: GroupFilter, scores: list[float | None], kept: bool) -> None:
    group = Group(_problem("a", 0), 0, 0, len(scores))
    group.responses = {place: _response(str(place), [1], "stop", ()) for place in range(len(scores))}
    for sample, score in zip(with_samples(group, ["x"] * len(scores)).samples, scores, strict=True):
        sample.score, sample.details = (score, {}) if score is not None else (0.0, {"error": "it raised"})
    assert passes(rule, group) is kept


def test_pass_at_k() -> None:
    group = Group(_problem("a", 0), 0, 0, 4)
    group.responses = {place: _response(str(place), [1, 2], "stop", ()) for place in range(4)}
    for place, sample in enumerate(with_samples(group, ["x"] * 4).samples):
        sample.details = {"correct": float(place == 0)}
    assert [pass_at_k(group, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    found = validation_metrics([group])
    assert (found["accuracy"], found["pass@2"], found["pass@4"]) == (0.25, 0.5, 1.0)


def test_tokens_of_other_weights_are_left_out() -> None:
    response = Response("x", np.arange(4), np.array([-1, -2, -3, -4], np.float32), "stop", ((0, 1), (1, 2), (3, 4)))
    assert np.array_equal(
        log_probs_of_version(response, 2), np.array([np.nan, -2, -3, np.nan], np.float32), equal_nan=True
    )
