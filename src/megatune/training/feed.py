"""The rows of a run, prepared before it or streamed: what each step trains, and what is evaluated on.

One process of each machine prepares or reads ahead; all ranks follow a stream step by step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# What `load_tokenizer` imports: here ranks, which are forks of the process that imports this, share it.
import transformers.models.auto.tokenization_auto  # noqa: F401

from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import Settings, with_settings
from megatune.data.bad_rows import BAD_ROWS_FILE
from megatune.data.cache.key import DAY, streamed_key
from megatune.data.companions import CompanionRows
from megatune.data.encode import load_tokenizer
from megatune.data.order import PreparedSteps, StepRows
from megatune.data.pictures import PictureCounts
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
    """What a trainer takes rows from."""

    rows: StepRows
    evaluation: TokenRows | None  # None where nothing is evaluated
    lines: Sequence[str]  # the report
    summary: str  # of it, in a line
    warnings: Sequence[str] = ()
    follower: StreamFollower | None = None  # of streamed rows; None where all are prepared
    quarantine: Quarantine | None = None  # on rank 0, where on_bad_row asks for it
    has_pictures: bool = True  # whether rows may have some
    # What the objective looks at before each step and each evaluation: the same rows, with answers to other prompts.
    companions: PreparedSteps | None = None
    companions_evaluation: TokenRows | None = None
    # Those to evaluate, of each data set by itself, by its name; {} where they are evaluated together.
    each: Mapping[str, TokenRows] = field(default_factory=dict)


class ModelLimits(NamedTuple):
    """What a model can take."""

    vocab_size: int  # rows of its embedding
    positions: int  # of a document


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run, before its model is there."""

    key: str  # of all that determines the rows
    key_parts: dict[
        str, str
    ]  # what that is, in words, each with a digest; of a stream the day that its template states
    num_rows: int | None  # to train; None where nobody knows
    pictures: PictureCounts | None  # of rows to train; None where nobody knows
    lengths: RowLengths | None  # of them; None where nobody knows
    # Makes what the trainer takes rows from, of the run's steps and the model's limits. Collective. Raises
    # MegatuneError where a token id is beyond the vocabulary (exit code 66), a document beyond the positions (65), or
    # the rows do not come.
    feed: Callable[[RunSchedule, ModelLimits], Feed]


def on_its_day(settings: Settings, resumed: Path | None) -> Settings:
    """Return settings with the day that templates state: the checkpoint's that the run resumes from, or today's.
    Collective."""
    if not settings.data.swift_version or settings.data.template_date is not None:
        return settings
    state = read_state(resumed) if resumed is not None else None
    parts = {} if state is None else state.rows_parts
    day = on_rank_0(lambda: parts.get(DAY) or date.today().isoformat())
    return with_settings(settings, {"data.template_date": day})


@contextmanager
def opened_data(context: RankContext, settings: Settings, source: Path, resumed: Path | None) -> Iterator[RunData]:
    """Yield the data of a run, which one process of each machine prepares or reads ahead. Collective.

    Args:
        source: the model's folder, with the tokenizer.
        resumed: the checkpoint that the run resumes from.

    Raises:
        MegatuneError: whatever keeps it from being read; the machines have different rows (exit code 65).
    """
    if not settings.data.streaming:
        prepared = _prepare_on_machine(context, settings, source)
        feed = partial(_prepared_feed, prepared, settings, resumed is not None)
        pictures = prepared.report.train.pictures
        lengths = lengths_of(prepared.train, pictures)
        parts = on_rank_0(lambda: {**prepared.key_parts, ROWS: prepared.train.digest})
        yield RunData(prepared.key, parts, len(prepared.train), pictures, lengths, feed)
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
    folder = wait_for_machines(context, "rows", str(prepared.directory.absolute()) if prepared else None)
    contents: dict[str, str | int] = {}
    if prepared is not None:
        contents = {**prepared.key_parts, KEY: prepared.key}
        contents |= _rows_contents(prepared.report.train, prepared.train, "training ")
        if prepared.evaluation is not None and prepared.report.evaluation is not None:
            contents |= _rows_contents(prepared.report.evaluation, prepared.evaluation, "evaluation ")
    check_same(context, "prepared rows", contents or None)
    return prepared or open_prepared(Path(folder))


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
    has_pictures = any(part.pictures.tokens for part in parts)
    report = prepared.report
    feed = Feed(rows, prepared.evaluation, lines, report.summary(), report.warnings())
    feed = replace(feed, quarantine=quarantine, has_pictures=has_pictures, each=prepared.each)
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
    """Open the run's file of bad rows, on rank 0 where on_bad_row asks for it. Collective."""
    assert settings.run.output_dir is not None
    if settings.data.on_bad_row != "quarantine":
        return None
    made: list[Quarantine] = []
    on_rank_0(lambda: made.append(Quarantine(Path(settings.run.output_dir or ""), keep=resumed)))
    return made[0] if made else None


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
        folder, name, evaluation = json.loads(wait_for_machines(context, "stream", None))
        check_same(context, "data to stream", None)
        held_out = None if evaluation is None else HeldOut.load(Path(evaluation))
        return Stream(StreamFolder(Path(folder)), name, held_out, settings.run.ddp_timeout)
    tokenizer = load_tokenizer(tokenizer_dir)
    vision = load_vision_input(tokenizer_dir, tokenizer, settings.data)
    pipeline = Pipeline.of(settings, tokenizer, vision)
    key = streamed_key(settings, tokenizer, vision)
    made = StreamFolder.make(cache_dir() / "stream", key.name)
    left_off = read_state(resumed) if resumed is not None else None
    state = None
    if left_off is not None and left_off.stream is not None and left_off.rows_digest == key.name:
        state = StreamState.from_json(left_off.stream)  # one of other rows is refused when it is loaded
    stream = StartedStream(StreamRequest(made, pipeline, key.name, state, _machines(context)))
    try:
        evaluation = None if stream.held_out is None else str(stream.held_out.folder)
        wait_for_machines(context, "stream", json.dumps([str(made.path), key.name, evaluation]))
        check_same(context, "data to stream", {**key.parts, KEY: key.name})
    except BaseException:
        stream.close()
        raise
    return stream


def _machines(context: RankContext) -> Machines | None:
    """Open the store through which machines share a stream, on the first of them; None where there is one alone."""
    if num_machines(context) == 1:
        return None
    if context.rank == 0:
        store = open_store(context.master_addr)
        _stores.append(store)
        groups.store_set("stream store", str(store.port))
    port = int(wait_for_note(context, "stream store"))
    return Machines(context.node_rank, num_machines(context), context.master_addr, port)


_stores: list[Any] = []  # they last as long as this process: other machines may still wait for what is in them


class StreamFollower:
    """What a rank does with its stream before and after each step.

    Args:
        limits: of the model.
        quarantine: the run's file of bad rows; None where this rank keeps none.
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
        """Wait for the rows of a step, counted from 0, and look at the blocks that they are in. Collective."""
        first = step * self._size
        beat = partial(self._context.beat, "data", self._context.step)
        for meta, folder in self._stream.before(first, first + self._size, self._last, beat):
            # Blocks of the same rows so far end with the same row: every rank comes to this one at this step.
            what = f"rows in block {meta.number} of the stream, which step {step + 1} is the first to train"
            check_same(self._context, what, _rows_contents(meta.tokens, TokenRows(folder / PART)))
            check_limits(meta.tokens, self._limits)
            if self._context.rank == 0 and (line := meta.line()) is not None:
                say(line)
                self._keep_bad_rows(folder)

    def after(self, step: int) -> None:
        """Delete what no later step needs: all ranks have trained this one, counted from 0."""
        self._stream.after(step * self._size)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint needs after this number of steps."""
        return self._stream.state(step * self._size).to_json()

    def epoch_after(self, step: int) -> float | None:
        """Return the passes done after this number of steps, None where that is not known yet."""
        return self._stream.epoch_after(step * self._size)

    def _keep_bad_rows(self, folder: Path) -> None:
        if self._quarantine is not None:
            self._quarantine.copy(folder)


def _rows_contents(report: TokenReport, rows: TokenRows, part: str = "") -> dict[str, str | int]:
    """Return what machines compare of rows, see `check_same`."""
    counts = {f"{part}rows": len(rows), f"{part}tokens": report.tokens}
    return {**counts, f"the digest of the {part}rows": rows.digest}


def check_limits(tokens: TokenReport, limits: ModelLimits) -> None:
    """Refuse a token id that the model has no embedding for, and a document of more positions than it was made for."""
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
