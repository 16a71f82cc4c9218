"""Share tokenization between N machines: each tokenizes every Nth chunk of rows, and sends it to the others through a
TCPStore.

All machines read all rows, which is cheap, and write the same blocks, so that order, mixing and resume positions do not
depend on the number of machines. A chunk is identified by its number, since all machines process the same chunks in the
same order. It is sent with a digest of its rows: a machine that has read other rows tokenizes them itself, and its
blocks are then reported as different.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megatune.data.samples import Sample

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 1.0  # interval of checks whether another machine has failed
_CONNECT_SECONDS = 60.0
_FAILED = "failed"
_PART_BYTES = 2**22  # of a value: the store closes the connection of a client that sends more than 8 MiB
_OWN = ("Encoded", "Document", "DocumentMedia", "RowError", "LengthError", "UnsupportedRow", "RowMetadata")
_IN_CHUNKS = {("megatune", name) for name in _OWN} | {
    ("numpy", name) for name in ("_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar")
}


class Machines(NamedTuple):
    """The index of this machine, the number of machines, and the address of their store."""

    number: int
    total: int
    host: str
    port: int


def open_store(host: str) -> TCPStore:
    """Open a store on this machine, which other machines know as `host`; it lives as long as the returned object."""
    from torch.distributed import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class Exchange:
    """A producer's connection to the producers of the other machines.

    Raises:
        MegatuneError: the store cannot be reached (exit code 69).
    """

    def __init__(self, machines: Machines) -> None:
        from torch.distributed import DistError, TCPStore

        self.machines = machines
        place = f"{machines.host}:{machines.port}"
        try:
            limit = timedelta(seconds=_CONNECT_SECONDS)
            self.store = TCPStore(machines.host, machines.port, is_master=False, timeout=limit, wait_for_workers=False)
        except (DistError, RuntimeError) as error:
            what = f"the process that reads the data cannot reach {place}, through which machines share its rows"
            finding = Finding(what, why=str(error).splitlines()[0], fix="allow connections between the machines")
            raise MegatuneError(finding, ExitCode.UNAVAILABLE) from error
        self._begun = 0

    def series(self) -> Series:
        """Begin the chunks of a pass over a data set; all machines begin passes in the same order."""
        self._begun += 1
        return Series(self, self._begun)

    def fail(self, why: str) -> None:
        """Report to the other machines that this one has failed."""
        self.store.set(_FAILED, f"machine {self.machines.number}: {why}")


@dataclass(slots=True)
class Series:
    """The chunks of one pass over a data set."""

    exchange: Exchange
    number: int
    _chunks: int = field(default=0, init=False)

    def next(self, samples: Sequence[Sample]) -> Chunk:
        """Return the next chunk, of these samples."""
        machines = self.exchange.machines
        state = xxhash.xxh3_128(pickle.dumps([(each.row.fields, each.row.raw, each.copies) for each in samples]))
        is_own = (self.number + self._chunks) % machines.total == machines.number
        key = f"chunk/{self.number}/{self._chunks}"
        self._chunks += 1
        return Chunk(self.exchange, key, state.hexdigest(), is_own)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that one machine encodes for all; on the others it is used like a future."""

    exchange: Exchange
    key: str
    rows: str  # digest of the rows read
    is_own: bool

    def give(self, encoded: Future[Any]) -> None:
        """Send the chunk that this machine has encoded."""
        if encoded.cancelled() or encoded.exception() is not None:
            return
        content, store = pickle.dumps((self.rows, encoded.result())), self.exchange.store
        starts = range(0, len(content), _PART_BYTES)
        for part, start in enumerate(starts):
            store.set(f"{self.key}/{part}", content[start : start + _PART_BYTES])  # type: ignore[arg-type]
        store.set(self.key, str(len(starts)))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the chunk; None if the other machine has read other rows.

        `timeout` is ignored: the ranks, which wait for this process, have a limit and report what they wait for.

        Raises:
            MegatuneError: the other machine's process has failed (exit code 76).
        """
        store, look_at = self.exchange.store, time.monotonic()
        while not store.check([self.key]):
            if (now := time.monotonic()) > look_at:
                look_at = now + _LOOK_SECONDS
                if store.check([_FAILED]):
                    what = "the process that reads the data failed on another machine, which tokenizes part of it"
                    raise MegatuneError(Finding(what, why=store.get(_FAILED).decode()), ExitCode.PROCESS_DIED)
            time.sleep(_POLL_SECONDS)
        parts = [f"{self.key}/{part}" for part in range(int(store.get(self.key)))]
        rows, encoded = _ChunkUnpickler(io.BytesIO(b"".join(map(store.get, parts)))).load()
        if store.add(f"{self.key}/read", 1) == self.exchange.machines.total - 1:
            for key in (self.key, *parts, f"{self.key}/read"):
                store.delete_key(key)
        return encoded if rows == self.rows else None


class _ChunkUnpickler(pickle.Unpickler):
    """Unpickles only the types of a chunk, so that data of another machine cannot execute code here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) not in _IN_CHUNKS:
            raise pickle.UnpicklingError(f"{module}.{name} is not a part of a chunk")
        return super().find_class(module, name)
