"""Starts a run's actors, on this machine or on a Ray cluster that is already running."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.launch.processes import rank_environment
from megatune.launch.world import LOOPBACK, RankEnv
from megatune.rl.cluster import session
from megatune.rl.cluster.role import LOST, ActorPlacement, RoleGroup, RoleSpec, placements
from megatune.rl.cluster.timeline import Timeline, new_timeline, write_timeline
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.rewards.task import ray_scorer

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole
    from megatune.rl.cluster.watch import Actor

CALL_SECONDS = 3600.0
START_SECONDS = 600.0
STORE_BYTES = 2**30  # of objects in flight


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray instance started for this run, or the cluster of RAY_ADDRESS; as a context manager, it ends all actors.

    Colocated roles name the same devices and must use them in turn (see `DeviceScheduler`).

    Args:
        run_dir: gets logs/ROLE-RANK.log, heartbeats/, ROLE-RANK.error.json and report.json.
        devices: global numbers of the devices of all roles.
        devices_per_node: number of devices per machine.
        bytes_in_flight: size of the objects in transfer at once, a step's samples. The object store on this machine has
            room for them if there is enough memory; Ray spills the rest to disk.
        call_limit: default time limit of calls, in seconds.
        timeline: path of the trace to write at the end; None for no trace.

    Raises:
        MegatuneError: UNAVAILABLE, if Ray is not installed (extra "rl") or does not start, or the cluster cannot be
            joined or has too few devices.
    """

    def __init__(
        self,
        run_dir: Path,
        devices: Collection[int],
        *,
        devices_per_node: int = 8,
        bytes_in_flight: int = STORE_BYTES,
        call_limit: float = CALL_SECONDS,
        timeline: Path | None = None,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._devices_per_node, self._call_limit = devices_per_node, call_limit
        for name in ("logs", "heartbeats"):
            (self._run_dir / name).mkdir(parents=True, exist_ok=True)
        self._nodes = sorted({device // devices_per_node for device in devices}) or [0]
        used = [sorted({each for each in devices if each // devices_per_node == node}) for node in self._nodes]
        per_node = [len(own) for own in used]
        self._joined = joined = bool(os.environ.get("RAY_ADDRESS"))
        own_gpus = 0 if joined else _ensure_devices(used, devices_per_node)
        new_timeline(self._run_dir, wanted=timeline is not None)
        self._timeline = Timeline(self._run_dir, "driver")
        with contextlib.ExitStack() as stack:
            if timeline is not None:
                stack.callback(write_timeline, self._run_dir, timeline)
            stack.callback(self._timeline.end)
            slots = max(1, per_node[0])
            store = session.store_bytes(bytes_in_flight)
            self._folder = stack.enter_context(session.ray_session(slots, own_gpus, store, self._run_dir))
            from megatune.rl.cluster.placement import Placement  # these import Ray, after its variables are set
            from megatune.rl.cluster.watch import Watch

            self._services = {} if joined else session.services()
            self._placement = Placement(self._run_dir, per_node, joined=joined)
            stack.callback(self._leave)
            self._machines = self._placement.machines
            self._infos = [machine.info() for machine in self._machines]
            self._gpus = self._name_gpus(used, joined)
            self._watch = Watch(self._run_dir, self._machines, self._services)
            self._own = RankContext(RankEnv(0, 0, 1, 1, LOOPBACK, 0, 0), self._run_dir, role="driver")
            self._count = itertools.count()
            self._ports: set[tuple[int, int]] = set()
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def _name_gpus(self, used: Sequence[Sequence[int]], joined: bool) -> dict[int, str]:
        """Return the CUDA device name of each device on its machine; {} if devices are CPU processes."""
        if not self._placement.has_gpus:
            return {}
        names: dict[int, str] = {}
        for info, devices in zip(self._infos, used, strict=True):
            # On a shared cluster, Ray chose the GPUs of a bundle; on this machine, devices are indices.
            indices = range(len(devices)) if joined else [device % self._devices_per_node for device in devices]
            names |= {device: info.gpus[index] for device, index in zip(devices, indices, strict=True)}
        return names

    def start(self, specs: Sequence[RoleSpec], *, limit: float = START_SECONDS) -> dict[str, RoleGroup]:
        """Start roles in parallel, build their objects, and return them by name.

        Raises:
            MegatuneError: see `role.Pending.result`; UNAVAILABLE, if a py_executable cannot be used.
        """
        from megatune.rl.cluster.watch import Actor

        session.ensure_pythons([spec.py_executable for spec in specs if spec.py_executable])
        groups: dict[str, RoleGroup] = {}
        started: list[tuple[Actor, RoleSpec, tuple[str, int]]] = []
        for spec in specs:
            places = placements(spec, self._devices_per_node, self._nodes)
            rendezvous = self._rendezvous(places[0]) if spec.rendezvous else (LOOPBACK, 0)
            actors = [
                Actor(spec.name, placement, self._infos[placement.node].host, next(self._count)) for placement in places
            ]
            restart = partial(self._start, spec, rendezvous, START_SECONDS)
            groups[spec.name] = RoleGroup(spec.name, actors, self._watch, self._call_limit, restart)
            started += [(actor, spec, rendezvous) for actor in actors]

        async def start_all() -> None:
            await asyncio.gather(*(self._start(spec, rendezvous, limit, actor) for actor, spec, rendezvous in started))

        self._watch.run(start_all())
        for actor, spec, _ in started:
            actor.restarts = spec.restarts
        return groups

    async def _start(self, spec: RoleSpec, rendezvous: tuple[str, int], limit: float, actor: Actor) -> bool:
        """Start the process of an actor and build its object; return whether it was not lost meanwhile.

        Args:
            rendezvous: address and port at which the ranks of the role meet.
        """
        until = time.monotonic() + limit
        actor.begin(self._create_actor(spec, actor.placement, rendezvous))
        pid = await self._watch.begin("start", limit, actor, actor.handle.pid.remote())
        if pid is LOST:
            return False
        actor.state.pid = pid
        self._watch.actors.append(actor)
        building = actor.handle.build.remote(spec.target, dict(spec.arguments))
        return await self._watch.begin("build", until - time.monotonic(), actor, building) is not LOST

    def reward_pool(self, rewards: Mapping[str, RewardRole]) -> RewardPool:
        """Return the pool of processes that score samples, on all machines of the run."""
        strategies = [self._placement.strategy(node) for node in range(len(self._machines))]
        return RewardPool(rewards, ray_scorer(strategies), log_dir=self._run_dir / "logs", machines=len(strategies))

    def note(self, phase: str, step: int) -> None:
        """Record the phase and step of the run, for failure reports and heartbeats/driver-0."""
        self._watch.position = phase, step
        self._own.beat(phase, step)
        self._timeline.begin(phase, step)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _rendezvous(self, first: ActorPlacement) -> tuple[str, int]:
        """Return the address of the first rank's machine, and a port there that no other role uses."""
        machine = self._machines[first.node]
        while (found := (first.node, machine.free_port())) in self._ports:
            pass
        self._ports.add(found)
        return self._infos[first.node].address, found[1]

    def _create_actor(self, spec: RoleSpec, placement: ActorPlacement, rendezvous: tuple[str, int]) -> Any:
        """Start an actor's process."""
        import ray

        from megatune.rl.cluster.host import ActorConfig, AsyncRoleActor, RoleActor

        env = RankEnv(
            placement.rank, placement.local_rank, spec.size, placement.local_world_size, *rendezvous, placement.node
        )
        config = ActorConfig(spec.name, env, self._run_dir, os.getcwd(), () if spec.py_executable else tuple(sys.path))
        runtime: dict[str, Any] = {"env_vars": self._environment(spec, placement, env)}
        if spec.py_executable:
            runtime["py_executable"] = spec.py_executable
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": self._placement.strategy(placement.node)}
        # `ps` shows the name of the class.
        kind = type(f"{spec.name}-{placement.rank}", (AsyncRoleActor if spec.is_server else RoleActor,), {})
        return ray.remote(kind).options(runtime_env=runtime, **options).remote(config)

    def _environment(self, spec: RoleSpec, placement: ActorPlacement, env: RankEnv) -> dict[str, str]:
        """Return the environment variables that an actor's process gets in addition to those of its machine."""
        threads = rank_environment({}, placement.local_world_size)
        variables = {name: os.environ.get(name, value) for name, value in threads.items()}
        if not spec.rendezvous:  # only for ranks of Megatron-Core: an engine overlaps copies with compute
            del variables["CUDA_DEVICE_MAX_CONNECTIONS"]
        if spec.py_executable:
            variables["PYTHONPATH"] = session.package_path(self._folder)
        elif "PYTHONPATH" in os.environ:
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[device] for device in placement.visible)
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        if spec.rendezvous:
            variables |= env.variables()
        elif not self._joined:  # removed at the end with the files that engines leave there
            variables["TMPDIR"] = str(self._folder)
        return variables | dict(spec.environment)

    def _leave(self) -> None:
        if session.are_alive(self._services):  # otherwise the calls would hang
            self._placement.close()

    def _end(self) -> None:
        self._watch.close()
        for number, machine in enumerate(self._machines):
            with contextlib.suppress(MegatuneError):  # the machine is gone
                actors = (actor for actor in self._watch.actors if actor.machine == number)
                machine.kill({actor.name: actor.state.pid for actor in actors})


def _ensure_devices(used: Sequence[Sequence[int]], devices_per_node: int) -> int:
    """Return how many GPUs of this machine a run that starts Ray itself uses; 0 on a machine without GPUs.

    Raises:
        MegatuneError: UNAVAILABLE, if the devices are on several machines, or this machine has too few.
    """
    if len(used) > 1:
        what = f"the run's devices are on {len(used)} machines, of {devices_per_node} devices each"
        why = "RAY_ADDRESS is not set, so the run has only this machine"
        fix = "start a Ray cluster on them (`ray start`) and set RAY_ADDRESS, or use a device_mapping of one machine"
        raise MegatuneError(Finding(what, "device_mapping", why, fix), ExitCode.UNAVAILABLE)
    gpus = len(session.visible_gpus())
    highest = max((device % devices_per_node for device in used[0]), default=0)
    if gpus and highest >= gpus:
        what, fix = f"device {highest} on a machine that shows {gpus} GPUs", f"use devices from 0 to {gpus - 1}"
        raise MegatuneError(Finding(what, "device_mapping", "", fix), ExitCode.UNAVAILABLE)
    return min(gpus, max(1, len(used[0])))
