"""Micro-batches with pictures: grids, places and positions, each rank's shard of the pixels, and what is unreadable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures_kit import Model, asks, draw, make_model, write_rows

from megatune.data.batches import Batch, BatchMedia, Collator, MediaShard
from megatune.data.loader import StepLoader
from megatune.data.media.arguments import rotary_position_ids
from megatune.data.media.processor import MediaProcessor
from megatune.data.media_table import unpacked
from megatune.data.order import PreparedSteps
from megatune.data.rows import Document, TokenRows
from megatune.objectives.base import tokens_of_documents
from megatune.objectives.preference import Preference

SIZES = {"a.png": (64, 32), "b.jpg": (40, 60), "c.webp": (128, 128), "d.png": (96, 32)}
ROWS: list[dict[str, Any]] = [
    asks("What?", "Text alone."),
    asks("<image>What?", images=["a.png"]),
    asks("<image> or <image>?", "This.", images=["b.jpg", "c.webp"]),
    asks("<video>What?", videos=[["a.png"] * 4]),
    asks("<image>, <video> or <image>?", images=["d.png", "a.png"], videos=[["d.png"] * 3]),
    asks("Why?", "More text alone."),
]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    for seed, (name, size) in enumerate(SIZES.items()):
        draw(tmp_path / name, *size, seed=seed)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def rows_of(model: Model, data: Path, **changes: Any) -> TokenRows:
    return model.prepared(data, "rows.jsonl", disable_shuffling=True, **changes).train


def documents(rows: TokenRows) -> list[Document]:
    return [document for row in rows for document in row]


def collator(model: Model, micro_batch_size: int, packed: bool = False, document_multiple: int = 1) -> Collator:
    return Collator(micro_batch_size, packed, 8, document_multiple, 0, model.vision())


def batch_of(made: Collator, found: Sequence[Document], shard: MediaShard | None = None) -> Batch:
    return made(found, made.length([len(document.input_ids) for document in found]), shard=shard)


def decoded(model: Model, found: Sequence[Document]) -> list[np.ndarray]:
    processor = model.vision().processor
    return [processor.pixels(*unpacked(picture.packed)) for each in found for picture in each.media]


@pytest.mark.parametrize(("packed", "multiple"), [(False, 1), (True, 1), (True, 8)])
def test_a_batch_of_all_rows(model: Model, data: Path, packed: bool, multiple: int) -> None:
    found, vision = documents(rows_of(model, data)), model.vision().vision
    batch = batch_of(collator(model, len(found), packed, multiple), found, MediaShard(0, 1))
    media = batch.media
    assert media is not None
    assert media.grids.tolist() == [list(picture.grid) for each in found for picture in each.media]
    assert media.owners.tolist() == [0] * 7
    expected = np.concatenate(decoded(model, found))
    assert media.pixel_values.dtype == torch.float32
    assert np.array_equal(media.pixel_values.numpy(), expected)
    pads = {vision.image_token_id, vision.video_token_id}
    flat = batch.input_ids.reshape(-1).tolist()
    assert media.places.tolist() == [place for place, token in enumerate(flat) if token in pads]
    assert len(media.places) == sum(picture.num_tokens for each in found for picture in each.media)
    s = batch.input_ids.shape[1]
    assert media.rotary_position_ids.shape == (3, 1 if packed else len(found), s)
    starts = [s * row for row in range(len(found))] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    stops = [*starts[1:], len(flat)]
    ids = media.rotary_position_ids.reshape(3, -1).numpy()
    for each, start, stop in zip(found, starts, stops, strict=False):
        size = len(each.input_ids)
        own = rotary_position_ids(each.input_ids, [(p.grid, p.seconds_per_grid) for p in each.media], vision)
        assert np.array_equal(ids[:, start : start + size], own)
        behind = np.arange(own.max() + 1, own.max() + 1 + stop - start - size)
        assert np.array_equal(ids[:, start + size : stop], np.stack([behind] * 3)), "padding counts on"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_all_pictures_once(model: Model, data: Path, size: int) -> None:
    found = documents(rows_of(model, data))
    whole = decoded(model, found)
    batches = [batch_of(collator(model, len(found)), found, MediaShard(rank, size)) for rank in range(size)]
    first = pictures_of(batches[0])
    for rank, batch in enumerate(batches):
        media = pictures_of(batch)
        for each in fields(BatchMedia):
            if each.name != "pixel_values":
                assert torch.equal(getattr(media, each.name), getattr(first, each.name)), each.name
        mine = [pixels for pixels, owner in zip(whole, first.owners.tolist(), strict=True) if owner == rank]
        expected = np.concatenate([whole[0][:0], *mine])
        assert np.array_equal(media.pixel_values.numpy(), expected)
    assert set(first.owners.tolist()) == set(range(min(size, 7)))


def pictures_of(batch: Batch) -> BatchMedia:
    assert batch.media is not None
    return batch.media


def test_later_stages_decode_nothing(model: Model, data: Path) -> None:
    found = documents(rows_of(model, data))
    for name in SIZES:
        (data / name).unlink()
    media = pictures_of(batch_of(collator(model, len(found)), found))
    vision = model.vision().vision
    assert media.pixel_values.shape == (0, 3 * 2 * vision.patch_size**2)
    assert len(media.grids) == len(media.owners) == 7


def test_text_alone_has_no_pictures(model: Model, data: Path) -> None:
    found = documents(rows_of(model, data))
    for chosen in ([found[0], found[5]], []):
        assert batch_of(collator(model, 2), chosen, MediaShard(0, 1)).media is None


def loader(model: Model, rows: TokenRows, num_workers: int, rank: int = 0, size: int = 1) -> StepLoader:
    return StepLoader(
        PreparedSteps(rows, 4, seed=1),
        collator(model, 1, rows.is_packed, 4),
        data_parallel_rank=rank,
        data_parallel_size=size,
        num_micro_batches=4 // size,
        same_length=False,
        stop_step=4,
        shard=MediaShard(0, 2),
        num_workers=num_workers,
    )


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("input_ids", "labels", "position_ids")]
    if one.media is not None and other.media is not None:
        pairs += [(getattr(one.media, each.name), getattr(other.media, each.name)) for each in fields(BatchMedia)]
    return (one.media is None) == (other.media is None) and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("packing", [False, True])
def test_processes_change_nothing(model: Model, data: Path, packing: bool) -> None:
    """Over an epoch's short last step, too, whose last micro-batches are padding."""
    rows = rows_of(model, data, packing=packing, cutoff_len=192)
    alone, together = (list(loader(model, rows, num_workers)) for num_workers in (0, 2))
    assert [step for step, _ in together] == list(range(4))
    for (_, one), (_, other) in zip(alone, together, strict=True):
        assert all(same(*pair) for pair in zip(one, other, strict=True))
    assert any(batch.media is not None for _, batches in alone for batch in batches)
    assert any(batch.media is None for _, batches in alone for batch in batches)


# --- what cannot be decoded -------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Overwrite the middle of a file: its header and its end are as they were."""
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 3, 2 * len(content) // 3)
    content[middle] = bytes(len(content[middle]))
    path.write_bytes(content)


def test_unreadable_pictures_are_zeros(model: Model, data: Path) -> None:
    found = documents(rows_of(model, data))
    whole = decoded(model, found)
    damage(data / "c.webp")
    draw(data / "d.png", 32, 96)  # of another size than it was measured with
    batch = batch_of(collator(model, len(found)), found, MediaShard(0, 1))
    unreadable = {(each.document, Path(each.where).name, each.code) for each in batch.unreadable}
    assert unreadable >= {(2, "c.webp", "damaged-picture"), (4, "d.png", "changed-picture")}
    assert {number for number, *_ in unreadable} == {2, 4}
    lost = [2, 4, 5]  # among all pictures; the video of the last row has frames of d.png
    expected = np.concatenate([each * (place not in lost) for place, each in enumerate(whole)])
    assert np.array_equal(pictures_of(batch).pixel_values.numpy(), expected)


def test_a_picture_is_unreadable_on_its_owner_alone(model: Model, data: Path) -> None:
    found = documents(rows_of(model, data))
    (data / "c.webp").unlink()
    batches = [batch_of(collator(model, len(found)), found, MediaShard(rank, 3)) for rank in range(3)]
    assert sorted(len(batch.unreadable) for batch in batches) == [0, 0, 1]
    assert batch_of(collator(model, len(found)), found).unreadable == ()


@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_left_out(model: Model, data: Path, packed: bool) -> None:
    found = documents(rows_of(model, data))
    made = collator(model, len(found), packed, 4)
    batch = batch_of(made, found)
    trained = [int((each.labels[1:] != -100).sum()) for each in found]
    assert batch.num_trained == sum(trained)
    left = batch.without([1, 4])
    assert left.num_trained == sum(trained) - trained[1] - trained[4]
    blank = [
        each._replace(labels=np.full_like(each.labels, -100)) if i in (1, 4) else each for i, each in enumerate(found)
    ]
    assert torch.equal(left.labels, batch_of(made, blank).labels)
    assert batch.num_trained == sum(trained), "the batch itself stays"


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_with_pictures(model: Model, data: Path, packed: bool) -> None:
    """Both answers have the prompt's pictures; where one cannot be decoded, the pair is left out whole."""
    media = {"a.png": "<image>What?", "b.jpg": "<image>Which?", "d.png": "<image>Why?"}
    rows = [
        {"instruction": prompt, "chosen": "This.", "rejected": "That it is.", "images": [name]}
        for name, prompt in media.items()
    ]
    write_rows(data / "rows.jsonl", rows)
    made = rows_of(model, data, stage="dpo", packing=packed)
    assert (made.is_pairs, made.is_packed) == (True, packed)
    found = documents(made)
    names = [unpacked(each.packed)[0].name for document in found for each in document.media]
    assert names[::2] == names[1::2]
    assert len(set(names)) == 3
    (data / "b.jpg").unlink()
    batch = batch_of(replace(collator(model, 3, packed, 8), documents_per_row=2), found, MediaShard(0, 1))
    assert batch.media is not None
    assert len(batch.media.grids) == 6
    expected = [
        None if name.endswith("b.jpg") else pixels_of(model, each) for name, each in zip(names, found, strict=True)
    ]
    place = 0
    for pixels, grid in zip(expected, batch.media.grids, strict=True):
        here = batch.media.pixel_values[place : place + int(grid.prod())].numpy()
        assert np.array_equal(here, np.zeros_like(here) if pixels is None else pixels)
        place += len(here)
    lost = [each.document for each in batch.unreadable]
    assert [number for number, name in enumerate(names) if name.endswith("b.jpg")] == lost
    trained = tokens_of_documents(batch.labels >= 0, batch).tolist()
    assert all(trained[:6])
    for some in (lost, lost[:1], lost[1:]):
        left = batch.without(some)
        kept = [0 if number in lost else count for number, count in enumerate(trained)]
        assert tokens_of_documents(left.labels >= 0, left).tolist() == kept
        assert int(Preference({"sigmoid": 1.0}).normalizer(left)) == 2


def pixels_of(model: Model, document: Document) -> np.ndarray:
    return np.concatenate(decoded(model, [document]))


def test_a_picture_of_both_answers_is_decoded_once(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"instruction": f"{tags}What?", "chosen": "This.", "rejected": "That.", **files}
        for tags, files in (
            ("<image><image>", {"images": ["a.png", "c.webp"]}), ("<video>", {"videos": [["a.png"] * 4]})
        )
    ]  # fmt: skip
    write_rows(data / "rows.jsonl", rows)
    found = documents(rows_of(model, data, stage="dpo"))
    expected = np.concatenate(decoded(model, found))
    made, pixels = [], MediaProcessor.pixels

    def counted(processor: MediaProcessor, source: Any, measured: Any) -> np.ndarray:
        made.append(source.name)
        return pixels(processor, source, measured)

    monkeypatch.setattr(MediaProcessor, "pixels", counted)
    batch = batch_of(replace(collator(model, 2), documents_per_row=2), found, MediaShard(0, 1))
    assert np.array_equal(pictures_of(batch).pixel_values.numpy(), expected)
    assert len(made) == 3
