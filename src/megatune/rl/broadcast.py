"""The broadcast of weights: a process group of the first sender and the listeners, independent of their other groups,
that is aborted once one of its processes is gone; NCCL would wait for it."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, TCPStore

from megatune.errors import ExitCode, Finding, MegatuneError

_JOINED, _ABORTED = "joined", "aborted"  # keys of the store: one for each joined process, and one if a process is gone
_POLL_SECONDS, _ABORT_POLL_SECONDS = 0.0005, 0.2  # intervals of checking a broadcast, and whether it was aborted
RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
_ABORT_TIMEOUT = timedelta(seconds=5)  # for the driver to connect with the first sender's store


class LostPeerError(Exception):
    """A broadcast was aborted because one of its processes is gone."""


class BroadcastGroup:
    """Joins the group, which all of its processes do at the same time. If a process is gone, or does not join, `start`
    and `wait` raise `LostPeerError`.

    Args:
        store: of the rendezvous.
        rank: 0 for the sender.
        timeout: of a broadcast.

    Raises:
        MegatuneError: UNAVAILABLE, on the sender, if versions of NCCL differ.
    """

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self._store, self._work = store, None
        try:
            self._group = _join(store, rank, size, device, timeout)
        except RuntimeError:
            self._group = None

    def start(self, buffer: Tensor) -> None:
        """Start to broadcast a buffer, or to receive it, after the previous broadcast has finished."""
        self.wait()
        if self._group is None:
            raise LostPeerError
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._work = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise LostPeerError from error

    def wait(self) -> None:
        """Wait for the broadcast in progress, if any, and abort the group if a process is gone."""
        work, self._work = self._work, None
        try:
            checked = time.monotonic()
            while work is not None and not work.is_completed():
                time.sleep(_POLL_SECONDS)
                if time.monotonic() - checked > _ABORT_POLL_SECONDS:
                    checked = time.monotonic()
                    if self._store.check([_ABORTED]):
                        self._group.abort()
                        raise LostPeerError
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise LostPeerError from error


def connect_store(address: str, port: int, timeout: timedelta = RENDEZVOUS_TIMEOUT) -> TCPStore:
    """Connect with the store of a rendezvous."""
    return TCPStore(address, port, None, wait_for_workers=False, timeout=timeout)


def abort_broadcast(address: str, port: int) -> None:
    """Tell all processes in a rendezvous or a broadcast that one is gone."""
    with suppress(RuntimeError):  # the first sender is gone, too
        connect_store(address, port, _ABORT_TIMEOUT).set(_ABORTED, "")


def _join(store: TCPStore, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Return the process group; None if a process does not join."""
    everyone = [f"{_JOINED}{each}" for each in range(size)]
    store.set(everyone[rank], ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "gloo")
    until = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while not store.check(everyone):
        if store.check([_ABORTED]) or time.monotonic() > until:
            return None
        time.sleep(_ABORT_POLL_SECONDS)
    own, *others = [store.get(each).decode() for each in everyone]
    if other := next((each for each in others if each != own), None):
        if rank == 0:
            raise _versions_differ(own, other)
        return None
    if device.type == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    group = torch.distributed.ProcessGroupGloo(store, rank, size, RENDEZVOUS_TIMEOUT)
    group.set_timeout(timeout)
    return group


def _versions_differ(own: str, other: str) -> MegatuneError:
    what, why = f"the trainer has NCCL {own}, and a rollout engine {other}", "NCCL only connects equal versions"
    fix = "install the trainer's version of torch, for the same CUDA, into the environment that py_executable names"
    return MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.UNAVAILABLE)
