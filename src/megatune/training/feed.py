"""The rows of a run, prepared before it or streamed: what each step trains, and what is evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatune.config.settings import Settings
from megatune.data.bad_rows import copy_bad_rows
from megatune.data.prepare import Prepared, open_prepared, prepare
from megatune.data.rows import TokenRows
from megatune.data.steps import PreparedSteps, StepRows
from megatune.data.streaming.stream import Stream
from megatune.data.tokenizer import load_tokenizer
from megatune.launch.context import RankContext
from megatune.training.agreement import on_rank_0
from megatune.training.machines import KEY, check_same, wait_for_machines
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import writing
from megatune.training.streaming import StreamFollower, check_token_ids, open_stream


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


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run, before its model is there.

    Attributes:
        key: of all that determines the rows.
        num_rows: to train; None where nobody knows.
        feed: makes what the trainer takes rows from, of the run's steps and the model's vocabulary. Collective. Raises
            MegatuneError where a token id is beyond the vocabulary (exit code 66), or the rows do not come.
    """

    key: str
    num_rows: int | None
    feed: Callable[[RunSchedule, int], Feed]


@contextmanager
def opened_data(context: RankContext, settings: Settings, source: Path, resumed: Path | None) -> Iterator[RunData]:
    """Yield the data of a run, which one process of each machine prepares or reads ahead. Collective.

    Args:
        source: the model's folder, with the tokenizer.
        resumed: the checkpoint that the run resumes from.

    Raises:
        MegatuneError: whatever keeps it from being read; the machines have different rows (exit code 65).
    """
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    if not settings.data.streaming:
        prepared = _prepare_on_machine(context, settings, source)
        yield RunData(prepared.key, len(prepared.train), partial(_prepared_feed, prepared, settings, output_dir))
        return
    with closing(open_stream(context, settings, source, resumed)) as stream:
        kept_in = output_dir if context.rank == 0 else None
        follow = partial(StreamFollower, stream, context, output_dir=kept_in, resumed=resumed is not None)
        yield RunData(stream.key, None, partial(_streamed_feed, stream, settings, follow))


def _prepare_on_machine(context: RankContext, settings: Settings, source: Path) -> Prepared:
    context.beat("data", 0, limit=float("inf"))
    prepared = prepare(settings, load_tokenizer(source)) if context.local_rank == 0 else None
    folder = wait_for_machines(context, "rows", str(prepared.directory.absolute()) if prepared else None)
    check_same(context, "prepared rows", _contents(prepared) if prepared else None)
    return prepared or open_prepared(Path(folder))


def _contents(prepared: Prepared) -> dict[str, str | int]:
    contents: dict[str, str | int] = {**prepared.key_parts, KEY: prepared.key}
    for name, rows, report in (
        ("training", prepared.train, prepared.report.train),
        ("evaluation", prepared.evaluation, prepared.report.evaluation),
    ):
        if rows is not None and report is not None:
            contents |= {f"{name} rows": report.rows, f"{name} tokens": report.tokens}
            contents[f"the digest of the {name} rows"] = rows.digest
    return contents


def _prepared_feed(
    prepared: Prepared, settings: Settings, output_dir: Path, schedule: RunSchedule, vocab_size: int
) -> Feed:
    def copy() -> Path | None:
        with writing(output_dir):
            return copy_bad_rows(prepared, output_dir)

    parts = (prepared.report.train, prepared.report.evaluation)
    check_token_ids(max(part.largest_id for part in parts if part is not None), vocab_size)
    lines = list(prepared.report.lines())
    if settings.data.on_bad_row == "quarantine" and (copied := on_rank_0(copy)) is not None:
        lines.append(f"the rows left out are in {copied}")
    rows = PreparedSteps.from_settings(prepared.train, settings, schedule.global_batch_size)
    return Feed(rows, prepared.evaluation, lines)


def _streamed_feed(
    stream: Stream, settings: Settings, follow: Callable[..., StreamFollower], schedule: RunSchedule, vocab_size: int
) -> Feed:
    size, data = schedule.global_batch_size, settings.data
    follower = follow(global_batch_size=size, total_steps=schedule.total_steps, vocab_size=vocab_size)
    evaluation = follower.evaluation()
    order = "in the order of the data" if data.disable_shuffling else "shuffled"
    lines = [f"streaming: {', '.join(data.dataset)}, {order} in blocks of {data.buffer_size} samples"]
    if stream.held_out is not None:
        lines += stream.held_out.lines()
    return Feed(stream.steps(size, is_packed=settings.packing), evaluation, lines, follower)
