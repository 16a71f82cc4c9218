"""Which checkpoint a run resumes from: the newest whole one, verified by all ranks together."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.training.agreement import on_rank_0
from megatune.training.storage.files import amount
from megatune.training.storage.manifest import FileDigest, added_files, problem_of, read_manifest
from megatune.training.storage.store import list_checkpoints, newest_verified

_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 10.0
_MOST_THREADS = 8


def choose_checkpoint(context: RankContext, settings: Settings, output_dir: Path) -> tuple[Path | None, list[str]]:
    """Choose the checkpoint to resume from, None for none, and say what a user should know of the choice. Collective.

    Raises:
        MegatuneError: INPUT, when the one asked for is not whole, or none of those that are there is.
    """
    asked = settings.run.resume_from_checkpoint
    notes: list[str] = []
    check = partial(_verify_together, context, notes)
    if isinstance(asked, str):
        path = Path(asked)
        if not on_rank_0(path.is_dir):
            raise MegatuneError(Finding(f"resume_from_checkpoint: no folder {asked!r}"), ExitCode.INPUT)
        if problems := check(path):
            raise MegatuneError(problems, ExitCode.INPUT)
        return path, notes
    if asked is False or settings.run.overwrite_output_dir:
        return None, []
    newest, problems = newest_verified(on_rank_0(lambda: list_checkpoints(output_dir)), check)
    if newest is None and problems:
        fix = "overwrite_output_dir: true deletes them and starts from the model; another output_dir keeps them"
        none = Finding(f"{output_dir} holds checkpoints and none can be resumed from", fix=fix)
        raise MegatuneError([*problems, none], ExitCode.INPUT)
    if newest is None and asked:
        nothing = f"resume_from_checkpoint: there is no checkpoint in {output_dir}"
        raise MegatuneError(Finding(nothing), ExitCode.INPUT)
    return newest, [*(f"skipped: {problem}" for problem in problems), *notes]


def _verify_together(context: RankContext, notes: list[str], checkpoint: Path) -> list[Finding]:
    """Compare every file of a checkpoint with its manifest, each rank a share of the bytes. Collective.

    A state of terabytes takes longer than any collective operation may: ranks leave notes in the store, as often as
    they have read on, and look for those of the others.

    Args:
        notes: gets a line on how much was read, and how fast.

    Returns:
        What is wrong, on every rank; nothing where the checkpoint is whole and can be resumed from.
    """
    context.beat("verify", 0)
    try:
        manifest = on_rank_0(lambda: read_manifest(checkpoint))
    except MegatuneError as error:
        return list(error.findings)
    if not manifest.resumable:
        return [Finding("holds a model without training state, so no run can resume from it", where=str(checkpoint))]
    if added := on_rank_0(lambda: added_files(checkpoint, manifest)):
        return [Finding(each, where=str(checkpoint)) for each in added]
    began = time.monotonic()
    key, total = f"verify/{checkpoint.name}", sum(file.size for file in manifest.files)
    progress = _Progress(context, key, total)
    _verify_share(context, checkpoint, shares(manifest.files, context.world_size)[context.rank], progress)
    while (posted := groups.posted(f"{key}/all")) is None:
        if context.rank == 0 and None not in (gathered := [problems for _, problems in progress.gather()]):
            groups.post(f"{key}/all", json.dumps([problem for problems in gathered for problem in problems or ()]))
            continue
        context.beat("verify", 0)
        time.sleep(_POLL_SECONDS)
    seconds = time.monotonic() - began
    speed = f"{amount(total)} in {seconds:.1f} s, {total / 1e9 / seconds:.3g} GB/s"
    notes.append(f"verified   {checkpoint}: {speed}, by {context.world_size} processes")
    return [Finding(problem, where=str(checkpoint)) for problem in sorted(json.loads(posted))]


def shares(files: Sequence[FileDigest], world_size: int) -> list[list[FileDigest]]:
    """Split files over ranks by bytes, the largest first, each to the rank that has the fewest bytes so far."""
    found: list[list[FileDigest]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        rank = sizes.index(min(sizes))
        found[rank].append(file)
        sizes[rank] += file.size
    return found


def _verify_share(context: RankContext, checkpoint: Path, files: Sequence[FileDigest], progress: _Progress) -> None:
    """Read this rank's files and post what is wrong with them."""
    num_threads = max(1, min(len(files), (os.cpu_count() or 1) // context.local_world_size, _MOST_THREADS))
    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(problem_of, checkpoint, file, progress.add) for file in files]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, _POLL_SECONDS)
            progress.post(None)
    # Another machine may see another file system: say which one it is.
    suffix = f" (on {socket.gethostname()})" if context.node_rank else ""
    progress.post([problem + suffix for future in futures if (problem := future.result())])


class _Progress:
    """Bytes that this rank has read, noted in the store for rank 0, which prints the sum now and then."""

    def __init__(self, context: RankContext, key: str, total: int) -> None:
        self._context, self._key, self._total = context, key, total
        self._lock = threading.Lock()
        self._read = self._posted = 0
        self._began = self._printed = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes; called by the reading threads."""
        with self._lock:
            self._read += num_bytes

    def post(self, problems: list[str] | None) -> None:
        """Note what is read, and at the end what is wrong. No beat without progress: a disk that hangs is noticed."""
        if self._read > self._posted or problems is not None:
            self._posted = self._read
            groups.post(f"{self._key}/{self._context.rank}", json.dumps([self._posted, problems]))
            self._context.beat("verify", 0)
        if self._context.rank == 0 and time.monotonic() - self._printed > _PROGRESS_SECONDS:
            self.gather()

    def gather(self) -> list[tuple[int, list[str] | None]]:
        """Read every rank's note: bytes, and what is wrong once it has read all. Prints a line when one is due."""
        posted = [groups.posted(f"{self._key}/{rank}") for rank in range(self._context.world_size)]
        notes = [json.loads(note) if note else (0, None) for note in posted]
        now = time.monotonic()
        if now - self._printed > _PROGRESS_SECONDS:
            self._printed = now
            done = sum(num_bytes for num_bytes, _ in notes)
            rate = done / 1e9 / (now - self._began)
            print(f"verifying  {done / self._total:.0%} of {amount(self._total)}, {rate:.3g} GB/s", flush=True)
        return notes
