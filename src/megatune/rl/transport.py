"""Weights on their way from the ranks that train to the engines that sample: a bucket at a time, its bytes once.

A sender packs a bucket into one buffer of bytes. Ray carries a `Parcel`: what is in the buffer, and where it is.
Engines read the bytes where they are:

    "file"    processes of one machine's CPU map the same memory, without a name in any folder
    "device"  an engine on one of the trainer's GPUs opens the buffer of that GPU's rank (CUDA IPC); to all others
              rank 0 broadcasts its buffer, by NCCL, or by gloo between machines without GPUs
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, TCPStore

from megatune.errors import ExitCode, Finding, MegatuneError

_ALIGNMENT = 16  # bytes: a tensor of any dtype may begin there
WAITING_BUCKETS = 2
_HERE, _BROKEN = "here", "broken"  # keys of the store: of each process that has come, and where one has gone
_POLL_SECONDS, _LOOK_SECONDS = 0.0005, 0.2  # between two looks at a broadcast, and at whether it is broken off
_MEETING = timedelta(seconds=120)  # that processes of a route wait for each other when it is opened
_BREAKING = timedelta(seconds=5)  # that the driver waits for the first sender's store
_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor: storage_device


class LostPeerError(Exception):
    """A broadcast broke off, as one of its processes has gone."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the weights of a run travel. Receivers are the processes of all engines that hold weights, in order.

    Attributes:
        senders: ranks of the trainer that pack buckets; the first one also broadcasts.
        listeners: receivers that get the broadcast.
        neighbors: ranks whose GPU is a receiver's, too, which opens their buffer.
        address, port: where the first sender and the listeners meet.
        seconds: that they wait for each other in a broadcast at most.
    """

    kind: Literal["file", "device"]
    senders: tuple[int, ...] = (0,)
    listeners: tuple[int, ...] = ()
    neighbors: tuple[int, ...] = ()
    address: str = ""
    port: int = 0
    seconds: float = 1800.0


def choose_route(
    trainer: Sequence[int], engines: Sequence[int], devices_per_node: int, *, on_gpus: bool, seconds: float
) -> Route:
    """Choose by where the processes are.

    Args:
        trainer, engines: devices of the trainer's ranks, and of the receivers.
        on_gpus: whether devices are GPUs; otherwise each is a process of its own.
    """
    machines = {device // devices_per_node for device in (trainer[0], *engines)}
    if not on_gpus and len(machines) == 1:
        return Route("file", seconds=seconds)
    shared = {*trainer} & {*engines} if on_gpus else set()
    ranks = {rank for rank, device in enumerate(trainer) if device in shared}
    listeners = tuple(place for place, device in enumerate(engines) if device not in shared)
    senders = tuple(sorted(ranks | {0} if listeners else ranks))
    return Route("device", senders, listeners, tuple(sorted(ranks)), seconds=seconds)


class Content(NamedTuple):
    """A tensor in a buffer.

    Attributes:
        dtype: torch's name of it.
        start: its first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is in a buffer, and where it is.

    Attributes:
        nbytes: of the buffer.
        file: path of the memory that is to be mapped.
        handles: of the buffer on each GPU, by the GPU's UUID.
    """

    contents: tuple[Content, ...]
    nbytes: int
    file: str = ""
    handles: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors."""
        sizes = (getattr(torch, each.dtype).itemsize * math.prod(each.shape) for each in self.contents)
        return sum(sizes)

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors, which are views of the buffer."""
        found = {}
        for name, dtype, shape, start in self.contents:
            kind = getattr(torch, dtype)
            found[name] = buffer[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
        return found


def merged(parcels: Sequence[Parcel | None]) -> Parcel | None:
    """Return the parcel of a bucket that several ranks have packed; None where none has."""
    found = [each for each in parcels if each is not None]
    handles = {gpu: handle for each in found for gpu, handle in each.handles.items()}
    return replace(found[0], handles=handles) if found else None


class Sender:
    """Packs buckets, on one of the route's ranks. Two buffers take turns: a bucket may be packed when all receivers are
    through with the last but one.

    Args:
        device: of the tensors.
        rank: of this process in the trainer.
    """

    def __init__(self, route: Route, device: torch.device, rank: int = 0) -> None:
        self._route, self._device = route, device
        self._has_neighbor = rank in route.neighbors
        self._buffers: list[_Memory] = [_Memory(), _Memory()]
        self._count = 0
        self._store: TCPStore | None = None
        self._group: Any = None
        self._work: Any = None

    def open(self, address: str) -> Route:
        """Open the place where listeners meet this rank, the first one, if there are any; return the route with it.

        Args:
            address: of this machine, as the listeners reach it.
        """
        if self._route.listeners:
            size = 1 + len(self._route.listeners)
            self._store = TCPStore(address, 0, size, is_master=True, wait_for_workers=False, timeout=_MEETING)
            self._route = replace(self._route, address=address, port=self._store.port)
        return self._route

    def join(self) -> None:
        """Meet the listeners, which come at the same time.

        Raises:
            MegatuneError: UNAVAILABLE, where NCCL would refuse to connect them.
        """
        if self._store is not None:
            self._group = _group(self._store, 0, self._route, self._device)

    def pack(self, bucket: Mapping[str, Tensor]) -> Parcel:
        """Copy whole tensors into a buffer."""
        contents, end = [], 0
        for name, tensor in bucket.items():
            contents.append(Content(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._buffers[self._count % WAITING_BUCKETS]
        self._count += 1
        in_file = self._route.kind == "file"
        memory.ensure(end, None if in_file else self._device)
        parcel = Parcel(tuple(contents), end, memory.path)
        for name, place in parcel.tensors(memory.buffer).items():
            place.copy_(bucket[name])
        if self._has_neighbor:  # torch keeps memory for ever whose handle nobody opens
            torch.cuda.synchronize()
            return replace(parcel, handles={_uuid(): _handle(memory.buffer[:end])})
        return parcel

    def broadcast(self) -> None:
        """Begin to send the last bucket to the listeners, which receive it meanwhile, once they have the one before.

        Raises:
            LostPeerError: one of them has gone.
        """
        if self._store is not None:
            self._wait()
            memory = self._buffers[(self._count - 1) % WAITING_BUCKETS]
            self._work = _broadcast(self._group, memory.buffer[: memory.used])

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None and self._store is not None:
            _finish(work, self._group, self._store)

    def free(self) -> None:
        """Give the buffers back, between updates."""
        with suppress(LostPeerError):  # who is left has answered for what it received
            self._wait()
        for memory in self._buffers:
            memory.free()


class Receiver:
    """Opens parcels, in one of the processes that hold an engine's weights."""

    def __init__(self, route: Route, number: int, device: torch.device) -> None:
        self._device, self._store = device, None
        if number in route.listeners:
            self._store = _store_of(route, _MEETING)
            self._group = _group(self._store, 1 + route.listeners.index(number), route, device)

    @contextmanager
    def opened(self, parcel: Parcel) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors; they are only valid inside, and must not be written to.

        Raises:
            LostPeerError: another process of the broadcast has gone.
        """
        if parcel.file:
            buffer = torch.from_file(parcel.file, shared=False, size=parcel.nbytes, dtype=torch.uint8)
        elif self._store is not None:
            buffer = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)
            _finish(_broadcast(self._group, buffer), self._group, self._store)
        else:
            buffer = _opened(parcel.handles[_uuid()])
        yield parcel.tensors(buffer)
        if buffer.is_cuda:  # the sender writes to it next
            torch.cuda.synchronize()


class _Memory:
    """A buffer that grows, on a device, or in a file without a name that other processes of the machine map."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.free()

    def free(self) -> None:
        """Give the memory back, as soon as no other process maps it."""
        if self._file is not None:
            os.close(self._file)
        self.buffer, self.used, self.path, self._file = torch.empty(0, dtype=torch.uint8), 0, "", None

    def ensure(self, nbytes: int, device: torch.device | None) -> None:
        """Have room for bytes: on a device, or in a file where that is None."""
        if len(self.buffer) < nbytes:
            self.free()
            if device is None:
                self._file = os.memfd_create("megatune-weights")
                os.ftruncate(self._file, nbytes)
                self.path = f"/proc/{os.getpid()}/fd/{self._file}"
                self.buffer = torch.from_file(self.path, shared=True, size=nbytes, dtype=torch.uint8)
            else:
                self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used = nbytes


def _store_of(route: Route, timeout: timedelta) -> TCPStore:
    """Return a client of the store by which the first sender and the listeners meet."""
    return TCPStore(route.address, route.port, None, wait_for_workers=False, timeout=timeout)


def break_off(route: Route) -> None:
    """Let all that meet, or wait in a broadcast of a route, know that one of them has gone: NCCL would wait for it."""
    if route.listeners:
        with suppress(RuntimeError):  # the first sender has gone, too
            _store_of(route, _BREAKING).set(_BROKEN, "")


def _group(store: TCPStore, rank: int, route: Route, device: torch.device) -> Any:
    """Join the group of the first sender and the listeners, beside whatever groups a process has of its own; None where
    one of them does not come.

    Raises:
        MegatuneError: see `Sender.join`.
    """
    size = 1 + len(route.listeners)
    everyone = [f"{_HERE}{each}" for each in range(size)]
    try:
        store.set(everyone[rank], ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "gloo")
        until = time.monotonic() + _MEETING.total_seconds()
        while not store.check(everyone):
            if store.check([_BROKEN]) or time.monotonic() > until:
                return None
            time.sleep(_LOOK_SECONDS)
        own, *others = [store.get(each).decode() for each in everyone]
        if other := next((each for each in others if each != own), None):
            if rank == 0:
                raise _versions_differ(own, other)
            return None
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=route.seconds)
            return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
        group = torch.distributed.ProcessGroupGloo(store, rank, size, _MEETING)
    except RuntimeError:
        return None
    group.set_timeout(timedelta(seconds=route.seconds))
    return group


def _versions_differ(own: str, other: str) -> MegatuneError:
    what, why = f"the trainer has NCCL {own}, and a rollout engine {other}", "NCCL connects processes of one version"
    fix = "install the trainer's version of torch, for the same CUDA, into the environment that py_executable names"
    return MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.UNAVAILABLE)


def _broadcast(group: Any, buffer: Tensor) -> Any:
    """Begin a broadcast, and return it."""
    options = BroadcastOptions()
    options.rootRank = 0
    try:
        if group is not None:
            return group.broadcast([buffer], options)
    except RuntimeError as error:
        raise LostPeerError from error
    raise LostPeerError


def _finish(work: Any, group: Any, store: TCPStore) -> None:
    """Wait for a broadcast."""
    try:
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                if store.check([_BROKEN]):
                    group.abort()
                    raise LostPeerError
        work.wait()
    except RuntimeError as error:
        raise LostPeerError from error


def _uuid() -> str:
    """Return the name of this process's GPU that it has in all processes."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _handle(buffer: Tensor) -> Any:
    """Return what another process opens a GPU's memory with."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)


def _opened(handle: Any) -> Tensor:
    """Open memory of this process's GPU; the GPU may have another number here."""
    rebuild, arguments = handle
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    opened: Tensor = rebuild(*arguments)
    return opened
