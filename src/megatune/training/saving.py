"""Saves checkpoints synchronously or in the background, one at a time.

Each rank copies its tensors to host memory, from which a thread writes and digests them (`bridge.file_stream`), and
posts the digests. The thread of rank 0 completes and commits the folder, and deletes checkpoints beyond
save_total_limit. In the background, training continues after the copies are enqueued; otherwise a few host buffers are
reused. Threads communicate through the store, without collective operations.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatune import __version__
from megatune.bridge.assemble import Assembly
from megatune.bridge.file_stream import MIN_BUCKETS, FileStream, HostBuffers
from megatune.config.settings import Settings
from megatune.engine import device, groups
from megatune.engine.model import gather_parameters
from megatune.hub.digests import FileDigest
from megatune.launch.devices import free_memory
from megatune.progress import Progress, amount
from megatune.training.agreement import find_outcome, on_rank_0, post_outcome, posted_outcomes
from megatune.training.checkpoint import CheckpointFiles, complete_checkpoint, layout_of
from megatune.training.storage.files import ensure_disk_space, writing
from megatune.training.storage.store import CheckpointStore, rotate
from megatune.training.train_state import TrainState

_WRITTEN, _COMMITTED = "written", "committed"
_MAX_MEMORY_FRACTION = 0.8  # of free host memory for copies; the page cache needs some, too
_NICENESS = 10  # of writer threads


class CheckpointSaver:
    """Saves checkpoints on one rank.

    Args:
        source: the model's folder, from which tokenizer and configuration are copied.
        beat: called while this rank waits, as long as there is progress.

    Attributes:
        seconds: duration of the last save that has ended, on rank 0 until its checkpoint was committed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        assembly: Assembly,
        settings: Settings,
        source: Path,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._assembly, self._settings, self._source = store, assembly, settings, source
        self._beat, self._buffers, self._count = beat, HostBuffers(), 0
        self._in_flight: _Save | None = None
        self.seconds = 0.0
        self._printed: set[str] = set()
        self._had_output_dir = store.output_dir.is_dir()

    @property
    def in_flight(self) -> bool:
        """Whether `settle` has to be called for a checkpoint in the background; the same on all ranks."""
        return self._in_flight is not None

    def has_ended(self) -> bool:
        """Return on rank 0 whether the checkpoint in flight is committed or has failed; False on other ranks."""
        return self._in_flight is not None and self._assembly.coords.rank == 0 and not self._in_flight.is_alive()

    def save(
        self, state: TrainState, *, background: bool = False, extra: Mapping[str, bytes] | None = None
    ) -> Path | None:
        """Save the checkpoint of `state.step`. Collective. No checkpoint may be in flight.

        Args:
            extra: small files by name that rank 0 adds to the training state.

        Returns:
            The checkpoint; None while it is written in the background.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are unchanged.
        """
        assert not self.in_flight, "call settle first"
        gather_parameters(self._assembly.model)
        files = CheckpointFiles(self._assembly, self._settings, state, extra)
        copies = max(0, files.num_bytes - self._buffers.num_bytes)  # buffers of the last save are reused
        claims = groups.all_gather_object((socket.gethostname(), copies, free_memory()))
        needed = groups.sum_over_ranks(files.num_bytes)
        if self._settings.checkpoint.save_format == "torch_dist":
            needed += groups.sum_over_ranks(files.model_bytes)
        on_rank_0(lambda: self._ensure_space(needed))
        folder = on_rank_0(lambda: self._store.begin(state.step))
        background = background and self._has_memory(claims)
        # A checkpoint without training state is never resumed from, so its block digests would not be read.
        check = not self._settings.checkpoint.save_only_model
        shows = self._assembly.coords.rank == 0 and not background
        progress = Progress("saving", files.num_bytes, shows=shows)  # of this rank; all have about as many bytes
        limit = None if background else MIN_BUCKETS
        stream = FileStream(folder, self._buffers, limit=limit, check=check, on_write=progress.add)
        finish = self._finish_of(folder, state)
        self._count += 1
        save = _Save(stream, folder, needed, finish, self._assembly.coords.world_size, self._count, is_nice=background)
        with progress:
            save.start()
            stream.put(files)
            if background:
                self._in_flight = save
                return None
            return self._result(save)

    def settle(self) -> Path | None:
        """Wait for the checkpoint in flight, if any, and return it. Collective.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are unchanged.
        """
        save, self._in_flight = self._in_flight, None
        return None if save is None else self._result(save)

    def _result(self, save: _Save) -> Path:
        path = save.result(self._beat)
        self.seconds = save.seconds
        return path

    def _finish_of(self, folder: Path, state: TrainState) -> Callable[[Sequence[FileDigest]], Path]:
        """Return the function that completes the checkpoint on rank 0. Later steps do not affect it."""
        step, best_step = state.step, state.best_step
        assembly, settings, source, store = self._assembly, self._settings, self._source, self._store
        model = {key: getattr(settings.model, key) for key in ("model_name_or_path", "model_revision")}
        rows = {"layout": layout_of(assembly, settings), "consumed_rows": step * state.global_batch_size}
        metadata = {"megatune": __version__, **model, **rows}

        def finish(digests: Sequence[FileDigest]) -> Path:
            with writing(folder):
                digests = complete_checkpoint(folder, digests, assembly, settings, source, step)
            path = store.commit(step, digests, metadata)
            best = [] if best_step is None else [store.checkpoint(best_step)]
            rotate(store.output_dir, settings.checkpoint.save_total_limit, [path, *best])
            return path

        return finish

    def _ensure_space(self, num_bytes: int) -> None:
        output_dir = self._store.output_dir
        if self._had_output_dir and not output_dir.is_dir():
            gone = "it is recreated, without the checkpoints and logs that were in it"
            print(f"warning: {output_dir} was removed while the run writes to it: {gone}", flush=True)
        ensure_disk_space(output_dir, num_bytes)

    def _has_memory(self, claims: Sequence[tuple[str, int, int]]) -> bool:
        """Return whether every machine has memory for the copies of its ranks. Prints the result once."""
        wanted: dict[str, int] = {}
        free: dict[str, int] = {}
        for host, num_bytes, available in claims:
            wanted[host] = wanted.get(host, 0) + num_bytes
            free[host] = min(free.get(host, available), available)
        host = max(wanted, key=lambda host: wanted[host] / max(1, free[host]))
        fits = wanted[host] <= _MAX_MEMORY_FRACTION * free[host]
        has = f"{amount(wanted[host])} of the {amount(free[host])} of memory that are free on {host}"
        if fits:
            self._print_once(f"async_save: copies take {has}")
        else:
            self._print_once(f"warning: not saved in the background: copies would take {has}")
        return fits

    def _print_once(self, line: str) -> None:
        kind = line.partition(":")[0]
        if self._assembly.coords.rank == 0 and kind not in self._printed:
            self._printed.add(kind)
            print(line, flush=True)


class _Save(threading.Thread):
    """Writes a checkpoint.

    Attributes:
        seconds: from the creation to the end of the thread.

    Args:
        needed: bytes of the whole checkpoint's tensors.
        finish: completes the checkpoint on rank 0, given the digests of all ranks.
        number: number of the save.
        is_nice: lower the thread's priority, for training to continue at full speed.
    """

    def __init__(
        self,
        stream: FileStream,
        folder: Path,
        needed: int,
        finish: Callable[[Sequence[FileDigest]], Path],
        world_size: int,
        number: int,
        *,
        is_nice: bool,
    ) -> None:
        # A daemon thread, so that a failing run does not wait: an uncommitted checkpoint is discarded.
        super().__init__(name=f"save-{folder.name}", daemon=True)
        self._stream, self._folder, self._needed, self._token = stream, folder, needed, f"{folder} {number}"
        self._finish, self._world_size, self._is_nice = finish, world_size, is_nice
        self._device = device.current()
        self._error: Exception | None = None
        self._has_written = False
        self._began, self.seconds = time.monotonic(), 0.0

    def run(self) -> None:
        """Write this rank's files and, on rank 0, complete the checkpoint after all ranks have written theirs."""
        if self._is_nice:
            os.nice(_NICENESS)  # on Linux, only for this thread
        outcome: object
        try:
            with device.bind_thread(self._device), writing(self._folder, self._needed):
                outcome = self._stream.write()
        except Exception as error:
            outcome = self._error = error
        self._has_written = True
        post_outcome(_WRITTEN, self._token, outcome)
        if groups.rank() == 0:
            try:
                parts = posted_outcomes(_WRITTEN, self._token, self._world_size)
                outcome = self._finish([digest for part in parts for digest in part])
            except Exception as error:
                outcome = self._error = self._error or error
            post_outcome(_COMMITTED, self._token, outcome)
        self.seconds = time.monotonic() - self._began

    def result(self, beat: Callable[[], None]) -> Path:
        """Wait until the checkpoint is committed; return it on every rank.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        written = -1
        for pause in groups.poll_intervals():
            if (found := find_outcome(_COMMITTED, self._token, 0)) is not None:
                break
            if self._has_written or self._stream.written > written:  # no beat without progress: a hung disk is noticed
                written = self._stream.written
                beat()
            time.sleep(pause)
        assert found is not None
        self.join()
        if self._error is not None:
            raise self._error  # the original error; other ranks raise a relayed one
        return found.result()
