"""A role: what it is made of, where each of its actors runs, and calls to them."""

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
    """A role: actors of one class, numbered from 0.

    Each actor builds `target` as Class(context, **arguments), with a `launch.context.RankContext` whose rank and
    world_size are the actor's number and the number of actors; where ranks meet, master_addr and master_port are
    rank 0's.

    Attributes:
        name: "actor_train"; actors are called "actor_train-0", as their logs.
        target: "package.module:Class".
        arguments: what pickles.
        devices: global numbers; device d is number d % devices_per_node of machine d // devices_per_node. GPUs, or
            processes of a machine without any.
        devices_per_actor: consecutive devices of one actor.
        rendezvous: the actors are ranks that meet in torch.distributed; each sees the role's devices of its machine
            (local_rank is its own). Otherwise each sees its own devices alone.
        is_server: the object does calls at once, and answers them with futures (`host.ServerHost`); they may arrive in
            another order than they were made in.
        restarts: how often each actor may be started again where it dies or hangs, once all were built; see
            `group.RoleGroup.restart`.
        environment: variables of the processes, above all others.
        py_executable: Python of another environment, with the same versions of Python and Ray.
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
    """Where an actor runs.

    Attributes:
        node: number of its machine among those that the run uses.
        visible: the devices that it sees.
        local_rank, local_world_size: among the actors of its role on its machine.
    """

    rank: int
    node: int
    visible: tuple[int, ...]
    local_rank: int
    local_world_size: int


def placements(spec: RoleSpec, devices_per_node: int, nodes: Sequence[int]) -> list[ActorPlacement]:
    """Place a role's actors.

    Args:
        nodes: the machines that the run's devices are on, in order.
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
LOST = object()  # in place of an answer, of an actor that was lost and may be started again


class Pending:
    """A call in flight to some actors of a role. Coroutines await its answers, and the driver's own code takes its
    `result`."""

    def __init__(self, watch: Watch, answers: Sequence[asyncio.Future[Any]]) -> None:
        self._watch, self._answers = watch, answers

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        return [found for each in self._answers if (found := await each) is not LOST]

    def result(self) -> list[Any]:
        """Wait, and return the answers in the order of the actors that were called; without those of actors that were
        lost meanwhile, and may be started again.

        Raises:
            MegatuneError: naming role, rank, phase, step, cause and log file of the first failure of any actor of the
                cluster meanwhile: PROCESS_DIED for one that died, hung or did not answer within the call's limit, else
                the exit code of what it raised.
        """
        return self._watch.run(self)


class RoleGroup:
    """The actors of a role. An actor does one call after another, in the order in which they were made, unless it is a
    server.

    Arguments and answers travel as pickles through Ray's object store: arrays arrive read-only, and tensors are of no
    graph. Arguments that several actors get are stored once a machine.

    An actor that may be started again is lost where it dies or hangs: calls go on with the others until it is
    admitted again.

    Args:
        start_again: starts an actor that was lost, and says whether it is there.

    Attributes:
        name: of the role.
        size: number of actors, those that are lost, too.
        changes: how often an actor was lost, or admitted again.
        loop: of the driver.
        on_loss: called with the rank of an actor that was lost.
    """

    def __init__(
        self,
        name: str,
        actors: Sequence[Actor],
        watch: Watch,
        call_limit: float,
        start_again: Callable[[Actor], Awaitable[bool]],
    ) -> None:
        self.name, self.size, self.changes = name, len(actors), 0
        self.loop, self.run = watch.loop, watch.run
        self.on_loss: Callable[[int], None] = lambda rank: None
        self._actors, self._present = actors, set(range(len(actors)))
        self._watch, self._call_limit, self._start_again = watch, call_limit, start_again
        for rank, actor in enumerate(actors):
            actor.on_loss = partial(self._note_loss, rank)

    @property
    def ranks(self) -> list[int]:
        """Of the actors that calls go to."""
        return sorted(self._present)

    async def restart(self, rank: int) -> bool:
        """Start the process of an actor that was lost, and build its object; return whether it is there. No call goes
        to it before `admit`."""
        return await self._start_again(self._actors[rank])

    def admit(self, rank: int) -> None:
        """Let calls go to an actor that was restarted."""
        self._present.add(rank)
        self.changes += 1

    def _note_loss(self, rank: int) -> None:
        self._present.discard(rank)
        self.changes += 1
        self.on_loss(rank)

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Call a method of every actor's object, and return their answers by rank.

        Args:
            limit: seconds for all of it; None for the cluster's.

        Raises:
            MegatuneError: see `Pending.result`.
        """
        return self.start(method, *args, limit=limit).result()

    def start(self, method: str, *args: Any, limit: float | None = None) -> Pending:
        """As `call`, without waiting."""
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
    """Put a value into Ray's object store, and return its reference.

    Raises:
        MegatuneError: OUT_OF_MEMORY, where the store is full.
    """
    import ray

    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        why = " ".join(str(error).split())
        fix = "a smaller rollout_batch_size; more room in /dev/shm"
        finding = Finding("Ray's object store has no room for the arguments of a call", "", why, fix)
        raise MegatuneError(finding, ExitCode.OUT_OF_MEMORY) from error
