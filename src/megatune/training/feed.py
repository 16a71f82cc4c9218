"""The training and evaluation rows of a run, prepared before it or streamed.

One process of each machine prepares rows or reads ahead; all ranks follow a stream step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# `load_tokenizer` imports this. Imported here, ranks share it, since they are forks of the process that imports feed.
import transformers.models.auto.tokenization_auto  # noqa: F401

from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import Settings, with_settings
from megatune.data.bad_rows import BAD_ROWS_FILE
from megatune.data.cache.key import DAY, streamed_key
from megatune.data.companions import CompanionRows
from megatune.data.encode import load_tokenizer
from megatune.data.media_table import MediaCounts
from megatune.data.order import PreparedSteps, StepRows
from megatune.data.pipeline import Pipeline
from megatune.data.prepare import Prepared, open_prepared, prepare
from megatune.data.report import TokenReport
from megatune.data.rows import TokenRows
from megatune.data.streaming.blocks import PART, StreamState
from megatune.data.streaming.producer import EVALUATION, HeldOut, StreamFolder, StreamRequest
from megatune.data.streaming.sharing import Machines, open_store
from megatune.data.streaming.stream import StartedStream, Stream
from megatune.data.vision import load_vision_input
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.digests import cache_dir
from megatune.launch.context import RankContext
from megatune.objectives.choose import make_objective
from megatune.plan.rows import RowLengths
from megatune.progress import say
from megatune.training.agreement import KEY, check_same, num_machines, on_rank_0, wait_for_machines, wait_for_note
from megatune.training.loaders import Quarantine
from megatune.training.planning import lengths_of
from megatune.training.run_schedule import RunSchedule
from megatune.training.train_state import ROWS, read_state


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows of a trainer."""

    rows: StepRows
    evaluation: TokenRows | None  # None without evaluation
    lines: Sequence[str]  # the report
    summary: str  # the report in one line
    warnings: Sequence[str] = ()
    follower: StreamFollower | None = None  # of streamed rows; None if all rows are prepared
    quarantine: Quarantine | None = None  # on rank 0, with on_bad_row: quarantine
    has_media: bool = True  # whether rows may have images or videos
    # Read by the objective before each step and each evaluation: the same rows, with answers to other prompts.
    companions: PreparedSteps | None = None
    companions_evaluation: TokenRows | None = None
    # Evaluation rows of each data set, by its name, with eval_on_each_dataset; else {}.
    each: Mapping[str, TokenRows] = field(default_factory=dict)


class ModelLimits(NamedTuple):
    """Limits of a model's input."""

    vocab_size: int  # rows of its embedding
    positions: int  # of one sequence


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run before its model is loaded."""

    key: str  # digest of everything that determines the rows
    key_parts: dict[str, str]  # description -> digest; for a stream, only the date that its template states
    num_rows: int | None  # training rows; this and the following are None for a stream
    media: MediaCounts | None  # of training rows
    lengths: RowLengths | None  # of training rows
    # Creates the feed. Collective. Raises MegatuneError if a token id is outside the vocabulary (exit code 66), a
    # sequence is longer than the model's positions (65), or reading the rows fails.
    feed: Callable[[RunSchedule, ModelLimits], Feed]


def with_template_date(settings: Settings, resumed: Path | None) -> Settings:
    """Set the date that templates state: the checkpoint's if the run resumes, else today's. Collective."""
    if not settings.data.swift_version or settings.data.template_date is not None:
        return settings
    state = read_state(resumed) if resumed is not None else None
    parts = {} if state is None else state.rows_parts
    day = on_rank_0(lambda: parts.get(DAY) or date.today().isoformat())
    return with_settings(settings, {"data.template_date": day})


@contextmanager
def opened_data(context: RankContext, settings: Settings, source: Path, resumed: Path | None) -> Iterator[RunData]:
    """Prepare or stream the data of a run, with one process of each machine. Collective.

    Args:
        source: the model's folder, with the tokenizer.
        resumed: the checkpoint that the run resumes from.

    Raises:
        MegatuneError: the data cannot be read; machines have different rows (exit code 65).
    """
    if not settings.data.streaming:
        prepared = _prepare_on_machine(context, settings, source)
        feed = partial(_prepared_feed, prepared, settings, resumed is not None)
        media = prepared.report.train.media
        lengths = lengths_of(prepared.train, media)
        parts = on_rank_0(lambda: {**prepared.key_parts, ROWS: prepared.train.digest})
        yield RunData(prepared.key, parts, len(prepared.train), media, lengths, feed)
        return
    days = {DAY: day} if (day := settings.data.template_date) is not None else {}
    with closing(open_stream(context, settings, source, resumed)) as stream:
        yield RunData(
            stream.key, days, None, None, None, partial(_streamed_feed, stream, context, settings, resumed is not None)
        )


def _prepare_on_machine(context: RankContext, settings: Settings, source: Path) -> Prepared:
    context.beat("data", 0, limit=float("inf"))
    prepared = None
    if context.local_rank == 0:
        tokenizer = load_tokenizer(source)
        prepared = prepare(settings, tokenizer, vision=load_vision_input(source, tokenizer, settings.data))
    folder = wait_for_machines(context, "rows", prepared.directory.absolute() if prepared else None)
    contents: dict[str, str | int] = {}
    if prepared is not None:
        contents = {**prepared.key_parts, KEY: prepared.key}
        contents |= _rows_contents(prepared.report.train, prepared.train, "training ")
        if prepared.evaluation is not None and prepared.report.evaluation is not None:
            contents |= _rows_contents(prepared.report.evaluation, prepared.evaluation, "evaluation ")
    check_same(context, "prepared rows", contents or None)
    return prepared or open_prepared(folder)


def _prepared_feed(
    prepared: Prepared, settings: Settings, resumed: bool, schedule: RunSchedule, limits: ModelLimits
) -> Feed:
    quarantine = _quarantine(settings, resumed)
    parts = [part for part in (prepared.report.train, prepared.report.evaluation) if part is not None]
    for part in parts:
        check_limits(part, limits)
    lines = list(prepared.report.lines())
    if on_rank_0(lambda: quarantine is not None and quarantine.copy(prepared.directory)):
        lines.append(f"the rows left out are in {Path(settings.run.output_dir or '') / BAD_ROWS_FILE}")
    rows = PreparedSteps.from_settings(prepared.train, settings, schedule.global_batch_size)
    has_media = any(part.media.tokens for part in parts)
    report = prepared.report
    feed = Feed(rows, prepared.evaluation, lines, report.summary(), report.warnings())
    feed = replace(feed, quarantine=quarantine, has_media=has_media, each=prepared.each)
    if not make_objective(settings).has_companions:
        return feed
    steps = replace(rows, rows=CompanionRows(prepared.train.directory), ordered_by=prepared.train)
    evaluation = None if prepared.evaluation is None else CompanionRows(prepared.evaluation.directory)
    return replace(feed, companions=steps, companions_evaluation=evaluation)


def _streamed_feed(
    stream: Stream, context: RankContext, settings: Settings, resumed: bool, schedule: RunSchedule, limits: ModelLimits
) -> Feed:
    size, data = schedule.global_batch_size, settings.data
    quarantine = _quarantine(settings, resumed)
    follower = StreamFollower(stream, context, settings, schedule, limits, quarantine)
    evaluation = follower.evaluation()
    order = "in the order of the data" if data.disable_shuffling else "shuffled"
    lines = [f"streaming: {', '.join(data.dataset)}, {order} in blocks of {data.buffer_size} samples"]
    if stream.held_out is not None:
        lines += stream.held_out.lines()
    steps = stream.steps(size, is_packed=settings.packing, is_pairs=settings.run.stage in PAIR_STAGES)
    return Feed(steps, evaluation, lines, lines[0], follower=follower, quarantine=quarantine)


def _quarantine(settings: Settings, resumed: bool) -> Quarantine | None:
    """Open the run's file of bad rows on rank 0, with on_bad_row: quarantine. Collective."""
    assert settings.run.output_dir is not None
    if settings.data.on_bad_row != "quarantine":
        return None
    made: list[Quarantine] = []
    on_rank_0(lambda: made.append(Quarantine(Path(settings.run.output_dir or ""), keep=resumed)))
    return made[0] if made else None


def open_stream(context: RankContext, settings: Settings, tokenizer_dir: Path, resumed: Path | None) -> Stream:
    """Start to stream the data, from the position in a checkpoint. Collective.

    Args:
        resumed: the checkpoint, None to start at the beginning of the data.

    Raises:
        MegatuneError: data sets or tokenizer are missing (exit codes 64 and 66) or differ between machines (65), or the
            cache cannot be written (73).
    """
    context.beat("data", 0, limit=float("inf"))  # data sets of a hub are downloaded here
    if context.local_rank != 0:
        folder, name, evaluation = wait_for_machines(context, "stream", None)
        check_same(context, "data to stream", None)
        held_out = None if evaluation is None else HeldOut.load(evaluation)
        return Stream(StreamFolder(folder), name, held_out, settings.run.ddp_timeout)
    tokenizer = load_tokenizer(tokenizer_dir)
    vision = load_vision_input(tokenizer_dir, tokenizer, settings.data)
    pipeline = Pipeline.of(settings, tokenizer, vision)
    key = streamed_key(settings, tokenizer, vision)
    made = StreamFolder.make(cache_dir() / "stream", key.name)
    left_off = read_state(resumed) if resumed is not None else None
    state = None
    if left_off is not None and left_off.stream is not None and left_off.rows_digest == key.name:
        state = StreamState.from_json(left_off.stream)  # a state of other rows is refused later
    stream = StartedStream(StreamRequest(made, pipeline, key.name, state, _machines(context)))
    try:
        evaluation = None if stream.held_out is None else stream.held_out.folder
        wait_for_machines(context, "stream", (made.path, key.name, evaluation))
        check_same(context, "data to stream", {**key.parts, KEY: key.name})
    except BaseException:
        stream.close()
        raise
    return stream


def _machines(context: RankContext) -> Machines | None:
    """Open the store through which machines share a stream; return None for a single machine."""
    if num_machines(context) == 1:
        return None
    if context.rank == 0:
        store = open_store(context.master_addr)
        _stores.append(store)
        groups.store_set("stream store", store.port)
    port = wait_for_note(context, "stream store")
    return Machines(context.node_rank, num_machines(context), context.master_addr, port)


_stores: list[Any] = []  # kept until this process ends: other machines may still read from them


class StreamFollower:
    """Follows a stream on one rank, before and after each step.

    Args:
        limits: of the model.
        quarantine: the run's file of bad rows, if this rank writes it.
    """

    def __init__(
        self,
        stream: Stream,
        context: RankContext,
        settings: Settings,
        schedule: RunSchedule,
        limits: ModelLimits,
        quarantine: Quarantine | None,
    ) -> None:
        self._stream, self._context, self.summary = stream, context, stream.summary
        self._size, self._last = schedule.global_batch_size, schedule.global_batch_size * schedule.total_steps
        self._limits = limits
        self._quarantine = quarantine

    def evaluation(self) -> TokenRows | None:
        """Return the evaluation rows. Collective."""
        held_out = self._stream.held_out
        if held_out is None:
            return None
        rows = TokenRows(held_out.folder / EVALUATION)
        check_same(self._context, "evaluation rows", _rows_contents(held_out.tokens, rows))
        check_limits(held_out.tokens, self._limits)
        self._keep_bad_rows(held_out.folder)
        return rows

    def before(self, step: int) -> None:
        """Wait for the rows of a step, counted from 0, and check their blocks. Collective."""
        first = step * self._size
        beat = partial(self._context.beat, "data", self._context.step)
        for meta, folder in self._stream.before(first, first + self._size, self._last, beat):
            # Blocks end with the same row on all machines, so that every rank reaches this block at this step.
            what = f"rows in block {meta.number} of the stream, which step {step + 1} is the first to train"
            check_same(self._context, what, _rows_contents(meta.tokens, TokenRows(folder / PART)))
            check_limits(meta.tokens, self._limits)
            if self._context.rank == 0 and (line := meta.line()) is not None:
                say(line)
                self._keep_bad_rows(folder)

    def after(self, step: int) -> None:
        """Delete blocks that no later step needs, after all ranks have trained this step, counted from 0."""
        self._stream.after(step * self._size)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the stream after this number of steps, for a checkpoint."""
        return self._stream.state(step * self._size).to_json()

    def epoch_after(self, step: int) -> float | None:
        """Return the number of epochs after this number of steps, None if unknown yet."""
        return self._stream.epoch_after(step * self._size)

    def _keep_bad_rows(self, folder: Path) -> None:
        if self._quarantine is not None:
            self._quarantine.copy(folder)


def _rows_contents(report: TokenReport, rows: TokenRows, part: str = "") -> dict[str, str | int]:
    """Return counts and digest of rows, for `check_same`."""
    counts = {f"{part}rows": len(rows), f"{part}tokens": report.tokens}
    return {**counts, f"the digest of the {part}rows": rows.digest}


def check_limits(tokens: TokenReport, limits: ModelLimits) -> None:
    """Check that the model has an embedding for each token id, and positions for the longest sequence."""
    if tokens.largest_id >= limits.vocab_size:
        what = f"token id {tokens.largest_id} is beyond the model's vocabulary of {limits.vocab_size}"
        why = "the tokenizer and the weights belong to different models"
        fix = "use the tokenizer that was published with the weights"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.INPUT)
    if tokens.longest > limits.positions:
        what = f"the longest packed document has {tokens.longest} tokens, the model {limits.positions} positions"
        why = "each document of a packed row counts its positions from 0"
        fix = f"write cutoff_len: {limits.positions}, or leave out rows of more tokens"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.DATA)
