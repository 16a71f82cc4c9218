"""The driver's event loop: takes answers of actors, and finds the actor that is the first cause when none will come."""

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

HANG_SECONDS = 1800.0  # between two beats of an actor at work, unless the beat states a limit of its own
_LOOK_SECONDS = 1.0  # between two looks at all actors, of which each is two files; a death is known from Ray at once
STOPPED_SECONDS = 5.0  # a process that is stopped for longer will not go on by itself


@dataclass(eq=False)
class Actor:
    """The driver's view of an actor.

    Attributes:
        host: name of its machine.
        number: its place among all actors of the run.
        handle: Ray's.
        state: of its process.
        busy: calls in flight.
        stopped: when it was first seen stopped, on the monotonic clock.
        restarts: how often it may be started again where it dies or hangs; without any left, that ends the run.
        on_loss: called when it is gone, and may be started again.
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
        """Number of its machine."""
        return self.placement.node

    def begin(self, handle: Any) -> None:
        """Take note of a process that was started, of which nothing is known yet."""
        self.handle, self.state = handle, RankState(self.number, 0, time.monotonic())


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A method that an actor runs; its answer is `LOST` where the actor is.

    Attributes:
        deadline: on the clock of `Watch`, which stands still while this process does.
    """

    method: str
    limit: float
    deadline: float
    actor: Actor
    answer: asyncio.Future[Any]


class Watch:
    """All calls in flight, and all actors at work; the driver's event loop, in which answers arrive.

    Whatever the driver waits for, it waits in `run`, and all that is under way in the loop goes on meanwhile.

    Args:
        machines: by number.
        services: Ray's own processes that this run has started, by name.

    Attributes:
        place: phase and step of the run, once it says so.
    """

    def __init__(self, run_dir: Path, machines: Sequence[Machine], services: Mapping[str, int]) -> None:
        self.actors: list[Actor] = []
        self.place: report.Place | None = None
        self._run_dir, self._machines, self._services = run_dir, machines, services
        self._calls: dict[Call, None] = {}
        self._failed: dict[Actor, Failure] = {}
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()
        self.loop.set_exception_handler(_report)
        self._has_failed = asyncio.Event()
        self._looked, self._frozen = time.monotonic(), 0.0
        self._watching = self.loop.create_task(self._watch())

    def begin(self, method: str, limit: float, actor: Actor, ref: Any) -> asyncio.Future[Any]:
        """Note a call that was made, of which Ray's reference is given; return what gets its answer."""
        now = time.monotonic()
        call = Call(method, limit, now - self._frozen + limit, actor, self.loop.create_future())
        self._calls[call] = None
        if not actor.busy:
            actor.state.progressed = now
        actor.busy += 1
        ref.future().add_done_callback(partial(self._arrived, call))
        return call.answer

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for something, and return its result.

        Raises:
            MegatuneError: an actor failed, died or hung, or a call has exceeded its limit.
        """
        wanted = asyncio.ensure_future(awaitable, loop=self.loop)
        either = asyncio.FIRST_COMPLETED
        self.loop.run_until_complete(asyncio.wait({wanted, self._watching}, return_when=either))
        if self._failed or self._watching.done():
            wanted.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks for it
            wanted.cancel()
            self.loop.run_until_complete(self._watching)
        return wanted.result()

    def close(self) -> None:
        """End all that is under way in the loop."""
        self._runner.close()

    async def _watch(self) -> NoReturn:
        """Look at the actors now and then, and raise once one of them has failed."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_failed.wait(), _LOOK_SECONDS)
            self._look()
            if self._failed:
                await self._conclude_failure()
            self._find_hung()

    def _arrived(self, call: Call, answer: Any) -> None:
        """Take an answer, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody wants it
            self.loop.call_soon_threadsafe(self._take, call, answer)

    def _take(self, call: Call, answer: Any) -> None:
        if call not in self._calls:
            return  # its actor was lost
        call.actor.busy -= 1
        error = answer.exception()
        if error is not None:
            self._note_error(call.actor, error)
            if not self._failed and call in self._calls:  # the actor whose answer was an argument was lost
                self._conclude(call, LOST)
        elif isinstance(found := answer.result(), Failure):
            self._failed.setdefault(call.actor, found)
        else:
            self._conclude(call, found)
        if self._failed:
            self._has_failed.set()

    def _conclude(self, call: Call, answer: Any) -> None:
        del self._calls[call]
        if not call.answer.done():  # nobody wants it
            call.answer.set_result(answer)

    def _look(self) -> None:
        now, before = time.monotonic(), self._looked
        self._looked = now
        # While this process did not run, or did other things, neither did its sense of the actors' time.
        if (frozen := now - before) > FROZEN_SECONDS:
            self._frozen += frozen
            for actor in self.actors:
                actor.state.progressed += frozen
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
        if actor in self._failed:
            return
        found = re.search(r"exit code (\d+)", ray_says)
        words, out_of_memory = self._machines[actor.machine].crash_reason(actor.name)
        exit_code = int(found[1]) if found else None
        failure = report.death(actor.state, actor.host, words, exit_code, out_of_memory)
        if actor.restarts:
            self._lose(actor, report.failed(self._run_dir, actor.name, failure, self.place)[0])
        else:
            self._failed[actor] = failure

    def _lose(self, actor: Actor, finding: Finding) -> None:
        """Go on without an actor that may be started again: end what is left of it, and await none of its answers."""
        actor.restarts -= 1
        print(report.lost(finding, actor), file=sys.stderr, flush=True)
        if actor in self.actors:
            self.actors.remove(actor)
        self._machines[actor.machine].kill({actor.name: actor.state.pid})
        ray.kill(actor.handle)
        actor.busy, actor.stopped = 0, None
        for call in [each for each in self._calls if each.actor is actor]:
            self._conclude(call, LOST)
        actor.on_loss()

    def _note_error(self, actor: Actor, error: Exception) -> None:
        """What Ray raises in place of an answer: a death, or its own trouble."""
        if isinstance(error, RayActorError):  # of this actor, or of one whose answer was its argument
            owner = next((each for each in self.actors if each.handle._actor_id.hex() == error.actor_id), actor)
            if error.actor_init_failed:
                self._failed.setdefault(owner, report.trouble(owner.state, owner.host, error))
            else:
                self._note_death(owner, str(error))
        else:
            self._failed.setdefault(actor, report.trouble(actor.state, actor.host, error))

    async def _conclude_failure(self) -> None:
        """Gather what failed with the first, and raise the first cause."""

        def first() -> tuple[Actor, Failure]:
            return min(self._failed.items(), key=lambda pair: (pair[1].kind, pair[1].time))

        for seconds, enough in ((SETTLE_SECONDS, False), (SETTLE_COLLECTIVE_SECONDS, True)):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not (enough and first()[1].kind is Kind.ERROR):
                await asyncio.sleep(POLL_SECONDS)
                self._look()
        culprit, failure = first()
        if failure.kind is Kind.COLLECTIVE and failure.timed_out and (living := self._at_work()):
            self._conclude_hang(living)  # the rank that waited in vain is the victim
        findings = report.failed(self._run_dir, culprit.name, failure, self.place)
        self._raise(findings, culprit.name, ExitCode(failure.exit_code), failure.traceback)

    def _find_hung(self) -> None:
        """Raise if an actor at work has shown no progress for too long, or a call has taken too long; one that may be
        started again is lost then."""
        now = time.monotonic()
        for actor in self._at_work():
            beat_limit = actor.state.beat.limit if actor.state.beat else None
            limit = HANG_SECONDS if beat_limit is None else beat_limit
            # One that had nothing to do may have been stopped for long.
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
        finding, culprit = report.hung(self._run_dir, suspects, activities, call, self.place)
        if culprit.restarts:
            self._lose(culprit, finding)
        else:
            self._raise((finding,), culprit.name, ExitCode.PROCESS_DIED)

    def _raise(self, findings: tuple[Finding, ...], culprit: str, exit_code: ExitCode, traceback: str = "") -> NoReturn:
        error = MegatuneError(findings, exit_code)
        report.write(self._run_dir, self.actors, culprit, error, traceback)
        raise error


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a task has raised; Ctrl-C reaches whichever is at work, and ends the run anyway."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
