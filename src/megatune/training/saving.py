"""Saves a run's checkpoints, at once or in the background, one at a time.

Either way ranks do the same in the same order: each writes and digests its files, and leaves the digests for rank 0,
which completes the folder, commits it and deletes what is beyond save_total_limit. In the background a thread of each
rank does it, from copies in the host's memory. These threads tell each other through the store: the order of collective
operations is that of training, which goes on meanwhile.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megatune import __version__
from megatune.bridge.assemble import Assembly
from megatune.bridge.file_set import WrittenFile
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.engine.model import gather_parameters
from megatune.errors import MegatuneError
from megatune.launch.devices import free_memory
from megatune.training.agreement import on_rank_0, post_outcome, posted_outcomes
from megatune.training.checkpoint import CheckpointFiles, complete_checkpoint, layout_of
from megatune.training.storage.files import amount, ensure_room, writing
from megatune.training.storage.manifest import FileDigest
from megatune.training.storage.store import CheckpointStore, rotate
from megatune.training.train_state import TrainState

_KEY = "save"
# What of a machine's free memory copies may take: the page cache has a use for some of it, too.
_LARGEST_SHARE = 0.8
_NICENESS = 10  # of threads that write


class CheckpointSaver:
    """One rank's part of saving.

    Args:
        source: the model's own folder: its tokenizer and configuration go into checkpoints.
    """

    def __init__(self, store: CheckpointStore, assembly: Assembly, settings: Settings, source: Path) -> None:
        self._store, self._assembly, self._settings, self._source = store, assembly, settings, source
        self._in_flight: _Save | None = None
        self._said: set[str] = set()
        self._had_place = store.output_dir.is_dir()

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint was begun in the background and `settle` has not returned it; the same on all ranks."""
        return self._in_flight is not None

    def has_ended(self) -> bool:
        """Return whether the checkpoint in flight is committed or has failed, as rank 0 knows; False on other ranks."""
        return self._in_flight is not None and self._assembly.place.rank == 0 and not self._in_flight.is_alive()

    def save(
        self, state: TrainState, *, background: bool = False, beside: Mapping[str, bytes] | None = None
    ) -> Path | None:
        """Save the checkpoint of `state.step`. Collective; none is in flight.

        Args:
            beside: small files by name that go beside the training state; rank 0's.

        Returns:
            Where it is; None while it is written in the background.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are as they were.
        """
        assert not self.in_flight, "settle the one before"
        gather_parameters(self._assembly.model)
        files = CheckpointFiles(self._assembly, self._settings, state, beside)
        claims = groups.gather((socket.gethostname(), files.num_bytes, free_memory()))
        needed = sum(num_bytes for _, num_bytes, _ in claims)
        if self._settings.checkpoint.save_format == "torch_dist":
            needed += groups.total(files.model_bytes)
        on_rank_0(lambda: self._ensure_place(needed))
        folder = on_rank_0(lambda: self._store.begin(state.step))
        background = background and self._has_memory(claims)
        written: Iterable[WrittenFile] = [file.held() for file in files] if background else files
        finish = self._finish_of(folder, state)
        save = _Save(self._store, state.step, folder, needed, written, finish, self._assembly.place.world_size)
        if background:
            self._in_flight = save
            save.start()
            return None
        save.run()
        return save.result()

    def settle(self) -> Path | None:
        """Wait for the checkpoint in flight, if there is one, and return it. Collective.

        Raises:
            MegatuneError: CANNOT_WRITE; earlier checkpoints are as they were.
        """
        save, self._in_flight = self._in_flight, None
        return None if save is None else save.result()

    def _finish_of(self, folder: Path, state: TrainState) -> Callable[[Sequence[FileDigest]], Path]:
        """Return what rank 0 does once all files are written; later steps do not change it."""
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

    def _ensure_place(self, num_bytes: int) -> None:
        output_dir = self._store.output_dir
        if self._had_place and not output_dir.is_dir():
            gone = "it is recreated, without the checkpoints and logs that were in it"
            print(f"warning: {output_dir} was removed while the run writes to it: {gone}", flush=True)
        ensure_room(output_dir, num_bytes)

    def _has_memory(self, claims: Sequence[tuple[str, int, int]]) -> bool:
        """Return whether every machine holds the copies of its ranks, and say once what that takes, or where it is
        not so."""
        wanted: dict[str, int] = {}
        free: dict[str, int] = {}
        for host, num_bytes, available in claims:
            wanted[host] = wanted.get(host, 0) + num_bytes
            free[host] = min(free.get(host, available), available)
        host = max(wanted, key=lambda host: wanted[host] / max(1, free[host]))
        fits = wanted[host] <= _LARGEST_SHARE * free[host]
        has = f"{amount(wanted[host])} of the {amount(free[host])} of memory that are free on {host}"
        if fits:
            self._say(f"async_save: copies take {has}")
        else:
            self._say(f"warning: not saved in the background, for which copies would take {has}")
        return fits

    def _say(self, line: str) -> None:
        kind = line.partition(":")[0]
        if self._assembly.place.rank == 0 and kind not in self._said:
            self._said.add(kind)
            print(line, flush=True)


class _Save(threading.Thread):
    """A checkpoint that is written: by `run` at once, by `start` in the background.

    Args:
        needed: bytes of the whole checkpoint's tensors.
        files: this rank's.
        finish: digests of all ranks -> the checkpoint; for rank 0.
    """

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        folder: Path,
        needed: int,
        files: Iterable[WrittenFile],
        finish: Callable[[Sequence[FileDigest]], Path],
        world_size: int,
    ) -> None:
        # A run that fails does not wait for it: what is not committed is not there.
        super().__init__(name=f"save-{step}", daemon=True)
        self._store, self._step, self._folder, self._needed = store, step, folder, needed
        self._files, self._finish, self._world_size = files, finish, world_size
        self._path: Path | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Write this rank's files and, on rank 0, finish the checkpoint once all ranks have written theirs."""
        try:
            if self.ident is not None:
                os.nice(_NICENESS)  # on Linux of this thread alone: where processors are short, training comes first
            post_outcome(_KEY, str(self._folder), self._write())
            if groups.rank() == 0:
                parts = posted_outcomes(_KEY, str(self._folder), self._world_size)
                self._path = self._finish([digest for part in parts for digest in part])
        except Exception as error:
            self._error = error
            post_outcome(_KEY, str(self._folder), error)

    def _write(self) -> list[FileDigest]:
        files, self._files = iter(self._files), ()  # so that copies go when they are written
        with writing(self._folder, self._needed):
            return self._store.digest(self._step, [self._written(file, files) for file in files])

    def _written(self, file: WrittenFile, later: Iterator[WrittenFile]) -> Path:
        """Write a file; where that fails, read on to the end of all files: other ranks gather these tensors in the same
        collective operations, and would wait for this one."""
        try:
            return file.write(self._folder)
        except OSError:
            for each in itertools.chain([file], later):
                for _ in each.tensors:
                    pass
            raise

    def result(self) -> Path:
        """Wait until the checkpoint is committed, and return it. Collective.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """

        if self.ident is None and self._error is not None and not isinstance(self._error, MegatuneError):
            raise self._error  # a peer that is gone: nobody may be there to tell

        def outcome() -> Path:
            if self.ident is not None:
                self.join()
            if self._error is not None:
                raise self._error
            assert self._path is not None
            return self._path

        try:
            return on_rank_0(outcome)
        except Exception:
            if self._error is not None:
                raise self._error from None  # the cause, of which the others only heard
            raise
