"""Which groups a step takes, whatever is finished first; what is dropped, what is too old, what a checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from digits import with_samples

from megatune.config.rl.data import GroupFilter
from megatune.config.rl.rollout import Generating
from megatune.errors import MegatuneError
from megatune.rl.pipeline.collector import Collector, passes
from megatune.rl.pipeline.groups import Group, Sampling, place_of, seed_of
from megatune.rl.pipeline.learn import sampled_by
from megatune.rl.pipeline.report import sample_metrics
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.pipeline.validation import pass_at_k, validation_metrics
from megatune.rl.samples import Problem, Request, Response

SAMPLING = Sampling(Generating(temperature=1.0, top_p=1.0, top_k=0), seed=1, response_length=8)


def _filter(kind: Any, **bounds: float) -> GroupFilter:
    return GroupFilter(type=kind, filter_args=bounds)


class Engines:
    """Engines that finish requests in an order of their own, a token a step; a response says which seed it has."""

    number = 2

    def __init__(self, order: int = 1) -> None:
        self.order, self.version, self.seen = order, 1, list[Request]()
        self.flight: dict[str, tuple[Request, list[int], tuple[tuple[int, int], ...]]] = {}

    def submit(self, requests: Sequence[Sequence[Request]]) -> None:
        for own in requests:
            for request in own:
                self.seen.append(request)
                ids = request.response_ids.tolist()
                versions = (*request.versions, (len(ids), self.version))
                self.flight[request.id] = request, ids, versions

    def step(self, *, wait: bool = True) -> list[Response]:
        found = []
        for key in list(self.flight)[:: self.order]:
            request, ids, versions = self.flight[key]
            ids.append(request.seed % 7)
            if len(ids) > request.seed % 5:
                del self.flight[key]
                found.append(_response(key, ids, "stop", versions))
        return found

    def settle(self) -> list[Response]:
        return []

    def abort(self, ids: Sequence[str] | None = None) -> list[Response]:
        gone = [key for key in self.flight if ids is None or key in ids]
        return [_response(key, *self.flight.pop(key)[1:2], "abort", ((0, self.version),)) for key in gone]


class Scores:
    """Scores in the opposite order: the sum of a response's tokens."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def submit(self, group: Group) -> None:
        with_samples(group, [str(group.responses[place].response_ids.tolist()) for place in range(group.size)])
        for sample in group.samples:
            sample.score = float(sample.response.response_ids.sum())
        self.groups.insert(0, group)

    def poll(self, wait: float) -> list[Group]:
        return [self.groups.pop(0)] if self.groups else []


def _response(key: str, ids: list[int], finish: Any, versions: Any) -> Response:
    return Response(key, np.array(ids, np.int64), np.full(len(ids), -0.25, np.float32), finish, versions)


def _problem(domain: str, index: int) -> Problem:
    return Problem(f"{domain}{index}", domain, domain, [], np.array([1, 2]), {})


def _collector(engines: Engines, scores: Scores, max_running: int = 5, **changes: Any) -> Collector:
    sampler = Sampler(engines, SAMPLING, max_running)
    filters = {"a": _filter("std_filter", std_threshold=0.0), "b": GroupFilter()}
    return Collector(sampler, scores, _problem, {"a": 3, "b": 1}, filters, 2, **changes)


def test_the_reward_before_the_filter_is_known() -> None:
    collector, taken = _collector(Engines(), Scores()), None
    while taken is None or not taken.num_dropped:
        while not collector.is_ready:
            collector.pump()
        taken = collector.take()
    assert len(taken.dropped_scores) == 2 * taken.num_dropped
    kept = [sample.score for group in taken.groups for sample in group.samples]
    found = sample_metrics(taken, 1)
    assert found["reward"] == pytest.approx(np.mean(kept))
    assert found["reward_unfiltered"] == pytest.approx(np.mean([*kept, *taken.dropped_scores]))


def _step(collector: Collector) -> list[tuple[str, list[float]]]:
    while not collector.is_ready:
        collector.pump()
    return [(group.problem.id, group.scores.tolist()) for group in collector.take().groups]


def test_a_synchronous_step_does_not_depend_on_timing() -> None:
    runs = []
    for order, max_running, extra in ((1, 5, 0), (-1, 50, 0), (2, 1, 0), (1, 50, 2)):
        collector = _collector(Engines(order), Scores(), max_running, extra=extra)
        runs.append([_step(collector) for _ in range(3)])
    assert runs[0] == runs[1] == runs[2] == runs[3]
    groups = [group for step in runs[0] for group in step]
    assert len({name for name, _ in groups}) == 12
    assert all(scores[0] != scores[1] for name, scores in groups if name[0] == "a")  # the others were dropped
    assert [name for name, _ in groups if name[0] == "b"] == ["b0", "b1", "b2"]


def test_a_checkpoint_goes_on_where_the_run_was() -> None:
    whole = _collector(Engines(), Scores())
    expected = [_step(whole) for _ in range(3)]
    collector = _collector(Engines(), Scores())
    assert _step(collector) == expected[0]
    collector.pause()
    state = json.loads(json.dumps(collector.state({})))
    resumed = _collector(Engines(-1), Scores())
    resumed.load_state(state, {})
    assert [_step(resumed), _step(resumed)] == expected[1:]


def test_an_asynchronous_run_keeps_what_it_has_begun_and_samples_anew_what_is_too_old() -> None:
    engines = Engines()
    collector = _collector(engines, Scores(), 50, ratio=1.0)
    first = _step(collector)
    collector.pump()
    collector.pause()
    state = json.loads(json.dumps(collector.state({})))
    begun = [group for domain in state.values() for group in [*domain["under_way"], *domain["ready"]]]
    assert len(begun) >= 4  # of the next step
    assert any(group["parts"] or group["responses"] for group in begun)
    other = _collector(engines, Scores(), 50, ratio=1.0)
    other.load_state(state, {})
    engines.version = 2
    assert not {name for name, _ in _step(other)} & {name for name, _ in first}
    engines.version = 4
    other.pause()
    other.regenerate_stale(4)
    while not other.is_ready:
        other.pump()
    taken = other.take()
    assert all((group.oldest_version or 0) >= 3 for group in taken.groups)
    assert taken.num_stale > 0
    assert any(request.id.endswith("-1") for request in engines.seen)


class StuckScores(Scores):
    """Gives nothing back while it is stuck."""

    is_stuck = True

    def poll(self, wait: float) -> list[Group]:
        return [] if self.is_stuck else super().poll(wait)


def test_a_sync_waits_for_no_score() -> None:
    """What is scored meanwhile is kept, or sampled again where it is too old then; a checkpoint has it, too."""
    engines, scores = Engines(), StuckScores()
    collector = _collector(engines, scores, 50, ratio=1.0)
    for _ in range(8):
        collector.pump(wait=False)
    assert len(scores.groups) >= 4
    collector.pause()
    routing: dict[str, np.ndarray] = {}
    scores.groups[-1].responses[0] = replace(scores.groups[-1].responses[0], routing=np.ones((2, 3, 1), np.int16))
    state = json.loads(json.dumps(collector.state(routing)))
    assert [array.shape for array in routing.values()] == [(2, 3, 1)]
    resumed, again = _collector(Engines(), restored := Scores(), 50, ratio=1.0), list(scores.groups)
    resumed.load_state(state, routing)
    assert {group.number for group in restored.groups} == {group.number for group in again}
    assert len(_step(resumed)) == 4
    engines.version = 4
    collector.regenerate_stale(4)
    scores.is_stuck = False
    while not collector.is_ready:
        collector.pump()
    taken = collector.take()
    assert taken.num_stale >= len(again)
    assert not {id(group) for group in taken.groups} & {id(group) for group in again}
    assert all((group.oldest_version or 0) >= 3 for group in taken.groups)


def test_a_part_goes_on_with_what_it_has() -> None:
    engines = Engines()
    sampler = Sampler(engines, SAMPLING, 8)
    sampler.add([Group(_problem("a", 0), 3, 0, 4)])
    sampler.pump()
    sampler.pause()
    engines.version = 2
    sampler.pump()
    again = {place_of(request.id)[1]: request for request in engines.seen[4:]}
    assert again
    assert all(len(request.response_ids) == 1 for request in again.values())
    assert all(request.seed == seed_of(1, "train", 3, place, 0) for place, request in again.items())


def test_an_engine_has_so_many_requests_in_flight_and_most_of_a_group() -> None:
    engines, given = Engines(), list[list[int]]()
    submit = engines.submit

    def noted(requests: Sequence[Sequence[Request]]) -> None:
        given.extend([place_of(request.id)[0] for request in own] for own in requests)
        submit(requests)

    engines.submit = noted  # type: ignore[method-assign]
    sampler = Sampler(engines, SAMPLING, 3)
    sampler.add([Group(_problem("a", number), number, number, 2) for number in range(4)])
    sampler.pump()
    assert given == [[0, 0, 2], [1, 1, 2]]


def test_a_run_that_drops_every_group_ends() -> None:
    sampler = Sampler(Engines(), SAMPLING, 8)
    never = {"a": _filter("mean_filter", threshold_down=1e9)}
    collector = Collector(sampler, Scores(), _problem, {"a": 2}, never, 2)
    with pytest.raises(MegatuneError, match="drops nearly every group"):
        _step(collector)


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
    found = validation_metrics([group], Generating(num_return_sequences=4))
    assert (found["accuracy"], found["pass@2"], found["pass@4"]) == (0.25, 0.5, 1.0)


def test_tokens_of_other_weights_are_left_out() -> None:
    response = Response("x", np.arange(4), np.array([-1, -2, -3, -4], np.float32), "stop", ((0, 1), (1, 2), (3, 4)))
    assert np.array_equal(sampled_by(response, 2), np.array([np.nan, -2, -3, np.nan], np.float32), equal_nan=True)
