"""The driver's event loop: receives results of actors, and finds the actor that caused a failure or a hang."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayActorError

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.failure import Failure, Kind
from megatune.launch.processes import FROZEN_SECONDS, POLL_SECONDS, RankState
from megatune.launch.report import RankActivity, process_state
from megatune.launch.supervisor import SETTLE_COLLECTIVE_SECONDS, SETTLE_SECONDS
from megatune.rl.cluster import report
from megatune.rl.cluster.machine import Machine
from megatune.rl.cluster.role import LOST, ActorPlacement

T = TypeVar("T")

HANG_SECONDS = 1800.0  # between two heartbeats of a busy actor, unless the heartbeat states another limit
_POLL_SECONDS = 1.0  # between two checks of all actors, which read two files each; Ray reports deaths at once
STOPPED_SECONDS = 5.0  # a process that is stopped for longer will not continue by itself


@dataclass(eq=False)
class Actor:
    """The driver's view of an actor.

    Attributes:
        host: name of its machine.
        number: index among all actors of the run.
        handle: Ray's actor handle.
        state: of its process.
        busy: number of calls in flight.
        stopped: when it was first seen stopped, on the monotonic clock.
        restarts: how often it may still be restarted; at 0, its death or hang ends the run.
        on_loss: called when it is lost and may be restarted.
    """

    role: str
    placement: ActorPlacement
    host: str
    number: int
    handle: Any = None
    state: RankState = field(init=False)
    busy: int = 0
    stopped: float | None = None
    restarts: int = 0
    on_loss: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.placement.rank}"

    @property
    def machine(self) -> int:
        """Index of its machine."""
        return self.placement.node

    def begin(self, handle: Any) -> None:
        """Set the handle of a new process, and reset its state."""
        self.handle, self.state = handle, RankState(self.number, 0, time.monotonic())


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call in flight; its result is `LOST` if the actor is lost.

    Attributes:
        deadline: on the clock of `Watch`, which stops while this process is stopped.
    """

    method: str
    limit: float
    deadline: float
    actor: Actor
    answer: asyncio.Future[Any]


class Watch:
    """Watches all actors and calls in flight; owns the driver's event loop, which receives the results.

    The driver always waits in `run`, while all tasks of the loop continue.

    Args:
        machines: by index.
        services: PIDs of Ray's own processes that this run has started, by name.

    Attributes:
        position: phase and step of the run, once known.
    """

    def __init__(self, run_dir: Path, machines: Sequence[Machine], services: Mapping[str, int]) -> None:
        self.actors: list[Actor] = []
        self.position: report.RunPosition | None = None
        self._run_dir, self._machines, self._services = run_dir, machines, services
        self._calls: dict[Call, None] = {}
        self._failed: dict[Actor, Failure] = {}
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()
        self.loop.set_exception_handler(self._note_own_error)
        self._has_failed = asyncio.Event()
        self._own_error: Exception | None = None  # of a task or callback of this process that nothing awaits
        self._looked, self._frozen = time.monotonic(), 0.0
        self._watching = self.loop.create_task(self._watch())

    def begin(self, method: str, limit: float, actor: Actor, ref: Any) -> asyncio.Future[Any]:
        """Track a call by Ray's reference of its result, and return a future of the result."""
        now = time.monotonic()
        call = Call(method, limit, now - self._frozen + limit, actor, self.loop.create_future())
        self._calls[call] = None
        if not actor.busy:
            actor.state.progressed = now
        actor.busy += 1
        ref.future().add_done_callback(partial(self._arrived, call))
        return call.answer

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable and return its result.

        Raises:
            MegatuneError: an actor failed, died or hung, or a call exceeded its limit.
        """
        wanted = asyncio.ensure_future(awaitable, loop=self.loop)
        either = asyncio.FIRST_COMPLETED
        self.loop.run_until_complete(asyncio.wait({wanted, self._watching}, return_when=either))
        if self._failed or self._watching.done():
            wanted.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved, against a warning
            wanted.cancel()
            self.loop.run_until_complete(self._watching)
        return wanted.result()

    def close(self) -> None:
        """Cancel all tasks of the loop and close it."""
        self._runner.close()

    async def _watch(self) -> NoReturn:
        """Check the actors periodically, and raise once one of them has failed."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_failed.wait(), _POLL_SECONDS)
            self._look()
            if self._failed:
                await self._conclude_failure()
            if self._own_error is not None:
                raise self._own_error
            self._find_hung()

    def _arrived(self, call: Call, answer: Any) -> None:
        """Pass a result to the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._take, call, answer)

    def _take(self, call: Call, answer: Any) -> None:
        if call not in self._calls:
            return  # its actor was lost
        call.actor.busy -= 1
        error = answer.exception()
        if error is not None:
            self._note_error(call.actor, error)
            if not self._failed and call in self._calls:  # the actor that computed an argument was lost
                self._conclude(call, LOST)
        elif isinstance(found := answer.result(), Failure):
            self._note_failure(call.actor, found)
        else:
            self._conclude(call, found)
        if self._failed:
            self._has_failed.set()

    def _conclude(self, call: Call, answer: Any) -> None:
        del self._calls[call]
        if not call.answer.done():  # done if cancelled
            call.answer.set_result(answer)

    def _look(self) -> None:
        now, before = time.monotonic(), self._looked
        self._looked = now
        # Time in which this process was stopped or blocked does not count against the actors.
        if (frozen := now - before) > FROZEN_SECONDS:
            self._frozen += frozen
            for actor in self.actors:
                actor.state.progressed += frozen
        self._look_at_services()
        for number, machine in enumerate(self._machines):
            own = {actor.name: actor for actor in self.actors if actor.machine == number}
            for name, status in machine.statuses({name: actor.state.pid for name, actor in own.items()}).items():
                actor = own[name]
                if status.gone:
                    self._note_death(actor, "")
                elif status.beat and (actor.state.beat is None or actor.state.beat.count != status.beat.count):
                    actor.state.beat, actor.state.progressed = status.beat, now
                actor.stopped = (actor.stopped or now) if status.stopped else None

    def _look_at_services(self) -> None:
        """Raise if one of Ray's own processes is gone: all actors end with it, and no call returns."""
        for name, pid in self._services.items():
            if process_state(pid) in "?ZX":
                self._raise((report.service_finding(name, pid, self.position),), name, ExitCode.PROCESS_DIED)

    def _note_death(self, actor: Actor, ray_message: str) -> None:
        if actor in self._failed:
            return
        found = re.search(r"exit code (\d+)", ray_message)
        reason, out_of_memory = self._machines[actor.machine].crash_reason(actor.name)
        exit_code = int(found[1]) if found else None
        self._note_failure(actor, report.death_failure(actor.state, actor.host, reason, exit_code, out_of_memory))

    def _note_failure(self, actor: Actor, failure: Failure) -> None:
        """Lose an actor that may be restarted, or let the run end. It also ends where the actor's message says what to
        do (`MegatuneError`), since a restart would not change that."""
        if actor.restarts and not failure.findings:
            self._lose(actor, report.failure_findings(self._run_dir, actor.name, failure, self.position)[0])
        else:
            self._failed.setdefault(actor, failure)

    def _lose(self, actor: Actor, finding: Finding) -> None:
        """Continue without an actor that may be restarted: kill what is left of it, and give up its calls."""
        actor.restarts -= 1
        print(report.restart_warning(finding, actor), file=sys.stderr, flush=True)
        if actor in self.actors:
            self.actors.remove(actor)
        self._machines[actor.machine].kill({actor.name: actor.state.pid})
        ray.kill(actor.handle)
        actor.busy, actor.stopped = 0, None
        for call in [each for each in self._calls if each.actor is actor]:
            self._conclude(call, LOST)
        actor.on_loss()

    def _note_error(self, actor: Actor, error: Exception) -> None:
        """Record an error that Ray raised in place of a result: an actor's death, or a problem of Ray."""
        if isinstance(error, RayActorError):  # of this actor, or of one that computed an argument
            owner = next((each for each in self.actors if each.handle._actor_id.hex() == error.actor_id), actor)
            if error.actor_init_failed:
                self._failed.setdefault(owner, report.ray_failure(owner.state, owner.host, error))
            else:
                self._note_death(owner, str(error))
        else:
            self._failed.setdefault(actor, report.ray_failure(actor.state, actor.host, error))

    async def _conclude_failure(self) -> None:
        """Collect the failures that follow the first one, and raise the cause."""

        def first() -> tuple[Actor, Failure]:
            return min(self._failed.items(), key=lambda pair: (pair[1].kind, pair[1].time))

        for seconds, enough in ((SETTLE_SECONDS, False), (SETTLE_COLLECTIVE_SECONDS, True)):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not (enough and first()[1].kind is Kind.ERROR):
                await asyncio.sleep(POLL_SECONDS)
                self._look()
        culprit, failure = first()
        if failure.kind is Kind.COLLECTIVE and failure.timed_out and (living := self._at_work()):
            self._conclude_hang(living)  # the rank whose collective timed out is the victim
        findings = report.failure_findings(self._run_dir, culprit.name, failure, self.position)
        self._raise(findings, culprit.name, ExitCode(failure.exit_code), failure.traceback)

    def _find_hung(self) -> None:
        """Raise if a busy actor makes no progress, or a call exceeds its limit; an actor that may be restarted is lost
        instead."""
        now = time.monotonic()
        for actor in self._at_work():
            beat_limit = actor.state.beat.limit if actor.state.beat else None
            limit = HANG_SECONDS if beat_limit is None else beat_limit
            # An idle actor may have been stopped for long.
            stopped = actor.stopped is not None and now - max(actor.stopped, actor.state.progressed) > STOPPED_SECONDS
            if stopped or now - actor.state.progressed > limit:
                self._conclude_hang(self._at_work())
                return
        if late := [call for call in self._calls if now - self._frozen > call.deadline]:
            self._conclude_hang([call.actor for call in late], late[0])

    def _at_work(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.busy and actor not in self._failed]

    def _conclude_hang(self, suspects: Sequence[Actor], call: Call | None = None) -> None:
        activities: dict[int, RankActivity] = {}
        for number, machine in enumerate(self._machines):
            pids = {actor.name: actor.state.pid for actor in suspects if actor.machine == number}
            found = machine.stacks(pids) if pids else {}
            activities |= {actor.state.rank: found[actor.name] for actor in suspects if actor.name in found}
        finding, culprit = report.hang_finding(self._run_dir, suspects, activities, call, self.position)
        if culprit.restarts:
            self._lose(culprit, finding)
        else:
            self._raise((finding,), culprit.name, ExitCode.PROCESS_DIED)

    def _raise(self, findings: tuple[Finding, ...], culprit: str, exit_code: ExitCode, traceback: str = "") -> NoReturn:
        error = MegatuneError(findings, exit_code)
        report.write_report(self._run_dir, self.actors, culprit, error, traceback)
        raise error

    def _note_own_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Let the run end with an exception that asyncio would only log; the run would wait for a result that never
        comes. KeyboardInterrupt ends the run anyway."""
        if isinstance(error := context.get("exception"), Exception):
            self._own_error = self._own_error or error
            self._has_failed.set()
        elif error is None:
            loop.default_exception_handler(context)
