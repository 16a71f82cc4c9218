"""Machines tokenise a stream together: each every Nth chunk of rows, and sends it to the others through a store.

All machines read all rows, which costs little, and make the same blocks of them, so that order, mixing and the places
that a run resumes from do not depend on how many machines there are. A chunk is known by its number, since all machines
come to the same chunks in the same order. It goes with a digest of the rows that it was made of: a machine that has
read other rows tokenises them itself, and its blocks are then named as different.
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
_LOOK_SECONDS = 1.0  # between looks at whether another machine has failed
_CONNECT_SECONDS = 60.0
_FAILED = "failed"
_OWN = ("EncodedItems", "RowError", "LengthError", "UnsupportedRow", "DocumentPicture", "RowMetadata")
_IN_CHUNKS = {("megatune", name) for name in _OWN} | {
    ("numpy", name) for name in ("_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar")
}


class Machines(NamedTuple):
    """This machine among those of a run, and the store where they meet."""

    number: int
    total: int
    host: str
    port: int


def open_store(host: str) -> TCPStore:
    """Open a store on this machine, of which the other machines know it as `host`; it lasts as long as the object."""
    from torch.distributed import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class Exchange:
    """What the producer of one machine sends to the others, and gets from them.

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
        """Return the chunks of a pass over a data set that begins now; machines begin them in the same order."""
        self._begun += 1
        return Series(self, self._begun)

    def fail(self, why: str) -> None:
        """Tell the other machines that nothing more comes from this one."""
        self.store.set(_FAILED, f"machine {self.machines.number}: {why}")


@dataclass(slots=True)
class Series:
    """The chunks of one pass over a data set."""

    exchange: Exchange
    number: int
    _chunks: int = field(default=0, init=False)

    def next(self, samples: Sequence[Sample]) -> Chunk:
        """Return the part that this machine has in the chunk of these samples, the next one of the series."""
        machines = self.exchange.machines
        state = xxhash.xxh3_128(pickle.dumps([(each.row.fields, each.row.raw, each.copies) for each in samples]))
        is_own = (self.number + self._chunks) % machines.total == machines.number
        key = f"chunk/{self.number}/{self._chunks}"
        self._chunks += 1
        return Chunk(self.exchange, key, state.hexdigest(), is_own)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that one machine encodes for all; that of another machine is waited for as a future is."""

    exchange: Exchange
    key: str
    rows: str  # a digest of what was read
    is_own: bool

    def give(self, encoded: Future[Any]) -> None:
        """Send what this machine has encoded."""
        if encoded.cancelled() or encoded.exception() is not None:
            return
        content = pickle.dumps((self.rows, encoded.result()))
        self.exchange.store.set(self.key, content)  # type: ignore[arg-type]

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it; None where the other machine has made it of other rows.

        There is no limit but that of the ranks, which wait for this process and say for what.

        Raises:
            MegatuneError: the other machine's process has failed (exit code 76).
        """
        store, look_at = self.exchange.store, time.monotonic()
        while not store.check([self.key]):
            if (now := time.monotonic()) > look_at:
                look_at = now + _LOOK_SECONDS
                if store.check([_FAILED]):
                    what = "the process that reads the data failed on another machine, which tokenises part of it"
                    raise MegatuneError(Finding(what, why=store.get(_FAILED).decode()), ExitCode.PROCESS_DIED)
            time.sleep(_POLL_SECONDS)
        rows, encoded = _ChunkUnpickler(io.BytesIO(store.get(self.key))).load()
        if store.add(f"{self.key}/read", 1) == self.exchange.machines.total - 1:
            for key in (self.key, f"{self.key}/read"):
                store.delete_key(key)
        return encoded if rows == self.rows else None


class _ChunkUnpickler(pickle.Unpickler):
    """Makes nothing but what a chunk has in it, so that what comes from another machine runs nothing here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) not in _IN_CHUNKS:
            raise pickle.UnpicklingError(f"{module}.{name} is not a part of a chunk")
        return super().find_class(module, name)
