"""Waits for answers of actors, and finds out which actor is the first cause when none will come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.failure import Failure, Kind
from megatune.launch.processes import FROZEN_SECONDS, LOOK_SECONDS, POLL_SECONDS, RankState
from megatune.launch.report import RankActivity, process_state
from megatune.launch.supervisor import SETTLE_COLLECTIVE_SECONDS, SETTLE_SECONDS
from megatune.rl.cluster import report
from megatune.rl.cluster.host import StreamError
from megatune.rl.cluster.machine import Machine
from megatune.rl.cluster.role import ActorPlacement

STOPPED_SECONDS = 5.0  # a process that is stopped for longer will not go on by itself


@dataclass(eq=False)
class Actor:
    """The driver's view of an actor.

    Attributes:
        name: ROLE-RANK.
        handle: Ray's.
        machine, host: number and name of its machine.
        state: of its process; its rank is its place among all actors of the run.
        busy: calls in flight.
        stopped: when it was first seen stopped, on the monotonic clock.
    """

    role: str
    placement: ActorPlacement
    handle: Any
    machine: int
    host: str
    state: RankState
    busy: int = 0
    stopped: float | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.placement.rank}"


@dataclass(eq=False)
class Call:
    """A method that some actors run.

    Attributes:
        waiting: by Ray's reference of an answer: which answer it is, and whose.
        answers: by the order of the actors that were called; of a stream, references.
        deadline: on the monotonic clock.
    """

    method: str
    limit: float
    deadline: float
    waiting: dict[Any, tuple[int, Actor]] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.waiting


class Watch:
    """All calls in flight, and all actors at work.

    Args:
        machines: by number.
        hang_timeout: seconds between two beats of an actor at work.
        services: Ray's own processes that this run has started, by name.

    Attributes:
        place: phase and step of the run, once it says so.
    """

    def __init__(
        self, run_dir: Path, machines: Sequence[Machine], hang_timeout: float, services: Mapping[str, int]
    ) -> None:
        self.actors: list[Actor] = []
        self.place: report.Place | None = None
        self._services = services
        self._run_dir, self._machines, self._hang_timeout = run_dir, machines, hang_timeout
        self._calls: dict[Call, None] = {}
        self._failed: dict[Actor, Failure] = {}
        self._error: MegatuneError | None = None
        self._polled = self._looked = time.monotonic()

    def begin(self, method: str, limit: float, refs: Sequence[tuple[Any, Actor]]) -> Call:
        """Note a call that was made."""
        now = time.monotonic()
        call = Call(method, limit, now + limit)
        for place, (ref, actor) in enumerate(refs):
            call.waiting[ref] = place, actor
            if not actor.busy:
                actor.state.progressed = now
            actor.busy += 1
        if not call.done:  # one to no actors at all is
            self._calls[call] = None
        return call

    def forget(self, actors: Sequence[Actor]) -> None:
        """Expect nothing more of actors, which are about to end."""
        self.actors = [actor for actor in self.actors if actor not in actors]
        for call in list(self._calls):
            call.waiting = {ref: pair for ref, pair in call.waiting.items() if pair[1] not in actors}
            if call.done:
                del self._calls[call]

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        """Take answers until `done`, for at most `seconds`.

        Raises:
            MegatuneError: an actor failed, died or hung, or a call has exceeded its limit.
        """
        if self._error is not None:
            raise self._error
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            self._poll(0.0 if done() else max(0.0, left))
            if self._failed:
                self._conclude_failure()
            self._find_hung()
            if done() or (deadline is not None and time.monotonic() >= deadline):
                return

    def _poll(self, seconds: float) -> None:
        """Take answers, for `seconds` or until the first, and look at the actors now and then."""
        begun = time.monotonic()
        # While this process did not run, or did other things, neither did its sense of the actors' time.
        frozen = begun - self._polled
        if frozen > FROZEN_SECONDS:
            for actor in self.actors:
                actor.state.progressed += frozen
            for call in self._calls:
                call.deadline += frozen
        owners = {ref: call for call in self._calls for ref in call.waiting}
        if owners:
            ray.wait(list(owners), num_returns=1, timeout=seconds)
            ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
            for ref in ready:
                self._take(owners[ref], ref)
        elif seconds:
            time.sleep(seconds)
        now = self._polled = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look(now)

    def _take(self, call: Call, ref: Any) -> None:
        place, actor = call.waiting.pop(ref)
        actor.busy -= 1
        if call.done:
            del self._calls[call]
        try:
            answer = next(ref, None) if isinstance(ref, ray.ObjectRefGenerator) else ray.get(ref)
        except RayActorError as error:  # of this actor, or of one whose answer was its argument
            owner = next((each for each in self.actors if each.handle._actor_id.hex() == error.actor_id), actor)
            if error.actor_init_failed:
                self._note_error(owner, error)
            else:
                self._note_death(owner, str(error))
        except RayError as error:
            self._note_error(actor, error)
        else:
            if isinstance(answer, Failure):
                self._failed.setdefault(actor, answer)
            call.answers[place] = answer

    def _look(self, now: float) -> None:
        self._look_at_services()
        for number, machine in enumerate(self._machines):
            own = {actor.name: actor for actor in self.actors if actor.machine == number}
            for name, status in machine.look({name: actor.state.pid for name, actor in own.items()}).items():
                actor = own[name]
                if status.gone:
                    self._note_death(actor, "")
                elif status.beat and (actor.state.beat is None or actor.state.beat.count != status.beat.count):
                    actor.state.beat, actor.state.progressed = status.beat, now
                actor.stopped = (actor.stopped or now) if status.stopped else None

    def _look_at_services(self) -> None:
        """Raise if a process of Ray's is gone: all actors end with it, and no call is answered."""
        for name, pid in self._services.items():
            if process_state(pid) in "?ZX":
                self._raise((report.service(name, pid, self.place),), name, ExitCode.PROCESS_DIED)

    def _note_death(self, actor: Actor, ray_says: str) -> None:
        if actor not in self._failed:
            found = re.search(r"exit code (\d+)", ray_says)
            words, out_of_memory = self._machines[actor.machine].crash_reason(actor.name)
            exit_code = int(found[1]) if found else None
            self._failed[actor] = report.death(actor.state, actor.host, words, exit_code, out_of_memory)

    def _note_error(self, actor: Actor, error: RayError) -> None:
        """What Ray raises in place of an answer: what a stream carried, or its own trouble."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, StreamError):
            source = next(each for each in self.actors if each.name == f"{cause.role}-{cause.failure.rank}")
            self._failed.setdefault(source, cause.failure)
        else:
            self._failed.setdefault(actor, report.trouble(actor.state, actor.host, error))

    def _conclude_failure(self) -> None:
        """Gather what failed with the first, and raise the first cause."""

        def first() -> tuple[Actor, Failure]:
            return min(self._failed.items(), key=lambda pair: (pair[1].kind, pair[1].time))

        for seconds, enough in ((SETTLE_SECONDS, False), (SETTLE_COLLECTIVE_SECONDS, True)):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not (enough and first()[1].kind is Kind.ERROR):
                self._poll(POLL_SECONDS)
        self._look_at_services()
        culprit, failure = first()
        if failure.kind is Kind.COLLECTIVE and failure.timed_out and (living := self._at_work()):
            self._conclude_hang(living)  # the rank that waited in vain is the victim
        findings = report.failed(self._run_dir, culprit.name, failure, self.place)
        self._raise(findings, culprit.name, ExitCode(failure.exit_code), failure.traceback)

    def _find_hung(self) -> None:
        """Raise if an actor at work has shown no progress for too long, or a call has taken too long."""
        now = time.monotonic()
        for actor in self._at_work():
            beat_limit = actor.state.beat.limit if actor.state.beat else None
            limit = self._hang_timeout if beat_limit is None else beat_limit
            stopped = actor.stopped is not None and now - actor.stopped > STOPPED_SECONDS
            if stopped or now - actor.state.progressed > limit:
                self._conclude_hang(self._at_work())
        for call in self._calls:
            if now > call.deadline:
                self._conclude_hang([actor for _, actor in call.waiting.values()], call)

    def _at_work(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.busy and actor not in self._failed]

    def _conclude_hang(self, suspects: Sequence[Actor], call: Call | None = None) -> None:
        activities: dict[int, RankActivity] = {}
        for number, machine in enumerate(self._machines):
            pids = {actor.name: actor.state.pid for actor in suspects if actor.machine == number}
            found = machine.stacks(pids) if pids else {}
            activities |= {actor.state.rank: found[actor.name] for actor in suspects if actor.name in found}
        finding, culprit = report.hung(self._run_dir, suspects, activities, call, self.place)
        self._raise((finding,), culprit.name, ExitCode.PROCESS_DIED)

    def _raise(self, findings: tuple[Finding, ...], culprit: str, exit_code: ExitCode, traceback: str = "") -> None:
        self._error = MegatuneError(findings, exit_code)
        report.write(self._run_dir, self.actors, culprit, self._error, traceback)
        raise self._error
