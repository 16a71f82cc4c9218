"""Streamed rows in a run: one process of each machine produces them, all ranks follow it step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.data.bad_rows import BAD_ROWS_FILE
from megatune.data.cache.folder import cache_dir
from megatune.data.cache.key import streamed_key
from megatune.data.pipeline import Pipeline
from megatune.data.report import TokenReport
from megatune.data.rows import TokenRows
from megatune.data.streaming.blocks import PART, StreamState
from megatune.data.streaming.folder import StreamFolder
from megatune.data.streaming.producer import StreamRequest
from megatune.data.streaming.stream import Stream
from megatune.data.tokenizer import load_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.training.checkpoint import read_state
from megatune.training.machines import KEY, check_same, wait_for_machines
from megatune.training.storage.files import writing


def open_stream(context: RankContext, settings: Settings, tokenizer_dir: Path, resumed: Path | None) -> Stream:
    """Begin to read ahead, from where a checkpoint left off. Collective.

    Args:
        resumed: the checkpoint, None to begin at the start of the data.

    Raises:
        MegatuneError: the data sets or the tokenizer are not there (exit codes 64 and 66), or differ between machines
            (65), or the cache cannot be written (73).
    """
    context.beat("data", 0, limit=float("inf"))  # data sets of a hub are downloaded here
    if context.local_rank != 0:
        folder, name = json.loads(wait_for_machines(context, "stream", None))
        check_same(context, "data to stream", None)
        return Stream(StreamFolder(Path(folder)), name, settings.run.ddp_timeout)
    tokenizer = load_tokenizer(tokenizer_dir)
    pipeline = Pipeline.of(settings, tokenizer)
    key = streamed_key(settings, tokenizer)
    made = StreamFolder.make(cache_dir() / "stream", key.name)
    stream = Stream.start(StreamRequest(made, pipeline, key.name, _state(resumed, key.name)))
    try:
        wait_for_machines(context, "stream", json.dumps([str(made.path), key.name]))
        check_same(context, "data to stream", {**key.parts, KEY: key.name})
    except BaseException:
        stream.close()
        raise
    return stream


def _state(resumed: Path | None, key: str) -> StreamState | None:
    """Where a checkpoint left off; one of other rows is refused when it is loaded."""
    state = read_state(resumed) if resumed is not None else None
    if state is None or state.stream is None or state.rows_digest != key:
        return None
    return StreamState.from_json(state.stream)


class StreamFollower:
    """What a rank does about its stream beside each step.

    Args:
        output_dir: gets bad_rows.jsonl; None in all ranks but the first.
        vocab_size: of the model.
        total_steps: of the run.
        resumed: whether the run resumes from a checkpoint; what was quarantined before it stays.
    """

    def __init__(
        self,
        stream: Stream,
        context: RankContext,
        *,
        global_batch_size: int,
        total_steps: int,
        vocab_size: int,
        output_dir: Path | None,
        resumed: bool,
    ) -> None:
        self._stream, self._context = stream, context
        self._size, self._last = global_batch_size, global_batch_size * total_steps
        self._vocab_size = vocab_size
        self._quarantine = _Quarantine(output_dir / BAD_ROWS_FILE, keep=resumed) if output_dir else None

    def evaluation(self) -> TokenRows | None:
        """Return the evaluation rows, once they are ready. Collective."""
        rows, held_out = self._stream.wait_ready(self._beat), self._stream.held_out
        if rows is None or held_out is None:
            return None
        wait_for_machines(self._context, "evaluation", "" if self._context.local_rank == 0 else None)
        check_same(self._context, "evaluation rows", _contents(held_out.tokens, rows))
        check_token_ids(held_out.tokens.largest_id, self._vocab_size)
        self._keep_bad_rows(held_out.folder)
        return rows

    def before(self, step: int) -> None:
        """Wait for the rows of a step, counted from 0, and look at the blocks that they are in. Collective."""
        first = step * self._size
        for meta, folder in self._stream.before(first, first + self._size, self._last, self._beat):
            # Blocks of the same rows so far end with the same row: every rank comes to this one at this step.
            what = f"rows in block {meta.number} of the stream, which step {step + 1} is the first to train"
            check_same(self._context, what, _contents(meta.tokens, TokenRows(folder / PART)))
            check_token_ids(meta.tokens.largest_id, self._vocab_size)
            line = meta.line()
            if line is not None and self._quarantine is not None:
                print(line, flush=True)
                self._keep_bad_rows(folder)

    def after(self, step: int) -> None:
        """Delete what no later step needs: all ranks have trained this one, counted from 0."""
        self._stream.after(step * self._size)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint needs after this number of steps."""
        return self._stream.state(step * self._size).to_json()

    def epoch_after(self, step: int) -> float | None:
        """Pass done after this number of steps, None where that is not known yet."""
        return self._stream.epoch_after(step * self._size)

    def summary(self) -> Iterator[str]:
        """Return what became of the rows that were read, in words."""
        return self._stream.summary()

    def _beat(self) -> None:
        self._context.beat("data", self._context.step)

    def _keep_bad_rows(self, folder: Path) -> None:
        if self._quarantine is not None:
            self._quarantine.add(folder / BAD_ROWS_FILE)


def _contents(report: TokenReport, rows: TokenRows) -> dict[str, str | int]:
    return {"rows": len(rows), "tokens": report.tokens, "the digest of the rows": rows.digest}


def check_token_ids(largest: int, vocab_size: int) -> None:
    """Refuse a token id that the model has no embedding for.

    Raises:
        MegatuneError: INPUT.
    """
    if largest >= vocab_size:
        raise MegatuneError(
            Finding(
                f"token id {largest} is beyond the model's vocabulary of {vocab_size}",
                why="the tokenizer and the weights belong to different models",
                fix="use the tokenizer that was published with the weights",
            ),
            ExitCode.INPUT,
        )


class _Quarantine:
    """The run's file of bad rows, each once, however often it is read.

    Args:
        keep: what an earlier process of the run has put there.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path = path
        self._kept: set[tuple[str, str]] = set()
        with writing(path.parent):
            if not keep:
                path.unlink(missing_ok=True)
            elif path.exists():
                whole, _, _ = path.read_bytes().rpartition(b"\n")
                self._kept = {_identity(line) for line in whole.splitlines()}
                path.write_bytes(whole + b"\n" if whole else b"")

    def add(self, bad_rows: Path) -> None:
        """Copy what is new; nothing where there is no such file."""
        if not bad_rows.exists():
            return
        with writing(self._path.parent), open(bad_rows, "rb") as rows, open(self._path, "ab") as file:
            for line in rows:
                identity = _identity(line)
                if identity not in self._kept:
                    self._kept.add(identity)
                    file.write(line)


def _identity(line: bytes) -> tuple[str, str]:
    row = json.loads(line)
    return row["where"], row["code"]
