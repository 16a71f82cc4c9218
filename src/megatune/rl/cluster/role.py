"""What a role is made of, and where each of its actors runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
