"""Calls to the actors of a role, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pending:
    """A call in flight to some actors of a role."""

    @property
    def done(self) -> bool:
        """Whether every actor has answered; `Cluster.wait` finds out."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Wait, and return the answers in the order of the actors that were called.

        Raises:
            MegatuneError: naming role, rank, phase, step, cause and log file of the first failure of any actor of the
                cluster meanwhile: PROCESS_DIED for one that died, hung or did not answer within the call's limit, else
                the exit code of what it raised.
        """
        raise NotImplementedError


class RoleGroup:
    """The actors of a role. An actor does one call after another, in the order in which they were made.

    Arguments and answers travel as pickles through Ray's object store: arrays arrive read-only, and tensors are of no
    graph. Arguments that several actors get are stored once a machine.

    Attributes:
        name: of the role.
        size: number of actors.
    """

    name: str
    size: int

    def call(self, method: str, *args: Any, limit: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every actor's object, and return their answers by rank.

        Args:
            limit: seconds for all of it; None for the cluster's.

        Raises:
            MegatuneError: see `Pending.result`.
        """
        return self.start(method, *args, limit=limit, **kwargs).result()

    def call_one(self, rank: int, method: str, *args: Any, limit: float | None = None, **kwargs: Any) -> Any:
        """Call a method of one actor's object; see `call`."""
        return self.start_one(rank, method, *args, limit=limit, **kwargs).result()[0]

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, limit: float | None = None) -> list[Any]:
        """Call a method of every actor's object with its own arguments, by rank; see `call`."""
        return self.start_each(method, arguments, limit=limit).result()

    def start(self, method: str, *args: Any, limit: float | None = None, **kwargs: Any) -> Pending:
        """As `call`, without waiting."""
        raise NotImplementedError

    def start_one(self, rank: int, method: str, *args: Any, limit: float | None = None, **kwargs: Any) -> Pending:
        """As `call_one`, without waiting."""
        raise NotImplementedError

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, limit: float | None = None) -> Pending:
        """As `call_each`, without waiting."""
        raise NotImplementedError
