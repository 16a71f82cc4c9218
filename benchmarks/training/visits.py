"""Runs the cases within a budget of time: which engine, when, in turns with which others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from training.case import Case, Engine, Outcome
from training.worker import WARMUP, LostError, Worker

_FIRST_GUESS = 40.0  # seconds of a visit, while none is known
_MARGIN = 1.2  # a visit may take this times what the like took
_CLOSING = 20.0  # seconds to end one


@dataclass(frozen=True, slots=True)
class Visit:
    """Engines that run at the same time, taking turns step by step: on a GPU one, which has all of its memory."""

    case: Case
    engines: tuple[Engine, ...]
    round: int

    @property
    def label(self) -> str:
        return f"{self.case.name}: {', '.join(engine.name for engine in self.engines)} (round {self.round + 1})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long anything may take.

    Attributes:
        budget: seconds for all visits; those that do not fit any more are dropped.
        steps: measured steps of each engine in a visit.
        measuring: seconds after which a visit takes no further step, once it has two.
        answer: seconds for an engine to be ready, or to do one step.
        prefetch: let the next visit's processes import while this one computes, for which there must be cores.
        profiled: have each engine profile one more step.
    """

    budget: float
    steps: int
    measuring: float = 60.0
    answer: float = 300.0
    prefetch: bool = False
    profiled: bool = False


class Visits:
    """The visits of a benchmark, in order.

    Attributes:
        outcomes: of each engine in each visit.
        dropped: labels of visits for which no time was left.
    """

    def __init__(self, visits: Sequence[Visit], limits: Limits) -> None:
        self._visits, self._limits = list(visits), limits
        self._deadline = time.monotonic() + limits.budget
        self._known: dict[tuple[str, ...], float] = {}
        self.outcomes: list[Outcome] = []
        self.dropped: list[str] = []

    def run(self) -> None:
        """Run all that fit, and say so on the terminal."""
        waiting: list[Worker] = []
        for index, visit in enumerate(self._visits):
            if self._left() < self._estimate(visit):
                self.dropped.append(visit.label)
                _end(waiting)
                waiting = []
                continue
            workers = waiting or _start(visit)
            following = next(itertools.islice(self._visits, index + 1, None), None)
            waiting = _start(following) if self._limits.prefetch and following else []
            began = time.monotonic()
            outcomes = self._visit(visit, workers)
            self._known[self._key(visit)] = time.monotonic() - began
            self.outcomes += outcomes
            for outcome in outcomes:
                print(f"{self._left():5.0f} s left  {_say(outcome)}", flush=True)
        _end(waiting)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _key(self, visit: Visit) -> tuple[str, ...]:
        return (visit.case.name, *(engine.name for engine in visit.engines))

    def _estimate(self, visit: Visit) -> float:
        """Seconds that it will take: as long as the last time, else as the longest so far."""
        seconds = self._known.get(self._key(visit), max(self._known.values(), default=_FIRST_GUESS))
        return _MARGIN * seconds

    def _visit(self, visit: Visit, workers: list[Worker]) -> list[Outcome]:
        outcomes = [Outcome(visit.case, engine, visit.round) for engine in visit.engines]
        first = WARMUP + visit.round * (self._limits.steps + WARMUP)
        try:
            for worker, outcome in zip(workers, outcomes, strict=True):
                with _noting(outcome):
                    outcome.ready = worker.ask("build", first, limit=self._patience())
            self._take_turns(workers, outcomes, range(first, first + self._limits.steps))
            for worker, outcome in zip(workers, outcomes, strict=True):
                if outcome.failure is None:
                    with _noting(outcome):
                        details = (first + self._limits.steps, self._limits.profiled)
                        outcome.closing = worker.ask("close", *details, limit=self._patience())
        finally:
            _end(workers)
        return outcomes

    def _take_turns(self, workers: list[Worker], outcomes: list[Outcome], indices: range) -> None:
        pairs = list(zip(workers, outcomes, strict=True))
        began = time.monotonic()
        for count, index in enumerate(indices):
            if count >= 2 and time.monotonic() - began > self._limits.measuring:
                return
            for worker, outcome in pairs if count % 2 else reversed(pairs):  # neither is always the one after
                if outcome.failure is None:
                    with _noting(outcome):
                        outcome.steps.append(worker.ask("step", index, limit=self._patience()))

    def _patience(self) -> float:
        return min(self._limits.answer, self._left() + _CLOSING)


@contextmanager
def _noting(outcome: Outcome) -> Iterator[None]:
    """Note in the outcome how an engine was lost."""
    try:
        yield
    except LostError as error:
        outcome.failure = str(error)


def _start(visit: Visit) -> list[Worker]:
    return [Worker(visit.case, engine) for engine in visit.engines]


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()


def _say(outcome: Outcome) -> str:
    name = f"{outcome.case.name}: {outcome.engine.name}"
    if outcome.failure is not None:
        return f"{name}: {outcome.failure}"
    assert outcome.ready is not None
    steps = ", ".join(f"{step.seconds:.3f}" for step in outcome.steps)
    warm = ", ".join(f"{seconds:.1f}" for seconds in outcome.ready.warm_seconds)
    return f"{name}: built in {outcome.ready.build_seconds:.1f} s, warmed in {warm} s; steps of {steps} s"


def in_turn(cases: Sequence[tuple[Case, Sequence[Engine]]], round: int) -> Iterator[Visit]:
    """Each engine alone, in every second round the other way about."""
    for case, engines in cases:
        for engine in engines if round % 2 == 0 else reversed(engines):
            yield Visit(case, (engine,), round)
