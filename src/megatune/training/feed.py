"""The rows of a run, prepared before it or streamed: what each step trains, and what is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatune.config.settings import Settings
from megatune.data.bad_rows import copy_bad_rows
from megatune.data.prepare import Prepared
from megatune.data.rows import TokenRows
from megatune.data.steps import PreparedSteps, StepRows
from megatune.data.streaming.stream import Stream
from megatune.launch.context import RankContext
from megatune.training.agreement import on_rank_0
from megatune.training.rows import check_vocabulary, prepare_on_node
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage import writing
from megatune.training.streaming import StreamFollower, open_stream


@dataclass(frozen=True, slots=True)
class Feed:
    """What a trainer takes rows from.

    Attributes:
        evaluation: None where nothing is evaluated.
        lines: the report, for the banner.
        follower: of streamed rows; None where all are prepared.
    """

    rows: StepRows
    evaluation: TokenRows | None
    lines: Sequence[str]
    follower: StreamFollower | None = None


class RunData(Protocol):
    """The data of a run, before its model is there."""

    @property
    def key(self) -> str:
        """Of all that determines the rows."""
        ...

    @property
    def num_rows(self) -> int | None:
        """To train; None where nobody knows."""
        ...

    def feed(self, course: RunSchedule, vocab_size: int) -> Feed:
        """What the trainer takes rows from. Collective.

        Raises:
            MegatuneError: a token id is beyond the model's vocabulary (exit code 66), or the rows do not come.
        """
        ...


@contextmanager
def opened_data(context: RankContext, settings: Settings, source: Path, resumed: Path | None) -> Iterator[RunData]:
    """The data of a run.

    Args:
        source: the model's folder, with the tokenizer.
        resumed: the checkpoint that the run goes on from.

    Raises:
        MegatuneError: whatever keeps it from being read.
    """
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    if not settings.data.streaming:
        yield _PreparedData(prepare_on_node(context, settings, source), settings, output_dir)
        return
    stream = open_stream(context, settings, source, resumed)
    try:
        yield _StreamedData(stream, context, settings, output_dir, resumed is not None)
    finally:
        stream.close()


@dataclass(frozen=True, slots=True)
class _PreparedData:
    prepared: Prepared
    settings: Settings
    output_dir: Path

    @property
    def key(self) -> str:
        return self.prepared.key

    @property
    def num_rows(self) -> int | None:
        return len(self.prepared.train)

    def feed(self, course: RunSchedule, vocab_size: int) -> Feed:
        prepared = self.prepared
        check_vocabulary(prepared, vocab_size)
        lines = list(prepared.report.lines())
        quarantines = self.settings.data.on_bad_row == "quarantine"
        if quarantines and (copy := on_rank_0(self._copy_bad_rows)) is not None:
            lines.append(f"the rows left out are in {copy}")
        rows = PreparedSteps.from_settings(prepared.train, self.settings, course.global_batch_size)
        return Feed(rows, prepared.evaluation, lines)

    def _copy_bad_rows(self) -> Path | None:
        with writing(self.output_dir):
            return copy_bad_rows(self.prepared, self.output_dir)


@dataclass(frozen=True, slots=True)
class _StreamedData:
    stream: Stream
    context: RankContext
    settings: Settings
    output_dir: Path
    is_resumed: bool

    @property
    def key(self) -> str:
        return self.stream.key

    @property
    def num_rows(self) -> int | None:
        return None

    def feed(self, course: RunSchedule, vocab_size: int) -> Feed:
        follower = StreamFollower(
            self.stream,
            self.context,
            global_batch_size=course.global_batch_size,
            total_steps=course.total_steps,
            vocab_size=vocab_size,
            output_dir=self.output_dir if self.context.rank == 0 else None,
            resumed=self.is_resumed,
        )
        evaluation = follower.evaluation()
        rows = self.stream.steps(course.global_batch_size, is_packed=self.settings.packing)
        return Feed(rows, evaluation, self._lines(), follower)

    def _lines(self) -> list[str]:
        data = self.settings.data
        order = "in the order of the data" if data.disable_shuffling else "shuffled"
        lines = [f"streaming: {', '.join(data.dataset)}, {order} in blocks of {data.buffer_size} samples"]
        if self.stream.held_out is not None:
            lines += self.stream.held_out.lines()
        return lines
