"""Data sets with pictures to token rows: tokens, labels, bad rows, pairs, packing, splits, the cache and streams."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_videos import write_video
from pictures_kit import Model, asks, draw, make_model, write_rows
from PIL import Image

from megatune.config.setting import Mark
from megatune.config.settings import marked
from megatune.data.bad_rows import RowError
from megatune.data.cache.key import prepared_key
from megatune.data.conversation import Conversation, Message, RowMedia
from megatune.data.encode import Encoded, make_encoder
from megatune.data.formats import FORMATS
from megatune.data.media import MediaSource, media_source
from megatune.data.media_table import unpacked
from megatune.data.pipeline import Pipeline
from megatune.data.readers import RawRow
from megatune.data.rows import Document, TokenRows
from megatune.data.samples import RowReader, Sample
from megatune.data.sources import DatasetSource
from megatune.data.streaming.blocks import PART, MixedStream
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, MegatuneError

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "gemma3", "internvl"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder, family) for family in FAMILIES}


@pytest.fixture
def model(models: dict[str, Model]) -> Model:
    return models["qwen3_vl"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images and frames, and a cache of this test's own."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, (name, size) in enumerate({"a.png": (64, 32), "b.jpg": (40, 60), "c.webp": (128, 128)}.items()):
        draw(folder / name, *size, seed=seed)
    for number in range(5):
        draw(folder / f"frame{number}.png", 64, 64, seed=number)
    return folder


def encoded(model: Model, example: Any, **changes: Any) -> Encoded:
    settings = model.settings(Path(), [], **changes)
    (found,) = make_encoder(settings, model.tokenizer, model.vision(settings)).encode([example])
    assert isinstance(found, Encoded), found
    return found


def document(model: Model, example: Any, **changes: Any) -> Document:
    (found,) = encoded(model, example, **changes).documents
    return found


def image(data: Path, name: str) -> RowMedia:
    return RowMedia("image", str(data / name))


def video(data: Path, count: int) -> RowMedia:
    return RowMedia("video", [str(data / f"frame{number}.png") for number in range(count)])


def chat(*said: str, media: tuple[RowMedia, ...] = ()) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], text) for i, text in enumerate(said)), media=media)


# Gemma 3 has text around pictures, which is written after the template: tests/data/test_media_squares.py.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
@pytest.mark.parametrize("template", ["named", "own"])
def test_tokens_are_those_of_the_whole_text(models: dict[str, Model], data: Path, family: str, template: str) -> None:
    """As a processor writes it: the tag replaced by all placeholders before anything is tokenised."""
    model = models[family]
    changes = {"template": None} if template == "own" else {}
    second = video(data, 5) if model.vision().vision.has_videos else image(data, "b.jpg")
    media = (image(data, "a.png"), second, image(data, "c.webp"))
    said = [f"Is <image>this\n<{second.kind}>, or", "No.", "<image>", "Yes: it is."]
    found = document(model, chat(*said, media=media), **changes)
    processor = model.vision().processor
    sources = [media_source(each.value, each.kind, "") for each in media]
    measured = [processor.measure(each) for each in sources]
    texts = [processor.placeholder(each) for each in measured]
    whole = [said[0].replace("<image>", texts[0], 1).replace(f"<{second.kind}>", texts[1]), said[1], texts[2], said[3]]
    text_only = model.settings(Path(), [], **changes)
    (plain,) = make_encoder(text_only, model.tokenizer).encode([chat(*whole)])
    assert isinstance(plain, Encoded)
    assert found.input_ids.tolist() == plain.documents[0].input_ids.tolist()
    assert found.labels.tolist() == plain.documents[0].labels.tolist()
    vision = model.vision().vision
    pads = np.flatnonzero(np.isin(found.input_ids, (vision.image_token_id, vision.video_token_id)))
    assert [each.grid for each in found.media] == [each.grid for each in measured]
    assert [each.num_tokens for each in found.media] == [
        each.num_patches // processor.merge_size**2 for each in measured
    ]
    starts = np.cumsum([0, *(each.num_tokens for each in found.media)])
    assert [each.start for each in found.media] == pads[starts[:-1]].tolist()
    assert starts[-1] == len(pads)
    assert [unpacked(each.packed) for each in found.media] == list(zip(sources, measured, strict=True))
    assert [each.is_video for each in found.media] == [False, second.kind == "video", False]


def test_pictures_are_never_trained(model: Model, data: Path) -> None:
    media = (image(data, "a.png"), video(data, 4), image(data, "b.jpg"))
    example = chat("Is it <image><video>?", "See <image>!", media=media)
    found = document(model, example, train_on_prompt=True)
    vision = model.vision().vision
    untrained = found.input_ids[found.labels == -100]
    trained = found.input_ids[found.labels != -100]
    pads = {vision.image_token_id, vision.video_token_id}
    assert pads <= set(untrained.tolist())
    assert not pads & set(trained.tolist())
    assert model.tokenizer.decode(trained).startswith("<|im_start|>user\nIs it ")
    assert model.tokenizer.decode(trained).endswith("See !<|im_end|>\n")


def test_forms_of_rows_make_the_same_tokens(model: Model, data: Path) -> None:
    files = {"images": ["a.png", "b.jpg"]}
    turns = [("human", "<image>Which?"), ("gpt", "This."), ("human", "And <image>?"), ("gpt", "That.")]
    sharegpt = {"conversations": [{"from": role, "value": text} for role, text in turns], **files}
    alpaca = {"instruction": "And <image>?", "output": "That.", "history": [["<image>Which?", "This."]], **files}
    texts = [[{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}], "This."]
    texts += [[{"type": "text", "text": "And "}, {"type": "image"}, {"type": "text", "text": "?"}], "That."]
    openai = {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)],
        "images": ["b.jpg"],
    }
    names = []
    for name, row in {"sharegpt": sharegpt, "alpaca": alpaca, "openai": openai}.items():
        write_rows(data / f"{name}.jsonl", [row])
        names.append(f"{name}.jsonl")
    one, two, three = ((each,) for each in model.prepared(data, *names, disable_shuffling=True).train)
    assert plain(one) == plain(two) == plain(three)
    assert len(one[0][0].media) == 2


def plain(rows: Any) -> list[Any]:
    """Rows as values that can be compared."""
    return [
        (each.input_ids.tolist(), each.labels.tolist(), [(*p[:-1], bytes(p.packed)) for p in each.media])
        for row in rows
        for each in row
    ]


def mixed(data: Path, count: int = 12) -> str:
    """Rows with no, one and two pictures, and a video."""
    rows = []
    for number in range(count):
        questions = ("What?", "<image>What?", "<image> or <image>?", "<video>What?")
        fields = ({}, {"images": ["a.png"]}, {"images": ["b.jpg", "c.webp"]}, {"videos": [FRAMES]})[number % 4]
        rows.append(asks(questions[number % 4], f"It is {number}.", **fields))
    return write_rows(data / "mixed.jsonl", rows).name


FRAMES = [f"frame{number}.png" for number in range(4)]


def test_processes_change_nothing(model: Model, data: Path, tmp_path: Path) -> None:
    name = mixed(data, 300)
    alone = model.prepared(data, name)
    together = model.prepared(data, name, preprocessing_num_workers=2, tokenized_path=str(tmp_path / "rows"))
    assert together.train.digest == alone.train.digest
    assert alone.directory != together.directory
    counts = alone.report.train.media
    assert (counts.images, counts.videos) == (225, 75)
    assert counts.largest == max(p.num_tokens for row in alone.train for d in row for p in d.media)
    assert counts.tokens == sum(p.num_tokens for row in alone.train for d in row for p in d.media)
    assert f"; 225 images and 75 videos with {counts.tokens:,} tokens, " in "\n".join(alone.report.lines())


def test_packed_rows_hold_their_pictures(model: Model, data: Path) -> None:
    name = mixed(data)
    single = plain(model.prepared(data, name, cutoff_len=256).train)
    packed = model.prepared(data, name, cutoff_len=256, packing=True).train
    assert len(packed) < len(single)
    assert sorted(plain(packed)) == sorted(single)


def test_pairs_carry_the_prompts_pictures_twice(model: Model, data: Path) -> None:
    row = {"instruction": "<image>What?", "chosen": "A cat.", "rejected": "A dog, perhaps.", "images": ["a.png"]}
    write_rows(data / "pairs.jsonl", [row])
    ((chosen, rejected),) = model.prepared(data, "pairs.jsonl", stage="dpo").train
    assert [bytes(p.packed) for p in chosen.media] == [bytes(p.packed) for p in rejected.media]
    assert chosen.media[0].start == rejected.media[0].start
    assert chosen.input_ids.tolist() != rejected.input_ids.tolist()


def bad_rows(data: Path) -> str:
    (data / "torn.jpg").write_bytes((data / "b.jpg").read_bytes()[:300])
    (data / "text.png").write_text("not a picture")
    rows = [
        asks(images=["a.png"]),
        asks("<image><image>What?", images=["a.png"]),
        asks("What?", images=["a.png"]),
        asks("What is <image>?"),
        asks(images=["none.png"]),
        asks(images=["torn.jpg"]),
        asks(images=["text.png"]),
        asks("<image>and <|image_pad|>", images=["a.png"]),
        asks("What is <|video_pad|>?"),
        asks(images=["http://example.org/a.jpg"]),
        asks(images=[5]),
        asks("Text."),
    ]
    return write_rows(data / "bad.jsonl", rows).name


CODES = {
    "picture-count": 2,
    "picture-missing": 1,
    "picture-truncated": 1,
    "not-a-picture": 1,
    "placeholder-in-text": 2,
    "picture-url": 1,
    "bad-picture": 1,
}


def test_bad_pictures_are_bad_rows(model: Model, data: Path) -> None:
    found = model.prepared(data, bad_rows(data), on_bad_row="quarantine")
    (report,) = found.report.datasets
    codes: dict[str, int] = {}
    for reason, count in report.dropped.items():
        codes[report.codes[reason]] = codes.get(report.codes[reason], 0) + count
    assert codes == CODES
    note = "bad.jsonl: 1 row has images or videos without a tag; tags are added in front of the first message"
    assert f"note: {note}" in list(found.report.lines())
    assert note in found.report.warnings()
    assert report.trained == 3
    kept = [json.loads(line) for line in (found.directory / "bad_rows.jsonl").read_text().splitlines()]
    assert [int(row["where"].rpartition(":")[2]) for row in kept] == [2, *range(4, 12)]
    assert kept[0]["detail"] == "2 <image> in the messages, 1 files"
    assert kept[2]["detail"] == str(data / "none.png")


def test_bad_pictures_can_end_the_run(model: Model, data: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        model.prepared(data, bad_rows(data), on_bad_row="error")
    assert caught.value.exit_code == ExitCode.DATA
    assert f"{data}/bad.jsonl:5: image: there is no such file\n    why: {data}/none.png" in str(caught.value)
    assert "9 of 12 rows cannot be trained on" in str(caught.value)


def test_a_text_that_shows_a_placeholder_is_refused_in_stage_pt(model: Model, data: Path) -> None:
    write_rows(data / "texts.jsonl", [{"text": "Some text."}, {"text": "<|image_pad|>"}, {"text": "<image>"}])
    (report,) = model.prepared(data, "texts.jsonl", stage="pt").report.datasets
    assert list(report.codes.values()) == ["placeholder-in-text"]
    assert report.trained == 2
    write_rows(data / "pictures.jsonl", [{"text": "<image>", "images": ["a.png"]}])
    with pytest.raises(MegatuneError, match="stage pt trains text, and field 'images' has images or videos"):
        model.prepared(data, "pictures.jsonl", stage="pt")


def test_rows_that_hold_their_pictures(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As parquet files do; chunks for worker processes have fewer rows then."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("megatune.data.workers.CHUNK_BYTES", 2000)
    monkeypatch.setattr("megatune.data.workers.MOST_BYTES", 1)  # one chunk at a time
    content = (data / "b.jpg").read_bytes()
    rows = [asks(images=[{"bytes": content, "path": f"{number}.jpg"}]) for number in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data / "held.parquet")
    (data / "b.jpg").unlink()
    found = model.prepared(data, "held.parquet").train
    sources = [unpacked(p.packed)[0] for row in found for d in row for p in d.media]
    assert [(each.path, each.data) for each in sources] == [(f"{number}.jpg", content) for number in range(5)]


@pytest.mark.parametrize(("side_by_side", "waiting"), [(1, 4), (2, 2)])
def test_rows_with_pictures_wait_within_a_bound(
    model: Model, data: Path, monkeypatch: pytest.MonkeyPatch, side_by_side: int, waiting: int
) -> None:
    """However many rows a file has, few of them are read and not yet written: chunks of two, for all data sets that are
    read side by side."""
    monkeypatch.setattr("megatune.data.workers.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("megatune.data.workers.MOST_BYTES", 20_000)
    value = {"bytes": (data / "b.jpg").read_bytes() + bytes(6000), "path": None}
    read = taken = most = 0
    settings = model.settings(data, "rows.jsonl")

    def samples() -> Iterator[Sample]:
        nonlocal read
        for number in range(40):
            read += 1
            yield Sample(RawRow(f"row {number}", asks(images=[value])))

    reader = RowReader(DatasetSource("rows", (), FORMATS["alpaca"]), "sft", {}, media=True)
    encoder = make_encoder(settings, model.tokenizer, model.vision(settings))
    for _, found in encode_all(encoder, reader, samples(), 2, side_by_side=side_by_side):
        assert isinstance(found, Encoded), found
        most, taken = max(most, read - taken), taken + 1
    assert taken == 40
    assert most == waiting


def test_relative_paths_begin_at_media_dir(model: Model, data: Path, tmp_path: Path) -> None:
    write_rows(data / "rows.jsonl", [asks(images=["a.png"]), asks(answer="Two.", images=["b.jpg"])])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(data / "a.png", elsewhere)
    (report,) = model.prepared(data, "rows.jsonl", media_dir=str(elsewhere)).report.datasets
    assert (report.trained, list(report.codes.values())) == (1, ["picture-missing"])


# --- the cache --------------------------------------------------------------------------------------------------------


def test_prepared_rows_follow_the_files_of_pictures(
    model: Model, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(data / "rows.jsonl", [asks(images=["a.png"]), asks(answer="That.", images=["b.jpg"])])
    first = model.prepared(data, "rows.jsonl")
    made = first.directory.stat().st_ino
    (data / "a.png").touch()
    assert model.prepared(data, "rows.jsonl").directory.stat().st_ino == made, "a newer time is no other picture"
    assert capsys.readouterr().err == ""
    for _ in range(2):  # also of the same size in pixels and bytes: a reference's log-probabilities depend on it
        content = bytearray((data / "b.jpg").read_bytes())
        content[-20] ^= 1
        (data / "b.jpg").write_bytes(content)
        assert model.prepared(data, "rows.jsonl").train.digest == first.train.digest
        assert "image or video files were removed or changed" in capsys.readouterr().err
        assert model.prepared(data, "rows.jsonl").train.digest == first.train.digest
        assert capsys.readouterr().err == ""
    draw(data / "a.png", 64, 64, seed=5)
    again = model.prepared(data, "rows.jsonl")
    assert again.directory == first.directory
    assert "image or video files were removed or changed" in capsys.readouterr().err
    assert again.train[0][0].media[0].grid != first.train[0][0].media[0].grid
    (data / "b.jpg").unlink()
    (report,) = model.prepared(data, "rows.jsonl").report.datasets
    assert (report.trained, list(report.codes.values())) == (1, ["picture-missing"])


OTHER_VALUES = {
    "image_max_pixels": 100, "image_min_pixels": 100, "video_max_pixels": 100, "video_min_pixels": 100,
    "video_fps": 1.0, "video_maxlen": 5, "media_dir": "elsewhere", "image_scale_pixels": 100,
    "crop_to_patches": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.partition(".")[2] for path in marked(Mark.MEDIA)))
def test_what_determines_pictures_determines_the_key(models: dict[str, Model], data: Path, name: str) -> None:
    model = models["internvl" if name == "crop_to_patches" else "qwen3_vl"]
    write_rows(data / "rows.jsonl", [asks("What?")])

    def key(*, with_media: bool, **changes: Any) -> str:
        settings = model.settings(data, ["rows.jsonl"], **changes)
        vision = model.vision(settings) if with_media else None
        return prepared_key(settings, model.tokenizer, vision=vision).name

    value = {name: OTHER_VALUES[name]}
    rules = {"conversation_rules": "ms_swift_4"} if name == "image_scale_pixels" else {}  # it is theirs alone
    assert key(with_media=True, **value, **rules) != key(with_media=True, **rules)
    assert key(with_media=False, **value, **rules) == key(with_media=False, **rules)


def test_rows_with_other_pictures_are_no_copies(model: Model, data: Path) -> None:
    """Of a row that is held out: the same question and answer about another picture is another row."""
    rows = [asks(answer="Yes.", images=[name]) for name in ("a.png", "b.jpg", "c.webp", "a.png")]
    write_rows(data / "rows.jsonl", rows)
    (report,) = model.prepared(data, "rows.jsonl", val_size=1.0).report.datasets
    assert report.evaluation == 1
    assert report.trained == 3 - report.dropped.total()
    assert report.dropped.total() <= 1


def test_evaluation_rows_have_pictures(model: Model, data: Path) -> None:
    found = model.prepared(data, mixed(data), val_size=4.0)
    assert found.evaluation is not None
    assert found.report.evaluation is not None
    both = sorted(plain(found.train) + plain(found.evaluation))
    assert both == sorted(plain(model.prepared(data, "mixed.jsonl").train))
    counted = found.report.evaluation.media
    media = [p for row in found.evaluation for d in row for p in d.media]
    assert (counted.images + counted.videos, counted.tokens) == (len(media), sum(p.num_tokens for p in media))


def test_streamed_blocks_hold_pictures(model: Model, data: Path, tmp_path: Path) -> None:
    settings = model.settings(data, [mixed(data)], streaming=True, buffer_size=5, disable_shuffling=True)
    pipeline = Pipeline.of(settings, model.tokenizer, model.vision(settings))
    stream = MixedStream(pipeline)
    rows: list[Any] = []
    for number in range(3):
        folder = tmp_path / f"block{number}"
        folder.mkdir()
        meta = stream.write_block(folder)
        block = TokenRows(folder / PART)
        rows += plain(block)
        assert meta.tokens.media == block.count_media()
    stream.close()
    assert rows == plain(model.prepared(data, "mixed.jsonl", disable_shuffling=True).train)


def test_a_damaged_table_is_named(model: Model, data: Path) -> None:
    found = model.prepared(data, mixed(data))
    with open(found.directory / "sources.npy", "ab") as file:
        file.write(b"x" * 2**16)
    with pytest.raises(MegatuneError, match=r"incomplete[\s\S]*sources\.npy") as caught:
        TokenRows(found.directory / "train")
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize("name", ["media.npy", "files.npy"])
def test_a_damaged_record_is_made_again(model: Model, data: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its place and size are whole, what it says is not."""
    found = model.prepared(data, mixed(data))
    path, whole = found.directory / name, plain(found.train)
    content = bytearray(path.read_bytes())
    content[128] ^= 0x7F
    path.write_bytes(content)
    assert plain(model.prepared(data, mixed(data)).train) == whole
    assert "are damaged and are recreated" in capfd.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(models: dict[str, Model], tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(models["qwen3_vl"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["image_token_id"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MegatuneError, match="tokens of the tokenizer and the model differ") as caught:
        Model("qwen3_vl", folder, models["qwen3_vl"].tokenizer).vision()
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_template_that_leaves_a_picture_out(model: Model, data: Path) -> None:
    vision = model.vision()
    _, placed = vision.place(chat("<image>", "x", media=(image(data, "a.png"),)), {})
    with pytest.raises(RowError) as caught:
        vision.expanded([[1, 2, 3], [4]], placed)
    assert caught.value.code == "picture-left-out"


def test_videos_are_read(models: dict[str, Model], data: Path) -> None:
    """By worker processes, too; measured and decoded by PyAV."""
    write_video(data / "a.mp4", frames=20, size=(64, 48))
    write_rows(data / "rows.jsonl", [asks("<video>What?", videos=["a.mp4"])])
    for family, model in ((name, each) for name, each in models.items() if each.vision().vision.has_videos):
        ((document,),) = model.prepared(data, "rows.jsonl", preprocessing_num_workers=2).train
        (video,) = document.media
        source, measured = unpacked(video.packed)
        assert source == MediaSource("video", str(data / "a.mp4"))
        assert (video.is_video, len(measured.frames), video.grid[0]) == (True, 4, 2)
        assert video.seconds_per_grid == measured.seconds_per_grid == 1.0
        assert model.vision().processor.pixels(source, measured).shape[0] == measured.num_patches, family


def test_huge_images_are_resized_by_the_settings(model: Model, data: Path) -> None:
    Image.new("RGB", (2000, 1000)).save(data / "large.png")
    write_rows(data / "rows.jsonl", [asks(images=["large.png"])])
    small, large = (
        model.prepared(data, "rows.jsonl", image_max_pixels=side * side).train[0][0].media[0].num_tokens
        for side in (64, 256)
    )
    assert small * 10 < large
