"""Machines tokenise a stream together: each every Nth chunk of rows, and sends it to the others through a store.

All machines read all rows, which costs little, and make the same blocks of them, so that order, mixing and the places
that a run resumes from do not depend on how many machines there are. A chunk is known by its number, since all machines
come to the same chunks in the same order. It goes with a digest of the rows that it was made of: a machine that has
read other rows tokenises them itself, and its blocks are then named as different. It goes as arrays and JSON, so that
what comes from another machine runs nothing here.
"""

from __future__ import annotations

import io
import json
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from megatune.data.bad_rows import LengthError, RowError, UnsupportedRow
from megatune.data.pictures import DocumentPicture
from megatune.data.samples import Facts
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megatune.data.samples import Sample

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 1.0  # between looks at whether another machine has failed
_CONNECT_SECONDS = 60.0
_FAILED = "failed"
_PROBLEMS = {kind.__name__: kind for kind in (RowError, LengthError, UnsupportedRow)}


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
        owner = (self.number + self._chunks) % machines.total
        key = f"chunk/{self.number}/{self._chunks}"
        self._chunks += 1
        return Chunk(self.exchange, key, state.hexdigest(), owner, owner == machines.number)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that one machine encodes for all; that of another machine is waited for as a future is."""

    exchange: Exchange
    key: str
    rows: str  # a digest of what was read
    owner: int
    is_own: bool

    def give(self, encoded: Future[Any]) -> None:
        """Send what this machine has encoded."""
        if encoded.cancelled() or encoded.exception() is not None:
            return
        self.exchange.store.set(self.key, _to_bytes(self.rows, encoded.result()))  # type: ignore[arg-type]

    def done(self) -> bool:
        """Return whether it has come."""
        return bool(self.exchange.store.check([self.key]))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it; None where the other machine has made it of other rows.

        There is no limit but that of the ranks, which wait for this process and say for what.

        Raises:
            MegatuneError: the other machine's process has failed (exit code 76).
        """
        store, look_at = self.exchange.store, time.monotonic()
        while not self.done():
            if (now := time.monotonic()) > look_at:
                look_at = now + _LOOK_SECONDS
                if store.check([_FAILED]):
                    raise _peer_failed(store.get(_FAILED).decode())
            time.sleep(_POLL_SECONDS)
        rows, encoded = _from_bytes(store.get(self.key))
        if store.add(f"{self.key}/read", 1) == self.exchange.machines.total - 1:
            for key in (self.key, f"{self.key}/read"):
                store.delete_key(key)
        return encoded if rows == self.rows else None


def _peer_failed(what: str) -> MegatuneError:
    finding = Finding("the process that reads the data failed on another machine, which tokenises part of it", why=what)
    return MegatuneError(finding, ExitCode.PROCESS_DIED)


def _to_bytes(rows: str, encoded: Any) -> bytes:
    """Write the digest of a chunk's rows and what `workers` has made of them."""
    tokens, labels, sizes, pictures, results, facts = encoded
    flat = [picture for document in pictures for picture in document]
    noted = {
        "rows": rows,
        "sizes": sizes,
        "pictures": list(map(len, pictures)),
        "entries": [[*picture[:5], len(picture.packed)] for picture in flat],
        "results": [each if isinstance(each, tuple) else _problem(each) for each in results],
        "facts": facts,
    }
    text = np.frombuffer(json.dumps(noted, default=np.generic.item).encode(), np.uint8)
    content = np.frombuffer(b"".join(picture.packed for picture in flat), np.uint8)
    file = io.BytesIO()
    np.savez(file, tokens=tokens, labels=labels, noted=text, content=content)
    return file.getvalue()


def _from_bytes(content: bytes) -> tuple[str, Any]:
    """Return what `_to_bytes` was given."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        noted, held = json.loads(arrays["noted"].tobytes()), arrays["content"].tobytes()
        tokens, labels = arrays["tokens"], arrays["labels"]
    borders = pairwise(accumulate((size for *_, size in noted["entries"]), initial=0))
    flat = [
        DocumentPicture(start, count, tuple(grid), seconds, is_video, held[begin:end])
        for (start, count, grid, seconds, is_video, _), (begin, end) in zip(noted["entries"], borders, strict=True)
    ]
    pictures = [tuple(flat[a:b]) for a, b in pairwise(accumulate(noted["pictures"], initial=0))]
    results = [_PROBLEMS[each[0]](*each[1:]) if isinstance(each[0], str) else tuple(each) for each in noted["results"]]
    facts = [Facts(tuple(missing), *others) for missing, *others in noted["facts"]]
    return noted["rows"], (tokens, labels, noted["sizes"], pictures, results, facts)


def _problem(error: RowError | UnsupportedRow) -> list[Any]:
    if isinstance(error, UnsupportedRow):
        return [UnsupportedRow.__name__, error.what, error.fix]
    length = [error.length] if isinstance(error, LengthError) else []
    return [type(error).__name__, error.code, error.reason, error.detail, *length]
