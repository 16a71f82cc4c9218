"""The process that reads, tokenises and writes blocks ahead of the ranks of its machine.

    python -m megatune.data.streaming.producer PARENT FOLDER    (a pickled Request on stdin)

It lives as long as its parent, local rank 0: it ends on SIGUSR1, and when the parent is gone. The signals that stop a
run are the ranks' to handle; they need rows until their last step.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from megatune.config.settings import Settings
from megatune.data.bad_rows import BadRows, RowError
from megatune.data.build import RowShape
from megatune.data.cache.folder import built
from megatune.data.conversation import PLACEHOLDERS, texts
from megatune.data.encode import Encoder
from megatune.data.report import DatasetReport
from megatune.data.samples import Sample, read_samples
from megatune.data.sources import DatasetSource, SourcePosition
from megatune.data.streaming.blocks import BlockCutter, BlockMeta, MixedStream, Mixing
from megatune.data.streaming.evaluation import HeldOut, hold_out, take_all
from megatune.data.streaming.folder import READY_NOTE, StreamFolder
from megatune.data.streaming.sets import Read, Result, StreamedSet
from megatune.data.streaming.state import SetState, StreamState
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, Finding, MegatuneError

BLOCKS_AHEAD = 2  # of the last one that somebody has come to
END_SIGNAL = signal.SIGUSR1
END_SECONDS = 3.0  # from the signal to its end

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_POLL_SECONDS = 0.02
_PARENT_SECONDS = 0.5  # between looks at whether the parent lives
_SAY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """What to produce.

    Attributes:
        key: of everything that determines the rows.
        training, evaluation: the data sets that `dataset` and `eval_dataset` name.
        state: where to begin, None for the start.
    """

    folder: StreamFolder
    settings: Settings
    encoder: Encoder
    key: str
    training: Sequence[DatasetSource]
    evaluation: Sequence[DatasetSource]
    state: StreamState | None


class Producer:
    """Makes what a request asks for.

    Args:
        say: is told what is being done.
    """

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self._request, self._settings = request, request.settings
        data = self._settings.data
        self._shape = RowShape(
            self._settings.run.stage, data.cutoff_len, self._settings.packing, self._settings.run.seed
        )
        self._mixing = Mixing(data.mix_strategy, data.interleave_probs, self._settings.run.seed)
        self._say = say

    def held_out(self) -> HeldOut | None:
        """The evaluation rows, made now where the cache does not have them; None without evaluation."""
        data = self._settings.data
        if not data.val_size and not self._request.evaluation:
            return None
        return HeldOut.load(built(self._settings, f"{self._request.key}-evaluation", self._evaluation))

    def blocks(self, starts: Sequence[SetState] | None) -> BlockCutter:
        """What cuts the training data to blocks.

        Args:
            starts: behind the rows that are held out; None where none are.
        """
        data, state = self._settings.data, self._request.state
        if state is None:
            begins = tuple(starts or (SetState() for _ in self._request.training))
            reports = tuple(DatasetReport(source.name) for source in self._request.training)
            state = StreamState(begins, reports=reports)
        stream = self._stream(self._request.training, state, starts, self._mixing)
        return BlockCutter(
            stream, state, self._shape, self._bad_rows, data.buffer_size, shuffle=not data.disable_shuffling
        )

    def _evaluation(self, folder: Path) -> None:
        data, sources = self._settings.data, self._request.evaluation
        count = None if sources else int(data.val_size)
        mixing = Mixing("concat", None, 0) if sources else self._mixing
        sources = sources or self._request.training
        state = StreamState(
            tuple(SetState() for _ in sources), reports=tuple(DatasetReport(source.name) for source in sources)
        )
        stream = self._stream(sources, state, None, mixing)
        of = f" of {count}" if count else ""
        progress = self._progress(lambda samples: f"it was preparing the evaluation rows: {samples}{of} samples")
        try:
            if count is None:
                take_all(stream, folder=folder, shape=self._shape, bad_rows=self._bad_rows(folder), progress=progress)
            else:
                hold_out(
                    stream,
                    count,
                    concatenated=mixing.strategy == "concat",
                    folder=folder,
                    shape=self._shape,
                    bad_rows=self._bad_rows(folder),
                    progress=progress,
                )
        finally:
            for entry in stream.sets:
                entry.close()

    def write(self, cutter: BlockCutter) -> BlockMeta:
        """Write the next block and give it its place."""
        state = cutter.state
        size = self._settings.data.buffer_size
        where = f"it was filling block {state.block} of rows, in epoch {state.epoch} of the data"
        progress = self._progress(lambda samples: f"{where}: {samples} of {size} samples")
        with self._request.folder.draft() as draft:
            meta = cutter.write(draft, progress)
            self._request.folder.publish(draft, meta.number, meta.first_row, meta.rows)
        return meta

    def _progress(self, words: Callable[[int], str]) -> Callable[[int], None]:
        said_at = 0.0

        def progress(samples: int) -> None:
            nonlocal said_at
            if (now := time.monotonic()) - said_at > _SAY_SECONDS:
                said_at = now
                self._say(words(samples))

        progress(0)
        return progress

    def _bad_rows(self, folder: Path) -> BadRows:
        data = self._settings.data
        return BadRows(data.on_bad_row, data.truncation_strategy, folder)

    def _stream(
        self,
        sources: Sequence[DatasetSource],
        state: StreamState,
        starts: Sequence[SetState] | None,
        mixing: Mixing,
    ) -> MixedStream:
        begins = starts or [SetState() for _ in sources]
        sets = [
            StreamedSet(deepcopy(report), self._reader(source), begin, entry)
            for source, report, begin, entry in zip(sources, state.reports, begins, state.sets, strict=True)
        ]
        return MixedStream(sets, mixing, state)

    def _reader(self, source: DatasetSource) -> Read:
        """The first rows of a data set, as many as num_samples and max_samples allow."""
        data = self._settings.data
        limits = [limit for limit in (source.num_samples, data.max_samples) if limit is not None]
        whole = replace(source, num_samples=None)
        placeholders = {"{{name}}": data.model_name, "{{author}}": data.model_author}

        def read(after: SourcePosition | None, taken: int) -> Iterator[Result]:
            samples = read_samples(
                whole,
                stage=self._settings.run.stage,
                seed=self._settings.run.seed,
                max_samples=min(limits) if limits else None,
                placeholders=placeholders,
                after=after,
                taken=taken,
            )
            unset = [placeholder for placeholder, value in placeholders.items() if value is None]
            # Data sets that are drawn from in turn are read side by side: they share the processes.
            side_by_side = 1 if data.mix_strategy == "concat" else len(self._request.training)
            workers = (data.preprocessing_num_workers or 1) // side_by_side
            return encode_all(self._request.encoder, _filled(samples, unset), workers)

        return read


def _filled(samples: Iterator[Sample], unset: list[str]) -> Iterator[Sample]:
    """The samples, as long as they ask for nothing that is not set: they are trained before the last is read."""
    for sample in samples:
        if not isinstance(sample.example, RowError):
            for placeholder in unset:
                if any(placeholder in text for text in texts(sample.example)):
                    name = PLACEHOLDERS[placeholder]
                    finding = Finding(
                        f"{placeholder} is in the data and {name} is not set", sample.where, fix=f"set {name}"
                    )
                    raise MegatuneError(finding, ExitCode.SETTINGS)
        yield sample


def produce(request: Request) -> None:
    """Write blocks without end.

    Raises:
        MegatuneError: what keeps it from going on.
    """
    folder = request.folder
    producer = Producer(request, folder.say)
    held_out = producer.held_out()
    folder.note(READY_NOTE, {"evaluation": str(held_out.folder) if held_out else None})
    cutter = producer.blocks(held_out.starts if held_out else None)
    first = cutter.state.block
    try:
        while True:
            while cutter.state.block > max(folder.reached(), first - 1) + BLOCKS_AHEAD:
                time.sleep(_POLL_SECONDS)
            producer.write(cutter)
    finally:
        cutter.close()


def main() -> int:
    """Produce for the process that started this one, as long as it lives."""
    parent, folder = int(sys.argv[1]), StreamFolder(Path(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END_SIGNAL, _stop)
    try:
        threading.Thread(target=_watch_parent, args=(parent, folder), daemon=True).start()
        produce(pickle.load(sys.stdin.buffer))
    except SystemExit:
        if os.getppid() != parent:
            folder.remove()
        return 0
    except MegatuneError as error:
        folder.fail(error)
    except BaseException as error:
        traceback.print_exc()
        folder.fail(_as_finding(error))
    return 1


def _as_finding(error: BaseException) -> MegatuneError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = traceback.format_exception_only(error)[-1].strip()
    code = ExitCode.INTERNAL
    if isinstance(error, MemoryError):
        code = ExitCode.OUT_OF_MEMORY
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        code = ExitCode.CANNOT_WRITE
    finding = Finding("the process that reads the data failed", f"{Path(frame.filename).name}:{frame.lineno}", text)
    return MegatuneError(finding, code)


def _stop(*_: object) -> None:
    """End the present work in good order, with the processes that tokenise."""
    signal.signal(END_SIGNAL, signal.SIG_IGN)
    raise SystemExit


def _watch_parent(parent: int, folder: StreamFolder) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), END_SIGNAL)
    time.sleep(END_SECONDS)
    folder.remove()
    # It hangs: end it and those that it started, whatever they are doing.
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
