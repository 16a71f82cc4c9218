"""Streamed rows: cut to blocks, produced by a process of their own, the same in every layout and from any start."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from tokenizer_kit import plain_tokenizer

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data import workers
from megatune.data.bad_rows import LengthError, RowError, UnsupportedRow
from megatune.data.batches import Batch, Collator
from megatune.data.encode import Encoded, Encoder
from megatune.data.loader import StepLoader
from megatune.data.media_table import DocumentMedia
from megatune.data.order import mixed_order
from megatune.data.pipeline import Pipeline
from megatune.data.rows import Document, TokenRows
from megatune.data.samples import RowMetadata
from megatune.data.streaming.blocks import ORDER_FILE, PART, BlockMeta, StreamState
from megatune.data.streaming.producer import StreamFolder, StreamRequest
from megatune.data.streaming.sharing import Exchange, Machines, open_store
from megatune.data.streaming.stream import StartedStream, Stream, StreamedSteps
from megatune.errors import ExitCode, MegatuneError

TOKENIZER = plain_tokenizer()
SIZES = (11, 7, 4)  # usable rows of each data set
NAMES = [f"{name}{number}" for name, size in zip("abc", SIZES, strict=True) for number in range(size)]
STRATEGIES = {
    "concat": {},
    "under": {"mix_strategy": "interleave_under"},
    "under, by probability": {"mix_strategy": "interleave_under", "interleave_probs": [0.5, 0.3, 0.2]},
    "over": {"mix_strategy": "interleave_over"},
    "over, by probability": {"mix_strategy": "interleave_over", "interleave_probs": [0.2, 0.3, 0.5]},
    "once": {"mix_strategy": "interleave_once"},
    "once, by probability": {"mix_strategy": "interleave_once", "interleave_probs": [0.1, 0.1, 0.8]},
}
Block = tuple[BlockMeta, list[list[str]]]  # a block, and the texts of each of its rows


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _load_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy reads a file's header with `ast`, which fails at times where threads of CPython 3.11 do so at once."""
    lock, load = Lock(), np.load

    def load_in_turn(*args: Any, **options: Any) -> Any:
        with lock:
            return load(*args, **options)

    monkeypatch.setattr(np, "load", load_in_turn)


@pytest.fixture
def datasets(tmp_path: Path) -> list[str]:
    """Three data sets of texts, the first of two files; some rows are bad, the last one of a data set among them."""
    made = []
    for name, size in zip("abc", SIZES, strict=True):
        lines = [line for number in range(size) for line in _lines(name, number)]
        folder = tmp_path / name
        folder.mkdir()
        half = len(lines) // 2 if name == "a" else len(lines)
        for part, content in enumerate([lines[:half], lines[half:]]):
            if content:
                (folder / f"{part}.jsonl").write_text("".join(content), encoding="utf-8")
        made.append(str(folder))
    return made


def _lines(name: str, number: int) -> Iterator[str]:
    yield json.dumps({"text": f"{name}{number}"}) + "\n"
    if number % 3 == 0:
        yield '{"text": 5}\n'
    if number % 5 == 4:
        yield "{broken\n"


def request(
    tmp_path: Path, datasets: Sequence[str], state: StreamState | None = None, *, seed: int = 3, **data: Any
) -> StreamRequest:
    values = {"packing": False, "buffer_size": 5, "streaming": True, "cutoff_len": 16, **data}
    settings = Settings(
        run=RunSettings(stage="pt", seed=seed, ddp_timeout=60), data=DataSettings(dataset=list(datasets), **values)
    )
    folder = StreamFolder.make(tmp_path / "stream", "test")
    return StreamRequest(folder, Pipeline.of(settings, TOKENIZER), "key", state)


def blocks(asked: StreamRequest, exchange: Exchange | None = None) -> Iterator[Block]:
    """The blocks of a stream, without end."""
    mixed = asked.stream(asked.held_out(), exchange)
    while True:
        number = asked.write(mixed).number
        folder = next(block.folder for block in asked.folder.blocks() if block.number == number)
        meta = BlockMeta.load(folder)
        rows, order = TokenRows(folder / PART), np.load(folder / ORDER_FILE)
        assert sorted(order.tolist()) == list(range(len(rows))) == list(range(meta.tokens.rows))
        yield meta, [[text(document.input_ids) for document in rows[row]] for row in order.tolist()]


def text(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens)).removesuffix("<|endoftext|>")


def epoch_of(stream: Iterator[Block]) -> Iterator[list[str]]:
    """The texts of each epoch, in order."""
    epoch, texts = 0, []
    for meta, rows in stream:
        if meta.end.epoch > epoch:
            yield texts
            epoch, texts = meta.end.epoch, []
        texts += [text for row in rows for text in row]


@pytest.mark.covering
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_are_the_data_sets_mixed(strategy: str, datasets: list[str], tmp_path: Path) -> None:
    mixing = STRATEGIES[strategy]
    name, probabilities = mixing.get("mix_strategy", "concat"), mixing.get("interleave_probs")
    expected = [NAMES[number] for number in mixed_order(SIZES, name, probabilities, None, 3)]
    in_order = list(islice(epoch_of(blocks(request(tmp_path, datasets, disable_shuffling=True, **mixing))), 2))
    assert in_order == [expected] * 2
    shuffled = list(islice(epoch_of(blocks(request(tmp_path, datasets, **mixing))), 2))
    for start in range(0, len(expected), 5):
        for epoch in shuffled:
            assert sorted(epoch[start : start + 5]) == sorted(expected[start : start + 5])
    assert shuffled[0] != shuffled[1] != expected


@pytest.mark.covering
@pytest.mark.parametrize(
    ("strategy", "packing"),
    [
        ("concat", False),
        ("concat", True),
        ("under, by probability", True),
        ("over", False),
        ("once, by probability", True),
    ],
)
def test_every_block_is_a_function_of_where_it_begins(
    strategy: str, packing: bool, datasets: list[str], tmp_path: Path
) -> None:
    data = {"packing": packing, "val_size": 2, "on_bad_row": "quarantine", **STRATEGIES[strategy]}
    whole = list(islice(blocks(request(tmp_path, datasets, **data)), 10))
    assert whole[-1][0].end.epoch > 0
    first_row = 0
    for number, (meta, _) in enumerate(whole):
        assert (meta.number, meta.start.first_row) == (number, first_row)
        first_row += meta.tokens.rows
        if number not in (0, 4, 9):  # of both epochs
            continue
        state = StreamState.from_json(json.loads(json.dumps(meta.start.to_json())))
        assert next(blocks(request(tmp_path, datasets, state, **data))) == whole[number]
    bad = sum(report.dropped.total() for report in whole[-1][0].end.reports)
    assert bad == sum(meta.dropped.total() for meta, _ in whole) > 5
    assert whole[0][0].line() is not None


def test_bad_rows_of_the_first_pass_are_bounded(datasets: list[str], tmp_path: Path) -> None:
    """Over all blocks, those before a resume too; later passes repeat them, and are not counted."""
    data = {"mix_strategy": "interleave_over", "disable_shuffling": True}
    whole = list(islice(blocks(request(tmp_path, datasets, **data, max_bad_rows=6)), 14))
    assert max(report.dropped.total() for report in whole[-1][0].end.reports) > 6
    last = next(n for n, (meta, _) in enumerate(whole) if meta.end.reports[0].dropped.total() > 4)
    for state in (None, whole[last][0].start):
        stream = blocks(request(tmp_path, datasets, state, **data, max_bad_rows=4))
        with pytest.raises(MegatuneError, match=r"a: 6 of \d+ rows cannot be trained on, max_bad_rows is 4"):
            list(islice(stream, last + 1 if state is None else 1))


def test_packed_rows_hold_every_sample_once(datasets: list[str], tmp_path: Path) -> None:
    asked = request(tmp_path, datasets, packing=True, cutoff_len=64)
    meta, rows = next(blocks(asked))
    assert meta.tokens.rows < meta.tokens.samples == 5
    assert sorted(text for row in rows for text in row) == sorted(NAMES[:5])


def test_a_resumed_stream_reads_on_where_it_was(tmp_path: Path) -> None:
    lines = [json.dumps({"text": str(number), "unused": "x" * 20_000}) for number in range(1000)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines), encoding="utf-8")
    names, data = [str(tmp_path / "long.jsonl")], {"buffer_size": 190}
    state = list(islice(blocks(request(tmp_path, names, **data)), 5))[-1][0].start
    resumed = request(tmp_path, names, state, **data)
    mixed = resumed.stream(None)
    before = _bytes_read()
    mixed.write_block(resumed.folder.path)
    assert _bytes_read() - before < (tmp_path / "long.jsonl").stat().st_size / 2, "the file was read from its start"


def _bytes_read() -> int:
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


@pytest.mark.covering
@pytest.mark.parametrize("strategy", ["concat", "over", "under, by probability"])
def test_rows_held_out_are_never_trained(strategy: str, datasets: list[str], tmp_path: Path) -> None:
    mixing = STRATEGIES[strategy]
    asked = request(tmp_path, datasets, val_size=3, disable_shuffling=True, **mixing)
    expected = next(epoch_of(blocks(request(tmp_path, datasets, disable_shuffling=True, **mixing))))
    held_out = asked.held_out()
    assert held_out is not None
    evaluated = [text(row[0].input_ids) for row in TokenRows(held_out.folder / "evaluation")]
    assert evaluated == expected[:3]
    for epoch in islice(epoch_of(blocks(asked)), 2):
        assert not set(epoch) & set(evaluated)
        if strategy == "concat":
            assert epoch == expected[3:]


def test_evaluation_data_is_taken_whole(datasets: list[str], tmp_path: Path) -> None:
    asked = request(tmp_path, datasets[:1], eval_dataset=datasets[1:])
    held_out = asked.held_out()
    assert held_out is not None
    assert [text(row[0].input_ids) for row in TokenRows(held_out.folder / "evaluation")] == NAMES[11:]
    assert any("dropped" in line for line in held_out.lines())


@pytest.mark.parametrize(
    ("data", "exit_code", "message"),
    [
        ({"val_size": 22}, ExitCode.SETTINGS, "val_size leaves nothing of .* to train on"),
        ({"val_size": 12, "mix_strategy": "interleave_over"}, ExitCode.SETTINGS, "val_size leaves nothing of .*c to"),
        ({"on_bad_row": "error"}, ExitCode.DATA, r"of \d+ rows cannot be trained on"),
        ({"max_bad_rows": 0}, ExitCode.DATA, r"of \d+ rows cannot be trained on, max_bad_rows is 0"),
        ({"max_samples": 1, "on_bad_row": "error", "buffer_size": 3}, None, ""),
    ],
)
def test_what_the_settings_refuse(
    data: dict[str, Any], exit_code: ExitCode | None, message: str, datasets: list[str], tmp_path: Path
) -> None:
    if exit_code is None:  # no bad row is among the first of each data set
        assert [row for _, rows in islice(blocks(request(tmp_path, datasets, **data)), 1) for row in rows]
        return
    with pytest.raises(MegatuneError, match=message) as refusal:
        list(islice(blocks(request(tmp_path, datasets, **data)), 3))
    assert refusal.value.exit_code == exit_code


def test_placeholders_without_a_value_are_refused_before_they_are_trained(tmp_path: Path) -> None:
    (tmp_path / "named.txt").write_text("I am {{name}}\n" + "and more\n" * 100, encoding="utf-8")
    with pytest.raises(MegatuneError, match=r"\{\{name\}\} is in the data and model_name is not set") as refusal:
        next(blocks(request(tmp_path, [str(tmp_path / "named.txt")])))
    assert refusal.value.exit_code == ExitCode.SETTINGS
    assert next(blocks(request(tmp_path, [str(tmp_path / "named.txt")], model_name="Tuna")))


def global_batches(steps: StreamedSteps, size: int, **loading: int) -> list[list[str]]:
    """The texts of each step, over all ranks in the order of the global batch."""
    collator = Collator(1, steps.is_packed, sequence_multiple=1, document_multiple=1, pad_token_id=0)
    by_rank = [
        StepLoader(
            steps,
            collator,
            data_parallel_rank=rank,
            data_parallel_size=size,
            num_micro_batches=steps.global_batch_size // size,
            same_length=False,
            **loading,
        )
        for rank in range(size)
    ]
    seen = []
    for ranks in zip(*by_rank, strict=True):
        in_order: list[Batch] = [
            batch for micro in zip(*(batches for _, batches in ranks), strict=True) for batch in micro
        ]
        seen.append([text(batch.input_ids[0, : batch.lengths[0]].tolist()) for batch in in_order])
    return seen


@pytest.mark.usefixtures("_load_in_turn")  # machines are threads here
@pytest.mark.parametrize(("strategy", "processes"), [("concat", 1), ("over, by probability", 1), ("concat", 2)])
def test_machines_tokenise_a_stream_together(
    strategy: str, processes: int, datasets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its share of the rows, and all the same blocks as one machine makes alone; from any block on, too."""
    monkeypatch.setattr(workers, "CHUNK_ROWS", 3)
    monkeypatch.setattr("megatune.data.pipeline.usable_processes", lambda asked, *_: (asked, ""))
    data = {**STRATEGIES[strategy], "packing": True, "cutoff_len": 32, "preprocessing_num_workers": processes}
    datasets = datasets if processes == 1 else datasets[:1]  # each pass over one starts processes
    alone = list(islice(blocks(request(tmp_path, datasets, **{**data, "preprocessing_num_workers": 1})), 8))
    for state in (None, alone[4][0].start) if processes == 1 else (None,):
        expected = alone[: 8 if processes == 1 else 4] if state is None else alone[4:]
        found, encoded = together(2, lambda number: request(tmp_path, datasets, state, **data), len(expected))  # noqa: B023
        assert found == [expected, expected]
        if processes == 1:  # else some are encoded in other processes
            assert min(encoded) > 0.3 * sum(encoded)


def together(
    count: int, asked: Callable[[int], StreamRequest], number_of_blocks: int
) -> tuple[list[list[Block]], list[int]]:
    """The blocks of each of several machines, which are threads here, and how many rows each has encoded."""
    store, found, encoded = open_store("localhost"), [[] for _ in range(count)], [0] * count

    def run(number: int) -> None:
        class Counting(Encoder):
            def encode(self, examples: Sequence[Any]) -> Any:
                encoded[number] += len(examples)
                return super().encode(examples)

        exchange = Exchange(Machines(number, count, "localhost", store.port))
        one = asked(number)
        if one.pipeline.settings.data.preprocessing_num_workers == 1:
            encoder = Counting(**{each.name: getattr(one.pipeline.encoder, each.name) for each in fields(Encoder)})
            one = replace(one, pipeline=replace(one.pipeline, encoder=encoder))
        try:
            found[number] = list(islice(blocks(one, exchange), number_of_blocks))
        except BaseException as error:
            exchange.fail(repr(error))  # the others would wait for its share
            raise

    with ThreadPoolExecutor(count) as threads:
        try:
            list(threads.map(run, range(count), timeout=120))
        finally:  # what still waits then ends
            Exchange(Machines(0, count, "localhost", store.port)).fail("the test has ended")
    return found, encoded


@pytest.mark.usefixtures("_load_in_turn")
def test_a_machine_that_read_other_rows_tokenises_them_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its blocks differ, and are named, as they would without sharing."""
    monkeypatch.setattr(workers, "CHUNK_ROWS", 3)
    for machine, changed in enumerate(("7", "seven")):
        (tmp_path / f"{machine}").mkdir()
        texts = [changed if number == 7 else str(number) for number in range(20)]
        (tmp_path / f"{machine}" / "rows.txt").write_text("\n".join(texts), encoding="utf-8")

    def asked(number: int) -> StreamRequest:
        return request(tmp_path, [str(tmp_path / f"{number}" / "rows.txt")], preprocessing_num_workers=1)

    found, _ = together(2, asked, 3)
    assert found == [list(islice(blocks(asked(number)), 3)) for number in range(2)]
    assert [["seven"] in rows for _, rows in found[1]] == [False, True, False]


def test_what_goes_to_other_machines_is_what_came_of_the_rows() -> None:
    """Of any size: torch's store takes 8 MiB at once."""
    media = (DocumentMedia(1, 2, (1, 2, 4), None, False, b"ab"), DocumentMedia(3, 2, (2, 2, 2), 0.5, True, b"c"))
    documents = tuple(
        Document(np.arange(size, dtype=np.int32), -np.arange(size, dtype=np.int32), found)
        for size, found in ((5 * 2**20, media), (2, ()))
    )
    errors = (LengthError("too-long", "longer", "9 tokens", 9), RowError("bad", "wrong", "\ud800"),
              UnsupportedRow("audio", "none"))  # fmt: skip
    metadata = [RowMetadata(("{{name}}",), True, 2**64 - 1, True), *[RowMetadata()] * 3]
    encoded = Encoded(documents, True, 7, np.float32(0.5), (1.0, 2.0))
    (first, *others), known = zip(*sent(list(zip((encoded, *errors), metadata, strict=True))), strict=True)
    assert known == tuple(metadata)
    assert first == replace(encoded, documents=first.documents)
    for mine, theirs in zip(documents, first.documents, strict=True):
        assert np.array_equal(mine.input_ids, theirs.input_ids)
        assert np.array_equal(mine.labels, theirs.labels)
        assert (theirs.input_ids.dtype, theirs.labels.dtype, theirs.media) == (np.int32, np.int32, mine.media)
    assert [(type(each), vars(each)) for each in others] == [(type(each), vars(each)) for each in errors]


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize("content", [Runs(), Path("here"), np.array([Runs()])])
def test_what_comes_from_another_machine_runs_nothing(content: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is not a part of a chunk"):
        sent(content)
    assert not capsys.readouterr().out


def sent(content: object) -> Any:
    """What one machine gets of a chunk that another has made."""
    store = open_store("localhost")
    parts = [Exchange(Machines(number, 2, "localhost", store.port)).series().next([]) for number in range(2)]
    (own,), (other,) = ([part for part in parts if part.is_own is mine] for mine in (True, False))
    made: Future[Any] = Future()
    made.set_result(content)
    own.give(made)
    return other.result()


def test_the_failure_of_another_machine_is_named() -> None:
    store = open_store("localhost")
    ours, theirs = (Exchange(Machines(number, 2, "localhost", store.port)) for number in range(2))
    part = next(part for part in (ours.series().next([]) for _ in range(2)) if not part.is_own)
    theirs.fail("no room")
    with pytest.raises(MegatuneError, match="failed on another machine") as failure:
        part.result()
    assert "machine 1: no room" in str(failure.value)
    assert failure.value.exit_code == ExitCode.PROCESS_DIED


@pytest.fixture
def stream(datasets: list[str], tmp_path: Path) -> Iterator[Stream]:
    """A producer at work."""
    opened = StartedStream(request(tmp_path, datasets, mix_strategy="interleave_over"))
    yield opened
    opened.close()
    assert not opened.folder.path.exists()


def process_of(stream: Stream) -> int:
    """The producer; the tests' ranks are children of this process, too."""
    assert isinstance(stream, StartedStream)
    assert stream._process.pid is not None
    return stream._process.pid


def test_steps_are_the_same_in_every_layout_and_the_producer_is_missed_when_it_dies(
    stream: Stream, datasets: list[str], tmp_path: Path
) -> None:
    expected = [
        texts
        for _, rows in islice(blocks(request(tmp_path, datasets, mix_strategy="interleave_over")), 20)
        for (texts,) in rows
    ]
    assert stream.held_out is None
    steps = stream.steps(4, is_packed=False)
    assert [meta.number for meta, _ in stream.before(0, 12, 10**9, lambda: None)] == [0, 1, 2]
    assert stream.state(10).block == 2
    assert list(stream.before(12, 64, 10**9, lambda: None))[-1][0].stop_row >= 64
    whole = global_batches(steps, 1, stop_step=16)
    assert [text for step in whole for text in step] == expected[:64]
    for size in (2, 4):
        assert global_batches(steps, size, stop_step=16) == whole
    for start in (3, 7):
        assert (
            global_batches(stream.steps(4, is_packed=False), 2, start_step=start, stop_step=16, num_workers=2)
            == (whole[start:])
        )
    assert [len(lengths) for lengths in steps.lengths(3)] == [1] * 4
    stream.after(11)
    assert stream.folder.blocks()[0].first_row == 10, "block 2 begins with row 10, which is needed"
    os.kill(process_of(stream), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(MegatuneError, match="the process that reads the data was killed by signal 9") as death:
        _step_until_it_fails(stream)
    assert death.value.exit_code == ExitCode.PROCESS_DIED
    assert time.monotonic() < began + 5
    assert not list(stream.before(12, 16, 16, lambda: None)), "the rest needs no more of it"


def _step_until_it_fails(stream: Stream) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        list(stream.before(12, 16, 10**9, lambda: None))


def test_data_without_a_usable_row_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n' * 7, encoding="utf-8")
    stream = StartedStream(request(tmp_path, [str(tmp_path / "bad.jsonl")]))
    with pytest.raises(MegatuneError, match="0 usable of 7 rows") as refusal:
        _step_until_it_fails(stream)
    stream.close()
    assert refusal.value.exit_code == ExitCode.DATA


def test_the_producer_ends_with_the_process_that_started_it(datasets: list[str], tmp_path: Path) -> None:
    asked = request(tmp_path, datasets)
    child = os.fork()
    if not child:
        StartedStream(asked)
        os._exit(0)
    os.waitpid(child, 0)
    assert asked.folder.path.exists()
    deadline = time.monotonic() + 20
    while asked.folder.path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not asked.folder.path.exists()


def test_a_producer_that_is_too_slow_is_named_with_what_it_does(datasets: list[str], tmp_path: Path) -> None:
    folder = request(tmp_path, datasets).folder
    folder.set_activity("it was filling block 3")
    with pytest.raises(MegatuneError, match="the next block of rows has not arrived") as slowness:
        StreamedSteps(folder, 4, is_packed=False, limit=0.1).lengths(0)
    assert "it was filling block 3" in str(slowness.value)
    assert slowness.value.exit_code == ExitCode.PROCESS_DIED
