"""A run's actors, on this machine or on a cluster that is already running."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from megatune.rl.cluster.group import Pending, RoleGroup
from megatune.rl.cluster.role import RoleSpec

HANG_SECONDS = 1800.0
CALL_SECONDS = 3600.0
START_SECONDS = 600.0


class Cluster(AbstractContextManager["Cluster"]):
    """Ray, started for this run on this machine, or the cluster that RAY_ADDRESS names; as a context manager, ends all.

    Colocated roles, which name the same devices, share them: they are to be called by turns.

    Args:
        run_dir: gets logs/ROLE-RANK.log, heartbeats/, ROLE-RANK.error.json and report.json.
        devices: of all roles together, global numbers.
        devices_per_node: devices of one machine.
        object_store_bytes: what objects in flight may take of this machine's memory; None to decide here.
        hang_timeout: seconds between two beats of an actor at work after which it counts as hung, unless the beat
            states a limit of its own.
        call_limit: seconds of a call that states no limit.

    Raises:
        MegatuneError: UNAVAILABLE, where Ray is not installed (extra "rl"), does not start, the cluster cannot be
            joined, or has fewer devices than are asked for.
    """

    def __init__(
        self,
        run_dir: Path,
        devices: Collection[int],
        *,
        devices_per_node: int = 8,
        object_store_bytes: int | None = None,
        hang_timeout: float = HANG_SECONDS,
        call_limit: float = CALL_SECONDS,
    ) -> None:
        raise NotImplementedError

    def start(self, specs: Sequence[RoleSpec], *, limit: float = START_SECONDS) -> dict[str, RoleGroup]:
        """Start roles, all at once, and return them by name; every object is built by then.

        Raises:
            MegatuneError: see `group.Pending.result`.
        """
        raise NotImplementedError

    def wait(self, calls: Sequence[Pending], *, seconds: float | None = None) -> list[Pending]:
        """Wait until one of the calls is done, for at most `seconds`, and return those that are.

        Raises:
            MegatuneError: see `group.Pending.result`.
        """
        raise NotImplementedError

    def stop(self, group: RoleGroup) -> None:
        """End a role's actors, and free its devices."""
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        raise NotImplementedError
