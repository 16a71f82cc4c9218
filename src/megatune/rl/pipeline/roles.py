"""The driver's handles of models and engines, and the scheduler of the devices that they share."""

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
from megatune.rl.worker.batching import merge_ranks
from megatune.rl.worker.model import WorkerInfo

_CLOSE_SECONDS = 30.0
_QUEUE_FACTOR = 2  # requests given to an engine, for each that it samples at once
PARTS = ("weights", "gradients", "optimizer")

T = TypeVar("T")

_PendingGroup: TypeAlias = tuple[Sequence[Request], asyncio.Future[list[Response]]]


class ModelGroup:
    """A role whose model runs in megatune's engine.

    Attributes:
        info: of rank 0, once the model is loaded.
    """

    def __init__(self, role: ModelRole, group: RoleGroup) -> None:
        self.role, self.group = role, group
        self.info: WorkerInfo | None = None
        self._on_device: set[str] = set()  # parts of `PARTS`

    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        """Load the role's model, or a checkpoint of it."""
        self.info = self.group.call("load", checkpoint)[0]
        self._on_device = set(PARTS)
        return self.info

    def token_values(self, method: str, rollouts: Rollouts) -> list[np.ndarray]:
        """Compute a value for each sampled token: fp32 [r] per sample."""
        return merge_ranks(self.call(method, rollouts), rollouts)

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of all ranks and return their answers."""
        return self.group.call(method, *args)

    def keep_on_device(self, *parts: str) -> None:
        """Move these parts to the devices, and all others to the host."""
        if gone := self._on_device - set(parts):
            self.call("offload", *sorted(gone))
        if missing := set(parts) - self._on_device:
            self.call("onload", *sorted(missing))
        self._on_device = set(parts)


class EngineGroup:
    """Rollout engines with the same weights, each in its own actor.

    An engine that dies or hangs is restarted when nothing else uses its devices; the other engines take over its
    requests. It is admitted (`admit`) before the next weight transfer, and samples again after it.

    Args:
        max_running: requests that an engine samples at once. It gets up to twice as many; the others wait in it and
            replace responses that end before their group does.
        sleep_level: 1 keeps the weights during sleep, 2 drops them.
        static_weights: whether no weights are sent, so that a restarted engine samples at once.

    Attributes:
        resend_weights: sends weights if no engine has any; see `run`.
        on_loss: called when an engine was lost.
    """

    def __init__(
        self,
        role: InferRole,
        group: RoleGroup,
        max_running: int,
        sleep_level: int = 1,
        *,
        static_weights: bool = False,
    ) -> None:
        self.role, self.group, self.sleep_level = role, group, sleep_level
        self.number, self.loop = group.size, group.loop
        self.resend_weights: Callable[[], object] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        self._max_requests, self._static_weights = _QUEUE_FACTOR * max_running, static_weights
        self._asleep: set[Memory] = set()
        self._waiting: deque[_PendingGroup] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._is_aborting = False
        self._loads = [0] * group.size  # requests in flight
        self._numbers = [0] * group.size  # number of the last call to each engine
        self._current = set(range(group.size))  # engines with weights
        self._lost: set[int] = set()  # engines to restart
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._restarted: set[int] = set()
        self._interrupted: asyncio.Future[None] | None = None
        group.on_loss = self._note_loss

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable that needs these engines, and return its result.

        If all engines were lost, the first restarted one gets weights at once. Raises as `Pending.result`."""
        wanted = asyncio.ensure_future(awaitable, loop=self.loop)
        wanted.add_done_callback(self._interrupt)
        try:
            while not wanted.done():
                self._interrupted = self.loop.create_future()
                self.group.run(self._interrupted)
                if not wanted.done():
                    self.sleep()
                    self.resend_weights()
        finally:
            wanted.cancel()
        return wanted.result()

    def _interrupt(self, *_: object) -> None:
        """Wake `run`: its result is ready, or no engine can sample the requests."""
        if self._interrupted is not None and not self._interrupted.done():
            self._interrupted.set_result(None)

    @property
    def needs_weights(self) -> bool:
        """Whether the engines sleep and will have no weights when they wake."""
        return bool(self._asleep) and self.sleep_level > 1

    async def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Sample the requests of a group by one engine, in one call; return all responses, after an abort the partial
        ones."""
        answer: asyncio.Future[list[Response]] = self.loop.create_future()
        self._waiting.append((requests, answer))
        self.loop.call_soon(self._dispatch)  # together with other groups of this moment
        return await answer

    async def abort(self) -> None:
        """Abort all requests; their `generate` calls return before this does."""
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
        """Free the devices; new requests wait."""
        if not self._asleep:
            self._asleep = {"weights", "cache"}
            if self._calls:
                self.group.run(self.abort())
            self.admit()
            self.group.call("sleep", self.sleep_level)

    def close(self) -> None:
        """Let the engines end their subprocesses and remove their files in shared memory."""
        with suppress(MegatuneError):  # they are killed next
            self.group.call("close", limit=_CLOSE_SECONDS)

    def wake(self, *parts: Memory) -> None:
        """Reload these parts of the engines, or all parts, onto the devices."""
        if missing := self._asleep & set(parts or self._asleep):
            self.group.call("wake", *sorted(missing))
            self._asleep -= missing
            if not self._asleep:
                self._start_lost()
            self.loop.call_soon(self._dispatch)

    def admit(self) -> bool:
        """Admit restarted engines, and return whether there are any. Waits for engines that are starting if other roles
        are about to use their devices, or no other engine is left."""
        while self._restarts and (self._asleep or not self.group.ranks):
            self.group.run(asyncio.wait(set(self._restarts.values())))
        ready, self._restarted = self._restarted, set()
        for rank in ready:
            self.group.admit(rank)
        return bool(ready)

    def mark_updated(self) -> None:
        """Note that all admitted engines have the current weights and can sample."""
        for rank in self.group.ranks:
            if rank not in self._current:
                print(f"{self.group.name}-{rank} was started again, has the weights, and samples", flush=True)
            self._current.add(rank)

    def _note_loss(self, rank: int) -> None:
        """Restart an engine, now or when the engines have their devices."""
        self._current.discard(rank)
        self._restarted.discard(rank)
        self._lost.add(rank)
        self._numbers[rank] = 0  # a new engine counts from the beginning
        self.on_loss()
        if not self._asleep:
            self._start_lost()

    def _start_lost(self) -> None:
        lost, self._lost = self._lost, set()
        for rank in lost:
            self._restarts[rank] = self.loop.create_task(self._restart(rank))

    async def _restart(self, rank: int) -> None:
        try:
            is_there = await self.group.restart(rank)
        finally:
            if self._restarts.get(rank) is asyncio.current_task():
                del self._restarts[rank]
        if is_there and self._static_weights:
            self.group.admit(rank)
            self.mark_updated()
            self._dispatch()
        elif is_there:
            self._restarted.add(rank)

    def _dispatch(self) -> None:
        """Give each waiting group to the engine with the fewest requests in flight."""
        chosen: dict[int, list[_PendingGroup]] = {rank: [] for rank in sorted(self._current)}
        while self._waiting and chosen and not self._asleep:
            requests, answer = self._waiting[0]
            engine = min(chosen, key=self._loads.__getitem__)
            if self._loads[engine] and self._loads[engine] + len(requests) > self._max_requests:
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
        if self._waiting and not chosen and not self._static_weights:
            self._interrupt()

    async def _call(
        self, engine: int, number: int, last: int, requests: Sequence[Request], answer: asyncio.Future[list[Response]]
    ) -> None:
        try:
            found = await self.group.start_one(engine, "generate", number, last, list(requests))
        except Exception as error:  # of the call itself; an error in an engine ends the run
            if not answer.done():
                answer.set_exception(error)
            return
        self._loads[engine] -= len(requests)
        if not found and not self._is_aborting:  # the engine was lost
            self._waiting.appendleft((requests, answer))
        elif not answer.done():  # done if cancelled
            answer.set_result(found[0] if found else [])
        self._dispatch()


class DeviceScheduler:
    """Schedules colocated roles: roles that share devices use them in turn (time-sharing); others are never moved.

    Args:
        judges: engines that run at the same time as the rollout engines, on other devices, which models may share.
    """

    def __init__(self, engines: EngineGroup, models: Sequence[ModelGroup], judges: Sequence[EngineGroup] = ()) -> None:
        self._engines, self._models, self._judges = engines, list(models), list(judges)

    def load(self, model: ModelGroup, checkpoint: str | None = None) -> None:
        """Free a model's devices and load it."""
        self._sleep_engines_of(model)
        for other in self._others(model):
            other.keep_on_device()
        model.load(checkpoint)

    def sample(self) -> None:
        """Give the devices to the engines and judges."""
        for model in self._models:
            if self.shares_devices(model) or self._judges_of(model):
                model.keep_on_device()
        for engines in (self._engines, *self._judges):
            engines.wake()

    def compute(self, model: ModelGroup, *parts: str) -> None:
        """Give the devices to a model that needs these parts; judges on them are idle."""
        self._sleep_engines_of(model)
        self._load_parts(model, parts)

    def transfer(self, model: ModelGroup) -> None:
        """Load the weights of both the model and the engines onto the devices. The engines' cache is reloaded by
        `sample`, after the model has left, to bound the peak memory."""
        for judge in self._judges_of(model):
            judge.sleep()
        self._load_parts(model, ("weights",))
        for other in self._models:
            if other is not model and self.shares_devices(other):
                other.keep_on_device()
        self._engines.wake("weights")

    def _sleep_engines_of(self, model: ModelGroup) -> None:
        if self.shares_devices(model):
            self._engines.sleep()
        for judge in self._judges_of(model):
            judge.sleep()

    def _judges_of(self, model: ModelGroup) -> list[EngineGroup]:
        return [judge for judge in self._judges if {*judge.role.devices} & {*model.role.devices}]

    def _load_parts(self, model: ModelGroup, parts: Sequence[str]) -> None:
        """Load these parts of a model onto devices that it shares, and unload the other models there."""
        others = self._others(model)
        for other in others:
            other.keep_on_device()
        if others or self.shares_devices(model) or self._judges_of(model):
            model.keep_on_device(*parts)

    def _others(self, model: ModelGroup) -> list[ModelGroup]:
        return [each for each in self._models if each is not model and {*each.role.devices} & {*model.role.devices}]

    def shares_devices(self, model: ModelGroup) -> bool:
        """Return whether a model shares a device with an engine."""
        return bool({*model.role.devices} & {*self._engines.role.devices})
