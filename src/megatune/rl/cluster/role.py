"""Roles: their specification, the placement of their actors, and calls to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    import asyncio

    from megatune.rl.cluster.watch import Actor, Watch


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The specification of a role: actors of one class, numbered from 0.

    Each actor builds `target` as Class(context, **arguments), with a `launch.context.RankContext` whose rank and
    world_size are the actor's number and the number of actors; with `rendezvous`, master_addr and master_port are those
    of rank 0.

    Attributes:
        name: such as "actor_train"; actors and their logs are named "actor_train-0".
        target: "package.module:Class".
        arguments: must be picklable.
        devices: global numbers; device d is number d % devices_per_node of machine d // devices_per_node. GPUs, or CPU
            processes on a machine without GPUs.
        devices_per_actor: number of consecutive devices per actor.
        rendezvous: whether the actors are ranks of torch.distributed; then each sees all of the role's devices on its
            machine, and local_rank is its own. Otherwise each sees only its own devices.
        is_server: the object runs calls concurrently and answers them with futures (`host.AsyncRoleActor`); calls may
            arrive out of order.
        restarts: how often each actor may be restarted after it died or hung, once all were built; see
            `RoleGroup.restart`.
        environment: environment variables, which override all others.
        py_executable: the Python of another environment, with the same versions of Python and Ray.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    devices_per_actor: int = 1
    rendezvous: bool = False
    is_server: bool = False
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    py_executable: str | None = None

    @property
    def size(self) -> int:
        """Number of actors."""
        return len(self.devices) // self.devices_per_actor


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """The placement of an actor.

    Attributes:
        node: index of its machine among those of the run.
        visible: the devices that it sees.
        local_rank, local_world_size: among the actors of its role on its machine.
    """

    rank: int
    node: int
    visible: tuple[int, ...]
    local_rank: int
    local_world_size: int


def placements(spec: RoleSpec, devices_per_node: int, nodes: Sequence[int]) -> list[ActorPlacement]:
    """Return the placements of a role's actors.

    Args:
        nodes: the machines of the run's devices, in order.
    """
    step = spec.devices_per_actor
    own = [spec.devices[first : first + step] for first in range(0, len(spec.devices), step)]
    machines = [devices[0] // devices_per_node for devices in own]
    found = []
    for rank, (devices, machine) in enumerate(zip(own, machines, strict=True)):
        mates = [other for other, where in enumerate(machines) if where == machine]
        seen = [device for mate in mates for device in own[mate]] if spec.rendezvous else devices
        found.append(ActorPlacement(rank, nodes.index(machine), tuple(seen), mates.index(rank), len(mates)))
    return found


T = TypeVar("T")
LOST = object()  # the result of a call to an actor that was lost and may be restarted


class Pending:
    """A pending call to actors of a role. Coroutines await it; synchronous code of the driver calls `result`."""

    def __init__(self, watch: Watch, answers: Sequence[asyncio.Future[Any]]) -> None:
        self._watch, self._answers = watch, answers

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        return [found for each in self._answers if (found := await each) is not LOST]

    def result(self) -> list[Any]:
        """Wait, and return the results in the order of the called actors, without those of lost actors that may be
        restarted.

        Raises:
            MegatuneError: naming role, rank, phase, step, cause and log file of the first failure of any actor of the
                cluster meanwhile: PROCESS_DIED if it died, hung or exceeded the call's limit, else the exit code of the
                exception.
        """
        return self._watch.run(self)


class RoleGroup:
    """The actors of a role. An actor executes its calls in order, one at a time, unless it is a server.

    Arguments and results are pickled through Ray's object store: arrays arrive read-only, and tensors without autograd
    graph. Arguments for several actors are stored once per machine.

    If an actor that may be restarted dies or hangs, it is lost: calls go to the others until it is admitted again.

    Args:
        restart: restarts a lost actor, and returns whether it is running.

    Attributes:
        size: number of actors, including lost ones.
        changes: how often an actor was lost or admitted.
        loop: the driver's event loop.
        on_loss: called with the rank of a lost actor.
    """

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        watch: Watch,
        call_limit: float,
        restart: Callable[[Actor], Awaitable[bool]],
    ) -> None:
        self.name, self.size, self.changes = name, len(actors), 0
        self.loop, self.run = watch.loop, watch.run
        self.on_loss: Callable[[int], None] = lambda rank: None
        self._actors, self._present = actors, set(range(len(actors)))
        self._watch, self._call_limit, self._restart = watch, call_limit, restart
        for rank, actor in enumerate(actors):
            actor.on_loss = partial(self._note_loss, rank)

    @property
    def ranks(self) -> list[int]:
        """Ranks of the actors that get calls."""
        return sorted(self._present)

    async def restart(self, rank: int) -> bool:
        """Restart a lost actor and build its object; return whether it is running. It gets no calls before `admit`."""
        return await self._restart(self._actors[rank])

    def admit(self, rank: int) -> None:
        """Let a restarted actor get calls again."""
        self._present.add(rank)
        self.changes += 1

    def _note_loss(self, rank: int) -> None:
        self._present.discard(rank)
        self.changes += 1
        self.on_loss(rank)

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Call a method of every actor's object, and return the results by rank.

        Args:
            limit: time limit in seconds; None for the cluster's default.

        Raises:
            MegatuneError: see `Pending.result`.
        """
        return self.start(method, *args, limit=limit).result()

    def start(self, method: str, *args: Any, limit: float | None = None) -> Pending:
        """Start a `call` without waiting."""
        return self._start(method, dict.fromkeys(self.ranks, args), limit)

    def start_one(self, rank: int, method: str, *args: Any) -> Pending:
        """Call a method of one actor's object, without waiting."""
        return self._start(method, {rank: args}, None)

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Call a method of every actor's object with its own arguments, by rank, without waiting."""
        assert len(arguments) == self.size
        return self._start(method, {rank: arguments[rank] for rank in self.ranks}, None)

    def _start(self, method: str, arguments: Mapping[int, tuple[Any, ...]], limit: float | None) -> Pending:
        limit = self._call_limit if limit is None else limit
        own = {id(args): args for args in arguments.values()}
        stored = {key: store(args) if args and len(own) < len(arguments) else args for key, args in own.items()}
        answers = []
        for rank, args in arguments.items():
            actor = self._actors[rank]
            answers.append(self._watch.begin(method, limit, actor, actor.handle.call.remote(method, stored[id(args)])))
        return Pending(self._watch, answers)


def store(value: Any) -> Any:
    """Put a value into Ray's object store and return its reference.

    Raises:
        MegatuneError: OUT_OF_MEMORY, if the store is full.
    """
    import ray

    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        why = " ".join(str(error).split())
        fix = "reduce rollout_batch_size, or give /dev/shm more room"
        finding = Finding("Ray's object store has no room for the arguments of a call", "", why, fix)
        raise MegatuneError(finding, ExitCode.OUT_OF_MEMORY) from error
