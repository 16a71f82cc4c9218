"""The table of a torch_dist checkpoint: its tensors, their chunks and their locations, checked against the files.

It is a pickle, which is read without executing anything: classes become records, and any other name rejects the file.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.megatron import METADATA

Shape = tuple[int, ...]
_MAX_DIMENSIONS = 8
# Ignored: optimizer state, random number states, the states of quantized layers and of the rerun state machine, and
# multi-token prediction layers, which are not trained.
_IGNORED = re.compile(
    r"(.*\.)?_extra_state(/.*)?|(chained_\d+\.)?optimizer(\..*)?|opt_param_scheduler.*|rng_state.*|rerun_state.*|mtp\..*"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: its corner and shape in the tensor, and its location in a file."""

    offsets: Shape
    sizes: Shape
    path: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks cover it once.

    Attributes:
        by_first: chunks by their index in dimension 0, if each has a single one; otherwise all under None.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    by_first: dict[int | None, list[Chunk]]

    def near(self, first: int, last: int) -> Iterable[Chunk]:
        """Return the chunks that may contain some of the indices first..last of dimension 0."""
        if None in self.by_first:
            return self.by_first[None]
        return (chunk for index in range(first, last) for chunk in self.by_first[index])


def read_table(folder: Path) -> dict[str, StoredTensor]:
    """Read which weights a checkpoint holds, without what Megatron needs only to resume.

    Every entry is checked against the files before anything is allocated.

    Raises:
        MegatuneError: with the file and its error (exit code 66).
    """
    path = folder / METADATA
    try:
        metadata = load_metadata(path.read_bytes(), str(path))
    except OSError as error:
        raise MegatuneError(Finding(f"cannot be read: {error.strerror}", str(path)), ExitCode.INPUT) from None
    try:
        return _Table(folder, metadata).tensors()
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {str(error)[:120]}"
        finding = Finding("is not a table of a checkpoint's tensors", str(path), why, "copy it again")
        raise MegatuneError(finding, ExitCode.INPUT) from None


class _Table:
    def __init__(self, folder: Path, metadata: Record) -> None:
        self._folder, self._where = folder, str(folder / METADATA)
        self._entries: dict[str, Record] = metadata.get("state_dict_metadata")
        self._files: dict[str, int] = {}
        self._places: dict[tuple[str, Shape], Record] = {}
        for index, info in metadata.get("storage_data").items():
            if index.get("offset") is not None:
                self._places[index.get("fqn"), _box(index.get("offset"))] = info

    def tensors(self) -> dict[str, StoredTensor]:
        found = {}
        for name, entry in self._entries.items():
            if entry.kind == "TensorStorageMetadata" and not _IGNORED.fullmatch(name):
                found[name] = self._tensor(name, entry)
        return found

    def _tensor(self, name: str, entry: Record) -> StoredTensor:
        properties = entry.get("properties").state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        shape = _box(entry.get("size"))
        if not isinstance(dtype, torch.dtype):
            raise self._invalid(f"{name!r} has no dtype")
        boxes = [(_box(each.get("offsets")), _box(each.get("sizes"))) for each in entry.get("chunks")]
        if problem := cover_problem(shape, boxes):
            raise self._invalid(f"{name!r} {list(shape)}: {problem}")
        chunks = [self._chunk(name, *box) for box in boxes]
        by_first: dict[int | None, list[Chunk]] = {None: chunks}
        if len(shape) > 1 and all(chunk.sizes[0] == 1 for chunk in chunks):
            by_first = {}
            for chunk in chunks:
                by_first.setdefault(chunk.offsets[0], []).append(chunk)
        for chunk in chunks:
            if math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
                raise self._invalid(f"{name!r} has {list(chunk.sizes)} of {dtype} in {chunk.length} bytes")
        return StoredTensor(name, dtype, shape, by_first)

    def _chunk(self, name: str, offsets: Shape, sizes: Shape) -> Chunk:
        info = self._places.get((name, offsets))
        if info is None:
            raise self._invalid(f"{name!r} has a chunk at {list(offsets)} without a file")
        file, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            raise self._invalid(f"{name!r} is compressed", "only uncompressed tensors are supported")
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise self._invalid(f"{name!r} has the invalid location {start!r}, {length!r} bytes")
        size = self._size(name, file)
        if start + length > size:
            what = f"{name!r} ends at byte {start + length} of {file}, which has {size}"
            raise self._invalid(what, "the file is truncated or was replaced")
        return Chunk(offsets, sizes, self._folder / file, start, length)

    def _size(self, name: str, file: Any) -> int:
        """Return the size in bytes of a file in the folder."""
        if file in self._files:
            return self._files[file]
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise self._invalid(f"{name!r} is in {file!r}", "that is outside the checkpoint's folder")
        path = self._folder / file
        if not path.is_file():
            raise self._invalid(f"{file} is missing", "", "copy the checkpoint again")
        self._files[file] = path.stat().st_size
        return self._files[file]

    def _invalid(
        self, what: str, why: str = "", fix: str = "copy the checkpoint again, or do not use it"
    ) -> MegatuneError:
        return MegatuneError(Finding(what[:300], self._where, why, fix), ExitCode.INPUT)


def _box(values: Any) -> Shape:
    """Validate sizes or offsets."""
    if not isinstance(values, tuple) or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"{values!r:.60} is not a valid shape")
    if not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise ValueError(f"{values!r:.60} is not a valid shape")
    return values


def cover_problem(shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> str:
    """Describe where boxes (offsets, sizes) do not cover a tensor exactly once; "" if they do.

    The corners of a box get alternating signs along each dimension. Boxes cover the tensor once if and only if the sums
    of their signs equal those of the tensor at its corners, and are zero everywhere else.
    """
    signs: Counter[Shape] = Counter()
    for offsets, sizes, sign in [((0,) * len(shape), shape, -1), *((*box, 1) for box in boxes)]:
        if not len(offsets) == len(sizes) == len(shape):
            return "a chunk has another number of dimensions"
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(first + end * size for first, size, end in zip(offsets, sizes, ends, strict=True))
            signs[corner] += -sign if sum(ends) % 2 else sign
    wrong = [corner for corner, total in signs.items() if total]
    return f"chunks overlap, or leave gaps, at {list(min(wrong))}" if wrong else ""


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
# Classes in a checkpoint's metadata. Plans of the saving processes are not needed, but become records, too.
_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
# The path where it was saved.
_PATHS = ("pathlib", "pathlib._local")
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("collections", "defaultdict"): lambda factory=None, *args: dict(*args),
    ("torch.serialization", "_get_layout"): str,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("builtins", "int"): int,
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}
_MAX_COMMON_BYTES = 1 << 28
_COMMANDS = (
    "os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "pty", "runpy", "importlib", "ctypes", "code",
)  # fmt: skip
_BUILTINS, _CALLS = ("builtins", "__builtin__"), ("eval", "exec", "compile", "__import__", "open", "breakpoint")


class Record:
    """Replaces an object of a class that is not loaded: the class's name, the arguments and the state."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute of the object; None if it does not exist."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _UnsafeName(Exception):  # noqa: N818  (becomes a MegatuneError with the file's name)
    pass


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        is_record = f"{module}.".startswith(_MODULES) or (module in _PATHS and name.endswith("Path"))
        if is_record and "." not in name:
            return self._kinds.setdefault(name, type(name, (Record,), {"kind": name}))
        raise _UnsafeName(f"{module}.{name}")


def load_metadata(data: bytes, where: str) -> Record:
    """Read the pickle of a checkpoint's `.metadata` as records.

    Raises:
        MegatuneError: a name in it does not belong to metadata; nothing of it has been executed (exit code 66).
    """
    try:
        found = _RestrictedUnpickler(data).load()
    except _UnsafeName as refused:
        raise unsafe_name_error(refused.args[0], where) from None
    except MemoryError:
        raise _unreadable(where, "it needs more memory than is available") from None
    except Exception as error:
        raise _unreadable(where, f"{type(error).__name__}: {str(error)[:120]}") from None
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise _unreadable(where, "it holds something other than a checkpoint's metadata")
    return found


def unsafe_name_error(name: str, where: str) -> MegatuneError:
    """Return the error for a pickle with a name that may run code."""
    what = f"names {name[:120]!r}, which weights never need"
    why = "a pickle can run what it names; this one was not executed"
    return MegatuneError(Finding(what, where, why, "do not use this file: find out who wrote it"), ExitCode.INPUT)


def check_common_file(path: Path) -> None:
    """Reject a `common.pt` that attacks its reader. It is not loaded here, but Megatron-Core unpickles it.

    It may hold any settings, so only names that run commands are rejected. They are found without loading it.

    Raises:
        MegatuneError: with the name that it would run (exit code 66).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            names = list(_names(archive.read(info) if info.file_size < _MAX_COMMON_BYTES else b"."))
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # it is not a readable archive; zipfile raises NotImplementedError for an unknown compression
    for module, name in names:
        if module.partition(".")[0] in _COMMANDS or (module in _BUILTINS and name in _CALLS):
            what = f"names {f'{module}.{name}'[:120]!r}, which settings never need"
            why = "Megatron, which unpickles this file, would run it; it was not executed here"
            raise MegatuneError(Finding(what, str(path), why, "do not use this checkpoint"), ExitCode.INPUT)


def _names(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the modules and names in a pickle; texts that are combined later are yielded as adjacent pairs."""
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            module, _, name = str(argument).partition(" ")
            yield module, name
        elif isinstance(argument, str):
            texts.append(argument)
    yield from pairwise(texts)


def _unreadable(where: str, why: str) -> MegatuneError:
    return MegatuneError(Finding("cannot be read", where, why, "copy it again"), ExitCode.INPUT)
