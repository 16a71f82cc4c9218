"""Transfers weights from the trainer's ranks to the rollout engines, one bucket at a time.

A sender packs a bucket into a buffer. Ray only transports a `PackedBucket`, which describes the buffer and where it is.
Engines read the bytes directly:

    "file"    CPU processes of one machine map the same memory, an unnamed file
    "device"  an engine on one of the trainer's GPUs opens the buffer of that GPU's rank (CUDA IPC); to all others
              rank 0 broadcasts its buffer, by NCCL, or by gloo between machines without GPUs
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatune.rl.broadcast import RENDEZVOUS_TIMEOUT, BroadcastGroup, LostPeerError, abort_broadcast, connect_store

_ALIGNMENT = 16  # bytes; suitable for tensors of any dtype
NUM_BUFFERS = 2
_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor: storage_device


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a run's weights. Receivers are the processes of all engines that have weights, in order.

    Attributes:
        senders: ranks of the trainer that pack buckets; the first one also broadcasts.
        listeners: receivers of the broadcast.
        ipc_ranks: ranks that share a GPU with a receiver, which opens their buffer.
        address, port: of the rendezvous of the first sender and the listeners.
        seconds: timeout of a broadcast.
    """

    kind: Literal["file", "device"]
    senders: tuple[int, ...] = (0,)
    listeners: tuple[int, ...] = ()
    ipc_ranks: tuple[int, ...] = ()
    address: str = ""
    port: int = 0
    seconds: float = 1800.0

    def join(self, store: TCPStore, rank: int, device: torch.device) -> BroadcastGroup:
        """Join the broadcast; rank 0 is the first sender, and the listeners follow."""
        return BroadcastGroup(store, rank, 1 + len(self.listeners), device, timedelta(seconds=self.seconds))

    def abort(self) -> None:
        """Tell all processes in the rendezvous or a broadcast that one is gone."""
        if self.listeners:
            abort_broadcast(self.address, self.port)


def choose_route(
    trainer: Sequence[int], engines: Sequence[int], devices_per_node: int, *, on_gpus: bool, seconds: float
) -> Route:
    """Choose the route by the locations of the processes.

    Args:
        trainer, engines: devices of the trainer's ranks, and of the receivers.
        on_gpus: whether devices are GPUs, not CPU processes.
    """
    machines = {device // devices_per_node for device in (trainer[0], *engines)}
    if not on_gpus and len(machines) == 1:
        return Route("file", seconds=seconds)
    shared = {*trainer} & {*engines} if on_gpus else set()
    ranks = {rank for rank, device in enumerate(trainer) if device in shared}
    listeners = tuple(index for index, device in enumerate(engines) if device not in shared)
    senders = tuple(sorted(ranks | {0} if listeners else ranks))
    return Route("device", senders, listeners, tuple(sorted(ranks)), seconds=seconds)


class TensorSpec(NamedTuple):
    """A tensor in a buffer.

    Attributes:
        dtype: its name in torch.
        start: offset of the first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """The contents and the location of a buffer.

    Attributes:
        nbytes: size of the buffer.
        file: path of the memory to map.
        handles: CUDA IPC handles of the buffer on each GPU, by the GPU's UUID.
    """

    contents: tuple[TensorSpec, ...]
    nbytes: int
    file: str = ""
    handles: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(getattr(torch, each.dtype).itemsize * math.prod(each.shape) for each in self.contents)

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of the buffer."""
        found = {}
        for name, dtype, shape, start in self.contents:
            kind = getattr(torch, dtype)
            found[name] = buffer[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
        return found


def merge_buckets(packed: Sequence[PackedBucket | None]) -> PackedBucket | None:
    """Merge the descriptions of a bucket that several ranks have packed; return None after the last bucket."""
    found = [each for each in packed if each is not None]
    handles = {gpu: handle for each in found for gpu, handle in each.handles.items()}
    return replace(found[0], handles=handles) if found else None


class Sender:
    """Packs buckets on one of the route's ranks, alternating between two buffers: a bucket may be packed when all
    receivers have read the last but one.

    Args:
        device: device of the tensors.
        rank: rank of this process in the trainer.
    """

    def __init__(self, route: Route, device: torch.device, rank: int = 0) -> None:
        self._route, self._device = route, device
        self._uses_ipc = rank in route.ipc_ranks
        self._buffers: list[_Memory] = [_Memory(), _Memory()]
        self._count = 0
        self._store: TCPStore | None = None
        self._group: BroadcastGroup | None = None

    def open(self, address: str) -> Route:
        """Open the store of the rendezvous, on the first sender, if there are listeners; return the completed route.

        Args:
            address: address of this machine for the listeners.
        """
        if self._route.listeners:
            size = 1 + len(self._route.listeners)
            self._store = TCPStore(address, 0, size, True, RENDEZVOUS_TIMEOUT, wait_for_workers=False)
            self._route = replace(self._route, address=address, port=self._store.port)
        return self._route

    def join(self) -> None:
        """Connect with the listeners, which call `Receiver` at the same time.

        Raises:
            MegatuneError: UNAVAILABLE, if their versions of NCCL differ.
        """
        if self._store is not None:
            self._group = self._route.join(self._store, 0, self._device)

    def pack(self, bucket: Mapping[str, Tensor]) -> PackedBucket:
        """Copy tensors into a buffer."""
        contents, end = [], 0
        for name, tensor in bucket.items():
            contents.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._buffers[self._count % NUM_BUFFERS]
        self._count += 1
        in_file = self._route.kind == "file"
        memory.ensure(end, None if in_file else self._device)
        packed = PackedBucket(tuple(contents), end, memory.path)
        for name, view in packed.tensors(memory.buffer).items():
            view.copy_(bucket[name])
        if self._uses_ipc:  # only then: torch never frees memory whose handle is not opened
            torch.cuda.synchronize()
            return replace(packed, handles={_uuid(): _handle(memory.buffer[:end])})
        return packed

    def broadcast(self) -> None:
        """Start to broadcast the last bucket; see `BroadcastGroup.start`."""
        if self._group is not None:
            memory = self._buffers[(self._count - 1) % NUM_BUFFERS]
            self._group.start(memory.buffer[: memory.used])

    def free(self) -> None:
        """Free the buffers, between updates."""
        if self._group is not None:
            with suppress(LostPeerError):  # each receiver has reported whether it got everything
                self._group.wait()
        for memory in self._buffers:
            memory.free()


class Receiver:
    """Opens buckets in a process that has an engine's weights."""

    def __init__(self, route: Route, number: int, device: torch.device) -> None:
        self._device, self._group = device, None
        if number in route.listeners:
            store = connect_store(route.address, route.port)
            self._group = route.join(store, 1 + route.listeners.index(number), device)

    @contextmanager
    def opened(self, bucket: PackedBucket) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors, which are valid only inside the block, and read-only.

        Raises:
            LostPeerError: another process of the broadcast is gone.
        """
        if bucket.file:
            buffer = torch.from_file(bucket.file, shared=False, size=bucket.nbytes, dtype=torch.uint8)
        elif self._group is not None:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            self._group.start(buffer)
            self._group.wait()
        else:
            buffer = _open_handle(bucket.handles[_uuid()])
        yield bucket.tensors(buffer)
        if buffer.is_cuda:  # the sender overwrites it next
            torch.cuda.synchronize()


class _Memory:
    """A growable buffer, on a device, or in an unnamed file that other processes of the machine can map."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.free()

    def free(self) -> None:
        """Free the memory; a file is freed once no other process maps it."""
        if self._file is not None:
            os.close(self._file)
        self.buffer, self.used, self.path, self._file = torch.empty(0, dtype=torch.uint8), 0, "", None

    def ensure(self, nbytes: int, device: torch.device | None) -> None:
        """Make room for `nbytes` on a device, or in a file if that is None."""
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


def _uuid() -> str:
    """Return the UUID of this process's GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _handle(buffer: Tensor) -> Any:
    """Return the CUDA IPC handle of a buffer."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)


def _open_handle(handle: Any) -> Tensor:
    """Open a buffer on this process's GPU, which may have another index than in the sender."""
    rebuild, arguments = handle
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    opened: Tensor = rebuild(*arguments)
    return opened
