"""Puts faults into processes of a run: which rank, at which step, in which phase, at which function.

Nothing in the product knows of it. A test puts this folder on PYTHONPATH (`environment`), and `sitecustomize` wraps the
named functions as their modules are imported; or a test calls `installed` in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "MEGATUNE_TEST_FAULTS"
BROKEN = 88  # how a process ends whose faults cannot be read or placed

# Where a fault strikes; any other function has its own name, "package.module:Class.function".
POINTS = {
    "beat": "megatune.launch.context:RankContext.beat",
    "load": "megatune.bridge.assemble:load_model",
    "data": "megatune.data.batches:Collator.__call__",
    "forward": "megatron.core.pipeline_parallel.schedules:forward_step",
    "backward": "megatron.core.pipeline_parallel.schedules:backward_step",
    "optimizer": "megatune.engine.optimizer:step",
    "collective": "torch.distributed:all_reduce",
    "save.write": "megatune.bridge.file_set:TensorFile.write",
    "save.commit": "megatune.training.storage.store:CheckpointStore.commit",
}
_AFTER = ("short write", "bit flip", "nan")  # they change what a function has made


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: of KINDS.
        at: of POINTS, or a function by its whole name.
        rank: None for all.
        step, phase: of the rank's last beat, where they matter.
        nth: which of the calls that match, from 1.
        times: for how many calls from that one on.
        when: "before" or "after" the function; what changes a result or a file is after it.
        value: of an exception its text, of an exit its code, of a signal its name, of a delay or a jump of the clock
            its seconds, of a full disk the bytes that still fit in a file, of full memory those that can still be had.
        once: not again in processes that are started later, such as those of a restart.
    """

    kind: str
    at: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    nth: int = 1
    times: int = 1
    when: str = ""
    value: Any = None
    once: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is called {self.kind!r}: {', '.join(KINDS)}")
        if self.at not in POINTS and ":" not in self.at:
            raise ValueError(f"no point is called {self.at!r}: {', '.join(POINTS)}, or package.module:function")
        if not self.when:
            object.__setattr__(self, "when", "after" if self.kind in _AFTER else "before")
        if self.when not in ("before", "after") or (self.when == "before" and self.kind in _AFTER):
            raise ValueError(f"{self.kind} cannot be {self.when!r}")
        if self.kind == "skip" and self.when == "after":
            raise ValueError("what was called is not skipped")

    @property
    def function(self) -> str:
        """ "package.module:Class.function"."""
        return POINTS.get(self.at, self.at)


@dataclass(slots=True)
class _Armed:
    """The faults of this process, where it is, and how many calls matched."""

    faults: Sequence[Fault]
    fired: Path | None
    place: dict[str, Any] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def due(self, index: int) -> bool:
        """Count a call that matches, and return whether the fault strikes at it."""
        fault = self.faults[index]
        rank = self.place.get("rank", os.environ.get("RANK"))
        wanted = {"rank": fault.rank, "step": fault.step, "phase": fault.phase}
        there = {**self.place, "rank": None if rank is None else int(rank)}
        if any(value is not None and there.get(name) != value for name, value in wanted.items()):
            return False
        self.counts[index] = count = self.counts.get(index, 0) + 1
        if not fault.nth <= count < fault.nth + fault.times:
            return False
        if count == fault.nth and fault.once and any(each["fault"] == index for each in firings(self.fired)):
            self.counts[index] = fault.nth + fault.times
            return False
        self._note(index, int(rank) if rank is not None else None)
        return True

    def _note(self, index: int, rank: int | None) -> None:
        if self.fired is None:
            return
        line = json.dumps({"fault": index, "time": time.time(), "pid": os.getpid(), **self.place, "rank": rank})
        descriptor = os.open(self.fired, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"{line}\n".encode())  # in one call, as several ranks write
        finally:
            os.close(descriptor)


def firings(fired: Path | None) -> list[dict[str, Any]]:
    """What struck, in its order: "fault" (its place in the list), "time" (seconds since the epoch), "pid", "rank",
    "step", "phase"."""
    if fired is None or not fired.exists():
        return []
    return [json.loads(line) for line in fired.read_text().splitlines()]


def environment(faults: Sequence[Fault], fired: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a run into which the faults are put; `fired` is the file where they note that they struck."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [base.get("PYTHONPATH")])])
    asked = {"faults": [asdict(fault) for fault in faults], "fired": str(fired)}
    return {**base, "PYTHONPATH": path, VARIABLE: json.dumps(asked)}


def install_from_environment() -> None:
    asked = json.loads(os.environ[VARIABLE])
    _install([Fault(**fault) for fault in asked["faults"]], Path(asked["fired"]))


@contextlib.contextmanager
def installed(faults: Sequence[Fault], fired: Path | None = None) -> Iterator[None]:
    """Put faults into this process, for a while."""
    undo = _install(faults, fired)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def _install(faults: Sequence[Fault], fired: Path | None) -> list[Callable[[], None]]:
    armed = _Armed(faults, fired)
    functions = {fault.function for fault in faults} | {POINTS["beat"]}  # beats say where the rank is
    by_module: dict[str, list[str]] = {}
    for name in sorted(functions):
        module, _, qualname = name.partition(":")
        by_module.setdefault(module, []).append(qualname)
    undo: list[Callable[[], None]] = []
    later = {}
    for module, qualnames in by_module.items():
        if module in sys.modules:
            undo += [_wrap(sys.modules[module], qualname, armed) for qualname in qualnames]
        else:
            later[module] = qualnames
    finder = _Finder(later, armed, undo)
    sys.meta_path.insert(0, finder)
    undo.append(lambda: sys.meta_path.remove(finder))
    return undo


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps functions as soon as their module is imported, before anybody else imports them from it."""

    def __init__(self, qualnames: Mapping[str, Sequence[str]], armed: _Armed, undo: list[Callable[[], None]]) -> None:
        self._qualnames, self._armed, self._undo = qualnames, armed, undo

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._qualnames:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._undo += [_wrap(module, qualname, self._armed) for qualname in self._qualnames[name]]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: Any, qualname: str, armed: _Armed) -> Callable[[], None]:
    """Wrap a function where it is defined, and where modules have imported it; return what undoes that."""
    *classes, name = qualname.split(".")
    owner = functools.reduce(getattr, classes, module)
    function = getattr(owner, name)
    point = f"{module.__name__}:{qualname}"
    wrapped = _wrapper(point, function, armed)
    owners = [owner]
    if not classes:
        owners += [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is function]
    for each in owners:
        setattr(each, name, wrapped)
    return lambda: [setattr(each, name, function) for each in owners] and None


def _wrapper(point: str, function: Callable[..., Any], armed: _Armed) -> Callable[..., Any]:
    mine = [index for index, fault in enumerate(armed.faults) if fault.function == point]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if point == POINTS["beat"]:
            armed.place = {"rank": args[0].rank, "phase": args[1], "step": args[2]}
        before = [armed.faults[index] for index in mine if armed.faults[index].when == "before" and armed.due(index)]
        for fault in before:
            KINDS[fault.kind](fault, None)
        result = None if any(fault.kind == "skip" for fault in before) else function(*args, **kwargs)
        for index in mine:
            if armed.faults[index].when == "after" and armed.due(index):
                made = KINDS[armed.faults[index].kind](armed.faults[index], result)
                result = result if made is None else made
        return result

    return call


class InjectedError(Exception):
    """Stands for whatever a user's or a library's code may raise."""


def _raise(fault: Fault, result: Any) -> None:
    raise InjectedError(fault.value or "injected")


def _exit(fault: Fault, result: Any) -> None:
    os._exit(9 if fault.value is None else fault.value)


def _signal(fault: Fault, result: Any) -> None:
    os.kill(os.getpid(), signal.Signals[fault.value or "SIGKILL"])


def _stop(fault: Fault, result: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault, result: Any) -> None:
    time.sleep(fault.value)


def _disk_full(fault: Fault, result: Any) -> None:
    """The kernel lets no file of this process grow beyond so many bytes; logs are said to be elsewhere."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.value or 0, resource.RLIM_INFINITY))


def _memory_full(fault: Fault, result: Any) -> None:
    """This process gets no more than so many bytes from here on, as where RLIMIT_AS or a container ends it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (fault.value or 0), resource.RLIM_INFINITY))


def _device_full(fault: Fault, result: Any) -> None:
    """As torch says it, of a device that there is none of here."""
    import torch

    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {(fault.value or 0) / 2**30:.2f} GiB. GPU 0 has a total capacity of "
        "79.10 GiB of which 0.50 GiB is free."
    )


def _short_write(fault: Fault, path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _bit_flip(fault: Fault, path: Path) -> None:
    flip_bit(path)


def _clock_jump(fault: Fault, result: Any) -> None:
    now = time.time
    time.time = lambda: now() + fault.value


def _nan(fault: Fault, result: Any) -> Any:
    """Every tensor of what a function returns, times NaN."""
    import torch

    if isinstance(result, torch.Tensor):
        return result * float("nan") if result.is_floating_point() else result
    if isinstance(result, tuple | list):
        return type(result)(_nan(fault, each) for each in result)
    return result


def _skip(fault: Fault, result: Any) -> None:
    """The wrapper leaves the call out."""


KINDS: dict[str, Callable[[Fault, Any], Any]] = {
    "exception": _raise,
    "exit": _exit,
    "signal": _signal,
    "stop": _stop,
    "slow": _slow,
    "disk full": _disk_full,
    "memory full": _memory_full,
    "device full": _device_full,
    "short write": _short_write,
    "bit flip": _bit_flip,
    "clock jump": _clock_jump,
    "nan": _nan,
    "skip": _skip,
}


def flip_bit(path: Path, place: float = 0.6) -> None:
    """Flip a bit of a file, at a share of its length."""
    at = int(path.stat().st_size * place)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
