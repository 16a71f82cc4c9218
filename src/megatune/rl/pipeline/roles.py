"""Groups of actors as the driver calls them, and whose turn it is on the devices that they share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.errors import MegatuneError
from megatune.rl.cluster.role import RoleGroup
from megatune.rl.rollout.engine import Memory
from megatune.rl.samples import Request, Response, Rollouts
from megatune.rl.worker.batching import merged
from megatune.rl.worker.model import Ready

_CLOSE_SECONDS = 30.0
_WAITING = 2  # requests given to an engine for each that it samples
PARTS = ("weights", "gradients", "optimizer")

T = TypeVar("T")

_Ask: TypeAlias = tuple[Sequence[Request], asyncio.Future[list[Response]]]


class ModelGroup:
    """A role with a model of our engine.

    Attributes:
        ready: what rank 0 said once it was loaded.
    """

    def __init__(self, role: ModelRole, group: RoleGroup) -> None:
        self.role, self.group = role, group
        self.ready: Ready | None = None
        self._held: set[str] = set()  # parts on the devices

    def load(self, checkpoint: str | None = None) -> Ready:
        """Load the role's model, or its checkpoint."""
        self.ready = self.group.call("load", checkpoint)[0]
        self._held = set(PARTS)
        return self.ready

    def ask(self, method: str, rollouts: Rollouts) -> list[np.ndarray]:
        """Ask for values of the responses' tokens: fp32 [r] of each sample."""
        return merged(self.call(method, rollouts), rollouts)

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of all ranks, and return their answers."""
        return self.group.call(method, *args)

    def hold(self, *parts: str) -> None:
        """Have these parts on the devices, and no others."""
        if gone := self._held - set(parts):
            self.call("offload", *sorted(gone))
        if missing := set(parts) - self._held:
            self.call("onload", *sorted(missing))
        self._held = set(parts)


class EngineGroup:
    """Rollout engines with the same weights, each of which runs by itself in an actor.

    An engine that dies or hangs is started again, while nobody else uses its devices. What it sampled is sampled by the
    others meanwhile. It is `admit`-ted before weights are sent, and samples again once it has them.

    Args:
        max_running: requests that an engine samples at once. It gets up to twice as many: the others wait in it, and
            take the place of responses that end before their group does.
        sleep_level: 1 keeps their weights while they sleep.
        has_own_weights: no weights are sent: an engine samples as soon as it was started again.

    Attributes:
        refill: sends weights to engines of which none has any; see `run`.
        on_loss: called when an engine was lost.
    """

    def __init__(
        self,
        role: InferRole,
        group: RoleGroup,
        max_running: int,
        sleep_level: int = 1,
        *,
        has_own_weights: bool = False,
    ) -> None:
        self.role, self.group, self.sleep_level = role, group, sleep_level
        self.number, self.loop = group.size, group.loop
        self.refill: Callable[[], object] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        self._most, self._has_own_weights = _WAITING * max_running, has_own_weights
        self._asleep: set[Memory] = set()
        self._waiting: deque[_Ask] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._is_aborting = False
        self._loads = [0] * group.size  # requests in flight
        self._numbers = [0] * group.size  # of the last call to an engine
        self._current = set(range(group.size))  # those with weights
        self._lost: set[int] = set()  # those to be started again
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._restarted: set[int] = set()
        self._interrupted: asyncio.Future[None] | None = None
        group.on_loss = self._note_loss

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for something that these engines sample, and return its result; where all of them were lost, they get
        weights once there is one again. See `Pending.result` for what it raises."""
        wanted = asyncio.ensure_future(awaitable, loop=self.loop)
        wanted.add_done_callback(self._interrupt)
        try:
            while not wanted.done():
                self._interrupted = self.loop.create_future()
                self.group.run(self._interrupted)
                if not wanted.done():
                    self.sleep()
                    self.refill()
        finally:
            wanted.cancel()
        return wanted.result()

    def _interrupt(self, *_: object) -> None:
        """End what `run` waits for: its result is there, or nobody can sample what was asked for."""
        if self._interrupted is not None and not self._interrupted.done():
            self._interrupted.set_result(None)

    @property
    def forgot(self) -> bool:
        """Whether they sleep, and have no weights when they wake."""
        return bool(self._asleep) and self.sleep_level > 1

    async def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Have one engine sample requests, those of a group, in one call; return once all have their responses, or are
        aborted: with what each has then, or without any."""
        answer: asyncio.Future[list[Response]] = self.loop.create_future()
        self._waiting.append((requests, answer))
        self.loop.call_soon(self._dispatch)  # together with what others ask for at this moment
        return await answer

    async def abort(self) -> None:
        """End all requests: `generate` returns what they have, before this does."""
        self._is_aborting = True
        waiting, self._waiting = self._waiting, deque()
        for _, answer in waiting:
            if not answer.done():
                answer.set_result([])
        if calls := set(self._calls):
            await self.group.start_each("abort", [(number,) for number in self._numbers])
            await asyncio.wait(calls)
        self._is_aborting = False

    def sleep(self) -> None:
        """Free the devices; what is asked for meanwhile waits."""
        if not self._asleep:
            self._asleep = {"weights", "cache"}
            if self._calls:
                self.group.run(self.abort())
            self.admit()
            self.group.call("sleep", self.sleep_level)

    def close(self) -> None:
        """Let the engines end what they have started, and remove what they have left in shared memory."""
        with suppress(MegatuneError):  # they are killed next
            self.group.call("close", limit=_CLOSE_SECONDS)

    def wake(self, *parts: Memory) -> None:
        """Take the devices again, for these parts of an engine or for all of it."""
        if missing := self._asleep & set(parts or self._asleep):
            self.group.call("wake", *sorted(missing))
            self._asleep -= missing
            if not self._asleep:
                self._start_lost()
            self.loop.call_soon(self._dispatch)

    def admit(self) -> bool:
        """Let engines that were started again take part; return whether any is new. Waits for those that are being
        started, where they share devices with others that will take them, or no other engine is left."""
        while self._restarts and (self._asleep or not self.group.ranks):
            self.group.run(asyncio.wait(set(self._restarts.values())))
        ready, self._restarted = self._restarted, set()
        for rank in ready:
            self.group.admit(rank)
        return bool(ready)

    def note_weights(self) -> None:
        """Let all engines that take part sample with the weights that they were sent."""
        for rank in self.group.ranks:
            if rank not in self._current:
                print(f"{self.group.name}-{rank} was started again, has the weights, and samples", flush=True)
            self._current.add(rank)

    def _note_loss(self, rank: int) -> None:
        """Start an engine again, now or when the engines have their devices."""
        self._current.discard(rank)
        self._restarted.discard(rank)
        self._lost.add(rank)
        self._numbers[rank] = 0  # a new one counts from the beginning
        self.on_loss()
        if not self._asleep:
            self._start_lost()

    def _start_lost(self) -> None:
        lost, self._lost = self._lost, set()
        for rank in lost:
            self._restarts[rank] = self.loop.create_task(self._restart(rank))

    async def _restart(self, rank: int) -> None:
        is_there = await self.group.restart(rank)
        if self._restarts.get(rank) is asyncio.current_task():
            del self._restarts[rank]
        if is_there and self._has_own_weights:
            self.group.admit(rank)
            self.note_weights()
            self._dispatch()
        elif is_there:
            self._restarted.add(rank)

    def _dispatch(self) -> None:
        """Give the engine with the fewest requests in flight the next group, and so on."""
        chosen: dict[int, list[_Ask]] = {rank: [] for rank in sorted(self._current)}
        while self._waiting and chosen and not self._asleep:
            requests, answer = self._waiting[0]
            engine = min(chosen, key=self._loads.__getitem__)
            if self._loads[engine] and self._loads[engine] + len(requests) > self._most:
                break
            self._waiting.popleft()
            if not answer.done():
                chosen[engine].append((requests, answer))
                self._loads[engine] += len(requests)
        for engine, burst in chosen.items():
            last = self._numbers[engine] + len(burst)
            for number, ask in enumerate(burst, self._numbers[engine] + 1):
                call = self.loop.create_task(self._call(engine, number, last, *ask))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            self._numbers[engine] = last
        if self._waiting and not chosen and not self._has_own_weights:
            self._interrupt()

    async def _call(
        self, engine: int, number: int, last: int, requests: Sequence[Request], answer: asyncio.Future[list[Response]]
    ) -> None:
        try:
            found = await self.group.start_one(engine, "generate", number, last, list(requests))
        except Exception as error:  # of the call itself; what an engine raises ends the run
            if not answer.done():
                answer.set_exception(error)
            return
        self._loads[engine] -= len(requests)
        if not found and not self._is_aborting:  # the engine was lost
            self._waiting.appendleft((requests, answer))
        elif not answer.done():  # nobody wants it
            answer.set_result(found[0] if found else [])
        self._dispatch()


class DeviceScheduler:
    """Schedules colocated roles: those that share devices use them one after the other; others are never moved.

    Args:
        judges: engines that work beside the rollout engines, on other devices; they may share those of models.
    """

    def __init__(self, engines: EngineGroup, models: Sequence[ModelGroup], judges: Sequence[EngineGroup] = ()) -> None:
        self._engines, self._models, self._judges = engines, list(models), list(judges)

    def load(self, model: ModelGroup, checkpoint: str | None = None) -> None:
        """Load a model, with room for it."""
        self._let_sleep(model)
        for other in self._others(model):
            other.hold()
        model.load(checkpoint)

    def sample(self) -> None:
        """Give the devices to the engines, and to judges."""
        for model in self._models:
            if self.meets_engines(model) or self._judges_of(model):
                model.hold()
        for engines in (self._engines, *self._judges):
            engines.wake()

    def compute(self, model: ModelGroup, *parts: str) -> None:
        """Give the devices to a model, which needs these parts. Judges that share them have nothing to do."""
        self._let_sleep(model)
        self._give(model, parts)

    def transfer(self, model: ModelGroup) -> None:
        """Have the model's weights on the devices, and the engines'. Their cache comes back with `sample`, when the
        model has left: together they would be the most that a step needs."""
        for judge in self._judges_of(model):
            judge.sleep()
        self._give(model, ("weights",))
        for other in self._models:
            if other is not model and self.meets_engines(other):
                other.hold()
        self._engines.wake("weights")

    def _let_sleep(self, model: ModelGroup) -> None:
        if self.meets_engines(model):
            self._engines.sleep()
        for judge in self._judges_of(model):
            judge.sleep()

    def _judges_of(self, model: ModelGroup) -> list[EngineGroup]:
        return [judge for judge in self._judges if {*judge.role.devices} & {*model.role.devices}]

    def _give(self, model: ModelGroup, parts: Sequence[str]) -> None:
        """Have these parts of a model on devices that it shares, and nothing of the other models there."""
        others = self._others(model)
        for other in others:
            other.hold()
        if others or self.meets_engines(model) or self._judges_of(model):
            model.hold(*parts)

    def _others(self, model: ModelGroup) -> list[ModelGroup]:
        return [each for each in self._models if each is not model and {*each.role.devices} & {*model.role.devices}]

    def meets_engines(self, model: ModelGroup) -> bool:
        """Whether a model shares a device with an engine."""
        return bool({*model.role.devices} & {*self._engines.role.devices})
