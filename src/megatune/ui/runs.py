"""Find the runs below a folder, and determine their states with a few small reads of their files."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

RUN_YAML, METRICS, GENERATIONS, LOCK = "run.yaml", "metrics.jsonl", "generations.jsonl", ".megatune.lock"
_MOST_RUNS = 2000
_DEPTH = 5
_SCAN_SECONDS = 5.0  # interval of scans of the folders
_READ_SECONDS = 0.1  # time limit of one update, after which a page gets a partial list
_TAIL = 8192  # bytes at the end of metrics.jsonl, which contain a few records
_SPARKS = 32  # points of the small curve in the list
_SPARK_BYTES = 1536  # contain a whole record, or a part of one in reinforcement learning
# Parsed without JSON for speed: there are runs times points of them.
_LOSS, _REWARD = (re.compile(rb'"%s": (-?[0-9.]+(?:e[+-]?[0-9]+)?)[,}]' % name) for name in (b"loss", b"reward"))
_BEAT_SECONDS = 180.0  # a run on another machine counts as ended if its heartbeat is older
_SHOWN = ("step", "total_steps", "epoch", "loss", "reward", "tokens_per_second", "eta_seconds")
_OUTCOMES = {"done": "finished", "hung": "failed"}  # outcomes in the launcher's report with other names here


@dataclass(slots=True)
class _Known:
    """A run's entry in the list, the stamps of its files when it was read, and the version of the entry."""

    entry: dict[str, Any] = field(default_factory=dict)
    signature: tuple[Any, ...] = ()
    version: int = 0


class Runs:
    """The runs below `root`, by their path from it ("." for itself)."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[str, _Known] = {}
        self._version = 0
        self._lock = Lock()
        self._gone: list[tuple[int, str]] = []
        self._scanned = -_SCAN_SECONDS

    def folder(self, run: str) -> Path:
        """Return the folder of a run.

        Raises:
            KeyError: there is no such run below the root.
        """
        if run not in self._known:
            with self._lock:
                self._scan()
        if run not in self._known:
            raise KeyError(run)
        return self.root / run

    def is_alive(self, run: str) -> bool:
        """Return whether a process of this run is running; raise KeyError if there is no such run."""
        return is_alive(self.folder(run), locked_inodes())

    def changes(self, since: int = 0) -> dict[str, Any]:
        """Return the entries of runs that are new or changed since a version, and the current version.

        If reading takes too long, the remaining entries are left to the next call, and `more` is true.
        """
        with self._lock:
            return self._changes(max(0, since))

    def _changes(self, since: int) -> dict[str, Any]:
        if time.monotonic() - self._scanned >= _SCAN_SECONDS:
            self._scan()
        before = self._version
        locked, end, has_more = locked_inodes(), time.monotonic() + _READ_SECONDS, False
        for run, known in self._known.items():
            folder = self.root / run
            alive = is_alive(folder, locked)
            signature = (alive, *(_stamp(folder / name) for name in (METRICS, RUN_YAML, "launch/report.json", "STOP")))
            if signature != known.signature and (has_more := self._version > before and time.monotonic() > end):
                break
            if signature != known.signature:
                self._version += 1
                known.entry = {"id": run, "version": self._version, **entry_of(folder, alive)}
                known.signature, known.version = signature, self._version
        changed = [known.entry for known in self._known.values() if known.version > since]
        gone = [run for version, run in self._gone if version > since and run not in self._known]
        return {"version": self._version, "root": str(self.root), "runs": changed, "gone": gone, "more": has_more}

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        found = {path.relative_to(self.root).as_posix() for path in find_runs(self.root)}
        for run in self._known.keys() - found:
            self._version += 1
            del self._known[run]
            self._gone = [*self._gone[-_MOST_RUNS:], (self._version, run)]
        for run in sorted(found - self._known.keys()):
            self._known[run] = _Known()


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs at `root` and below it, but not inside of runs below it."""
    remaining, count = [(root, 0)], 0
    while remaining and count < _MOST_RUNS:
        folder, depth = remaining.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if is_run := RUN_YAML in names and bool({METRICS, "launch", LOCK} & names):
            count += 1
            yield folder
        if depth < _DEPTH and (not is_run or depth == 0):
            below = (each for each in entries if not each.name.startswith((".", "checkpoint-", "launch")))
            remaining += [(Path(each.path), depth + 1) for each in below if each.is_dir(follow_symlinks=False)]


def entry_of(folder: Path, alive: bool) -> dict[str, Any]:
    """Return a run's entry in the list: its state, progress, last metrics and a small curve of its loss."""
    stage, model = _head_of(folder / RUN_YAML)
    records = list(_records(_read(folder / METRICS, -_TAIL)))
    log: dict[str, Any] = next((each for each in reversed(records) if "num_steps" in each), {})
    evaluation: dict[str, Any] = next((each for each in reversed(records) if each.get("eval_loss") is not None), {})
    report = read_json(folder / "launch" / "report.json")
    outcome = str(report.get("outcome", ""))
    if alive:
        state = "stopping" if (folder / "STOP").exists() else "running" if records else "starting"
    elif outcome:
        state = _OUTCOMES.get(outcome, outcome)
    else:
        state = "finished" if (folder / "train_results.json").exists() else "ended"
    findings = report.get("findings") or [{}]
    return {
        "name": folder.name,
        "stage": stage,
        "model": model,
        "state": state,
        "problem": "" if alive else findings[0].get("what", ""),
        "fix": "" if alive else findings[0].get("fix", ""),
        **{name: log.get(name) for name in _SHOWN},
        "eval_loss": evaluation.get("eval_loss"),
        "changed": max(_stamp(folder / name)[1] for name in (METRICS, RUN_YAML, "launch/report.json")),
        "spark": _spark(folder / METRICS),
    }


def is_alive(folder: Path, locked: set[int] | None) -> bool:
    """Return whether a process holds the lock of an output folder. The lock itself is not acquired, since a run that
    starts at this moment would fail.

    Args:
        locked: inodes of the files locked on this machine; None if the kernel does not list them.
    """
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        here, inode = holder["host"] == socket.gethostname(), (folder / LOCK).stat().st_ino
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if here:
        return inode in locked if locked is not None else Path(f"/proc/{holder['pid']}").exists()
    beats = (_stamp(path)[1] for path in (folder / "launch" / "heartbeats").glob("*"))
    return time.time() - max(beats, default=0) < _BEAT_SECONDS


def locked_inodes() -> set[int] | None:
    """Return the inodes of the files locked by processes of this machine; None if the kernel does not list them."""
    try:
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
        return {int(line.split()[5].rpartition(":")[2]) for line in lines if "FLOCK" in line and "->" not in line}
    except (OSError, ValueError, IndexError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} if it is missing or incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _head_of(path: Path) -> tuple[str, str]:
    """Return stage and model of a run.yaml, without a YAML parser for speed. In reinforcement learning it has roles
    instead of a stage."""
    values = {}
    for line in _read(path, 1 << 16).decode(errors="replace").splitlines():
        key, colon, text = line.partition(":")
        if colon and not key.startswith(("#", " ")):
            value = text.split("  #")[0].strip()
            values[key] = "" if value == "null" else value
    model = values.get("model_name_or_path") or values.get("pretrain") or ""
    return values.get("stage") or ("rl" if "pretrain" in values or "rollout_batch_size" in values else ""), model


def _spark(path: Path) -> list[float]:
    """Return the loss or the reward at evenly spaced positions of the file, in constant time."""
    size = _stamp(path)[0]
    if size <= _SPARKS * _SPARK_BYTES:
        pieces = [line + b"\n" for line in _read(path, size or 1).split(b"\n")]
        pieces = pieces[:: -(-len(pieces) // _SPARKS)]
    else:
        try:
            with path.open("rb", buffering=0) as file:
                starts = [(size - _SPARK_BYTES) * part // (_SPARKS - 1) for part in range(_SPARKS)]
                pieces = [os.pread(file.fileno(), _SPARK_BYTES, start) for start in starts]
        except OSError:
            return []
    name = _REWARD if any(_REWARD.search(piece) for piece in pieces) else _LOSS
    return [float(found[1]) for piece in pieces if (found := name.search(piece))]


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of complete lines among bytes of a JSON lines file."""
    for line in data.split(b"\n"):
        if line.startswith(b"{") and line.endswith(b"}"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _read(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, or the last ones if count is negative; b"" if the file is missing."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), abs(count), max(0, size + count) if count < 0 else 0)
    except OSError:
        return b""


def _stamp(path: Path) -> tuple[int, float]:
    """Return size and modification time of a file; zeros if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime
