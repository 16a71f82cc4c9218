"""The machines of a run, with a bundle of a Ray placement group on each: its devices, shared by all roles there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.world import LOOPBACK
from megatune.rl.cluster.machine import Machine

_PLACE_SECONDS = 120.0
_ANSWER_SECONDS = 60.0


class Placement:
    """A placement group with one bundle per machine, reserved until `close`.

    Args:
        per_machine: number of devices used on each machine.
        joined: whether the cluster was running already; then an actor on each machine inspects it.

    Attributes:
        machines: by bundle index.
        has_gpus: whether devices are GPUs, not CPU processes.
    """

    def __init__(self, run_dir: Path, per_machine: Sequence[int], *, joined: bool) -> None:
        self.has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        kind = "GPU" if self.has_gpus else "CPU"
        bundles = [{"CPU": max(1, number)} | {kind: max(1, number)} for number in per_machine]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        if not self._group.wait(_PLACE_SECONDS):
            remove_placement_group(self._group)
            raise MegatuneError(_no_room(bundles), ExitCode.UNAVAILABLE)
        if joined:
            gpus = [number if self.has_gpus else 0 for number in per_machine]
            # The actor reserves the bundle's GPUs, to learn their numbers for the other actors on its machine.
            self._actors = [self._place(node, number).remote(run_dir, None) for node, number in enumerate(gpus)]
            self.machines = [cast(Machine, _RemoteMachine(node, actor)) for node, actor in enumerate(self._actors)]
        else:
            self._actors = []
            self.machines = [Machine(run_dir, LOOPBACK)]

    def strategy(self, node: int) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that places an actor on a machine."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)

    def _place(self, node: int, gpus: int) -> Any:
        return ray.remote(Machine).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=self.strategy(node))

    def close(self) -> None:
        """Release the bundles."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


class _RemoteMachine:
    """A proxy of a `Machine` actor, with the same methods."""

    def __init__(self, node: int, actor: Any) -> None:
        self._node, self._actor = node, actor

    def __getattr__(self, method: str) -> Any:
        def ask(*args: Any) -> Any:
            try:
                return ray.get(getattr(self._actor, method).remote(*args), timeout=_ANSWER_SECONDS)
            except (RayActorError, GetTimeoutError) as error:
                what = f"machine {self._node} of the cluster does not answer any more"
                why = " ".join(str(error).split())
                finding = Finding(what, "", why, "check that it is up and in the network, then start again to resume")
                raise MegatuneError(finding, ExitCode.PROCESS_DIED) from error

        return ask


def _no_room(bundles: Sequence[Mapping[str, float]]) -> Finding:
    def text(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU"))

    needed = "; ".join(text(bundle) for bundle in bundles)
    what = f"the Ray cluster does not have room for this run's {len(bundles)} machines ({needed})"
    why = f"free now: {text(ray.available_resources())}, of {text(ray.cluster_resources())}"
    return Finding(what, "device_mapping", why, "use fewer devices, or wait until others have ended")
