"""The process that reads, tokenises and writes blocks ahead of the ranks of its machine.

    python -m megatune.data.streaming.producer PARENT FOLDER    (a pickled StreamRequest on stdin)

It lives as long as its parent, local rank 0: it ends on SIGUSR1, and when the parent is gone. The signals that stop a
run are the ranks' to handle; they need rows until their last step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatune.data.cache.folder import NO_ROOM, built
from megatune.data.pipeline import Pipeline
from megatune.data.streaming.blocks import BlockMeta, MixedStream, StreamState
from megatune.data.streaming.evaluation import HeldOut, write_held_out
from megatune.data.streaming.folder import READY_NOTE, StreamFolder
from megatune.errors import ExitCode, Finding, MegatuneError

BLOCKS_AHEAD = 2  # of the last one that a rank has come to
END_SIGNAL = signal.SIGUSR1
END_SECONDS = 3.0  # from the signal to its end

_POLL_SECONDS = 0.02
_PARENT_SECONDS = 0.5  # between looks at whether the parent lives
_SAY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What to produce.

    Attributes:
        key: of everything that determines the rows.
        state: where to begin, None for the start.
    """

    folder: StreamFolder
    pipeline: Pipeline
    key: str
    state: StreamState | None

    def held_out(self) -> HeldOut | None:
        """Return the evaluation rows, made now where the cache does not have them; None without evaluation."""
        settings = self.pipeline.settings
        if not settings.data.val_size and not self.pipeline.evaluation:
            return None
        return HeldOut.load(built(settings, f"{self.key}-evaluation", self._hold_out))

    def _hold_out(self, folder: Path) -> None:
        count = None if self.pipeline.evaluation else int(self.pipeline.settings.data.val_size)
        sources = self.pipeline.evaluation or self.pipeline.training
        state = StreamState.at_start(sources)
        stream = MixedStream(self.pipeline, sources, state, concatenate=bool(self.pipeline.evaluation))
        of = f" of {count}" if count else ""
        progress = self._progress(lambda samples: f"it was preparing the evaluation rows: {samples}{of} samples")
        with contextlib.closing(stream):
            write_held_out(stream, count, folder, progress)

    def stream(self, held_out: HeldOut | None) -> MixedStream:
        """Return the training data behind the rows that are held out."""
        starts = held_out.starts if held_out else None
        state = self.state or StreamState.at_start(self.pipeline.training, starts)
        return MixedStream(self.pipeline, self.pipeline.training, state, starts)

    def write(self, stream: MixedStream) -> BlockMeta:
        """Write the next block and give it its place."""
        size = self.pipeline.settings.data.buffer_size
        where = f"it was filling block {stream.state.block} of rows, in epoch {stream.state.epoch} of the data"
        with self.folder.draft() as draft:
            meta = stream.write_block(draft, self._progress(lambda samples: f"{where}: {samples} of {size} samples"))
            self.folder.publish(draft, meta.number, meta.first_row, meta.rows)
        return meta

    def _progress(self, words: Callable[[int], str]) -> Callable[[int], None]:
        said_at = 0.0

        def progress(samples: int) -> None:
            nonlocal said_at
            if (now := time.monotonic()) - said_at > _SAY_SECONDS:
                said_at = now
                self.folder.say(words(samples))

        progress(0)
        return progress


def produce(request: StreamRequest) -> None:
    """Write blocks without end.

    Raises:
        MegatuneError: what keeps it from continuing.
    """
    folder = request.folder
    held_out = request.held_out()
    folder.note(READY_NOTE, {"evaluation": str(held_out.folder) if held_out else None})
    stream = request.stream(held_out)
    first = stream.state.block
    with contextlib.closing(stream):
        while True:
            while stream.state.block > max(folder.reached(), first - 1) + BLOCKS_AHEAD:
                time.sleep(_POLL_SECONDS)
            request.write(stream)


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
    elif isinstance(error, OSError) and error.errno in NO_ROOM:
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
