"""Pickles read without executing anything: classes become records of ours, and any other name refuses the file."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatune.errors import ExitCode, Finding, MegatuneError

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
# Of a checkpoint's metadata. Plans of the processes that saved it are noise, and become records, too.
_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
# Where it was saved.
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
_MOST_COMMON_BYTES = 1 << 28
_COMMANDS = (
    "os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "pty", "runpy", "importlib", "ctypes", "code",
)  # fmt: skip
_BUILTINS, _CALLS = ("builtins", "__builtin__"), ("eval", "exec", "compile", "__import__", "open", "breakpoint")


class Record:
    """What stands for an object of a class that is not loaded: its class's name, its arguments and its state."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute of the object; None where it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Refused(Exception):  # noqa: N818  (becomes a MegatuneError with the file's name)
    pass


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        is_record = f"{module}.".startswith(_MODULES) or (module in _PATHS and name.endswith("Path"))
        if is_record and "." not in name:
            return self._kinds.setdefault(name, type(name, (Record,), {"kind": name}))
        raise _Refused(f"{module}.{name}")


def load_metadata(data: bytes, where: str) -> Record:
    """Read the pickle of a checkpoint's `.metadata` as records.

    Raises:
        MegatuneError: INPUT, naming what in it is none of a checkpoint's metadata; nothing of it has been executed.
    """
    try:
        found = _Restricted(data).load()
    except _Refused as refused:
        raise refused_name(refused.args[0], where) from None
    except MemoryError:
        raise _no_pickle(where, "it asks for more memory than there is") from None
    except Exception as error:
        raise _no_pickle(where, f"{type(error).__name__}: {str(error)[:120]}") from None
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise _no_pickle(where, "it holds something other than a checkpoint's metadata")
    return found


def refused_name(name: str, where: str) -> MegatuneError:
    """Return what to raise of a pickle that names something that may run code."""
    what = f"names {name[:120]!r}, which no weights need"
    why = "a pickle can run what it names; nothing of this one was run"
    return MegatuneError(Finding(what, where, why, "do not use this file: find out who wrote it"), ExitCode.INPUT)


def check_unread(path: Path) -> None:
    """Refuse a `common.pt` that attacks whoever loads it. Nothing here does; Megatron-Core unpickles it.

    It may hold any settings, so that only names are refused that run commands. They are read without loading it.

    Raises:
        MegatuneError: INPUT, naming what it would run.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            names = list(_names(archive.read(info) if info.file_size < _MOST_COMMON_BYTES else b"."))
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # nothing that is read here; zipfile raises the last one for a compression that it does not know
    for module, name in names:
        if module.partition(".")[0] in _COMMANDS or (module in _BUILTINS and name in _CALLS):
            what = f"names {f'{module}.{name}'[:120]!r}, which no settings need"
            why = "Megatron, which unpickles this file, would run it; nothing of it was run here"
            raise MegatuneError(Finding(what, str(path), why, "do not use this checkpoint"), ExitCode.INPUT)


def _names(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that a pickle asks for; those that are texts before their use as pairs in order."""
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            module, _, name = str(argument).partition(" ")
            yield module, name
        elif isinstance(argument, str):
            texts.append(argument)
    yield from pairwise(texts)


def _no_pickle(where: str, why: str) -> MegatuneError:
    return MegatuneError(Finding("cannot be read", where, why, "copy it again"), ExitCode.INPUT)
