"""Checkpoints with damage: named, passed over for an older one, refused where they were asked for, never trained."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from fault_injector import flip_bit
from pool import RankPool
from runs import assert_same_tensors, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.training.resume import choose_checkpoint
from megatune.training.storage.manifest import Manifest, read_manifest, write_manifest

MANIFEST = "training/manifest.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def trained(pool: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    assert pool.run(1, train, settings_of(model, folder / "out", max_steps=4, save_steps=2), folder) == [0]
    return folder / "out"


def choose(settings: Settings, folder: Path) -> tuple[str, list[str], float]:
    """What a rank resumes from, what it says of that, and how long it took."""
    import torch

    rank = torch.distributed.get_rank()
    context = RankContext(RankEnv(rank, rank, 2, 2, "localhost", 1, 0), folder)
    began = time.monotonic()
    path, notes = choose_checkpoint(context, settings, folder)
    return path.name if path else "", notes, time.monotonic() - began


def of_later_version(path: Path) -> None:
    """As a later version of the project may write it: whole, and of a format that this one cannot know."""
    content = json.loads(path.read_text()) | {"format_version": 99}
    del content["xxh3_128"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


OPTIMIZER = "training/optimizer.safetensors"
DAMAGE: dict[str, tuple[str, str, Callable[[Path], object], str]] = {
    "half of a shard": ("T12", OPTIMIZER, halve, f"{OPTIMIZER} has "),
    "a flipped bit of the optimizer's state": ("T13", OPTIMIZER, flip_bit, f"{OPTIMIZER} is damaged: its digest"),
    "a flipped bit of the weights": ("T13", "model.safetensors", flip_bit, "model.safetensors is damaged: its digest"),
    "a shard that is gone": ("T14", OPTIMIZER, Path.unlink, f"{OPTIMIZER} is missing"),
    "counters that are gone": ("T14", "training/state.json", Path.unlink, "training/state.json is missing"),
    "config.json that is gone": ("T14", "config.json", Path.unlink, "config.json is missing"),
    "a manifest that is gone": ("T14", MANIFEST, Path.unlink, f"{MANIFEST} is missing"),
    "half of a manifest": ("T14", MANIFEST, halve, f"{MANIFEST} cannot be read"),
    "an empty manifest": ("T14", MANIFEST, lambda path: path.write_text(""), f"{MANIFEST} cannot be read"),
    "a manifest of something else": ("T14", MANIFEST, lambda path: path.write_text("[]"), f"{MANIFEST} cannot be read"),
    "a manifest that nests without end": (
        "T14", MANIFEST, lambda path: path.write_text("[" * 100_000), f"{MANIFEST} cannot be read",
    ),
    "a manifest that was edited": (
        "T14", MANIFEST, lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": 9')),
        f"{MANIFEST} is damaged",
    ),
    "a format of a later version": (
        "T23", MANIFEST, of_later_version, f"{MANIFEST} has format version 99; this megatune reads version 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_an_older_checkpoint_taken(
    name: str, pool: RankPool, trained: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    case, file, damage, words = DAMAGE[name]
    shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("*.png", "launch"))
    damage(tmp_path / "out/checkpoint-4" / file)
    settings = settings_of(tmp_path / "model", tmp_path / "out")
    found = pool.run(2, choose, settings, tmp_path / "out")
    for chosen, notes, _ in found:
        assert chosen == "checkpoint-2"
        assert notes[0].startswith(f"skipped: {tmp_path}/out/checkpoint-4: {words}")
    _, notes, seconds = found[0]
    told(case=case, fault=name, got=notes[0].splitlines()[0], seconds=seconds, lost="steps since the checkpoint before")


def test_what_is_asked_for_is_taken_or_refused(
    pool: RankPool, trained: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    shutil.copytree(trained, tmp_path / "out")
    halve(tmp_path / "out/checkpoint-4" / OPTIMIZER)
    asked = {"resume_from_checkpoint": str(tmp_path / "out/checkpoint-4")}
    with pytest.raises(AssertionError, match=rf"MegatuneError: .*checkpoint-4: {OPTIMIZER} has \d+ of \d+ bytes") as no:
        pool.run(2, choose, settings_of(tmp_path / "model", tmp_path / "out", **asked), tmp_path / "out")
    got = next(line for line in str(no.value).splitlines() if "has" in line and OPTIMIZER in line)
    fault = "half of a shard of the checkpoint that resume_from_checkpoint names"
    told(case="T12", fault=fault, got=got.partition("Error: ")[2] + " (exit code 66)")


def test_without_a_sound_checkpoint_a_run_never_starts_over(
    pool: RankPool, trained: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    shutil.copytree(trained, tmp_path / "out")
    for step in (2, 4):
        (tmp_path / f"out/checkpoint-{step}/training/state.json").unlink()
    with pytest.raises(AssertionError, match=r"state\.json is missing") as no:
        pool.run(2, choose, settings_of(tmp_path / "model", tmp_path / "out"), tmp_path / "out")
    assert str(no.value).count("state.json is missing") >= 2
    got = next(line for line in str(no.value).splitlines() if "none can be resumed from" in line)
    told(case="T14", fault="damage in every checkpoint", got=f"{got} (exit code 66)", lost="nothing: it does not start")


def test_a_stream_is_opened_again_for_an_older_checkpoint(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """On both ranks: one of them knows where the first one was, which is gone."""
    common = {"max_steps": 4, "save_steps": 2, "streaming": True, "buffer_size": 15, "ddp_timeout": 30}
    assert pool.run(1, train, settings_of(model, tmp_path / "out", **common), tmp_path) == [0]
    flip_bit(tmp_path / "out/checkpoint-4" / OPTIMIZER)
    settings = settings_of(model, tmp_path / "out", per_device_train_batch_size=2, **common)
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    assert f"skipped: {tmp_path}/out/checkpoint-4: {OPTIMIZER} is damaged" in (tmp_path / "out/start.log").read_text()


@pytest.mark.parametrize(("file", "world_size"), [(OPTIMIZER, 1), ("model.safetensors", 1), (OPTIMIZER, 2)])
def test_what_loading_finds_damaged_is_named_and_the_older_checkpoint_is_used(
    file: str, world_size: int, pool: RankPool, model: Path, trained: Path, tmp_path: Path
) -> None:
    """Tensors are compared with their digests while they are loaded. Of two ranks one alone reads the damage."""
    shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("*.png", "launch"))
    flip_bit(tmp_path / "out/checkpoint-4" / file)
    batch = {"per_device_train_batch_size": 4 // world_size}
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=2, **batch)
    assert pool.run(world_size, train, settings, tmp_path) == [0] * world_size
    said = (tmp_path / "out/start.log").read_text()
    assert f"skipped: {tmp_path}/out/checkpoint-4: {file} is damaged: its digest does not match" in said
    assert "are verified while they are loaded" in said
    if world_size == 1:
        assert_same_tensors(tmp_path / "out", trained)
        assert_same_tensors(tmp_path / "out/checkpoint-4/training", trained / "checkpoint-4/training")


def test_a_checkpoint_that_loading_finds_damaged_is_refused_where_it_was_asked_for(
    pool: RankPool, model: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("*.png", "launch"))
    flip_bit(tmp_path / "out/checkpoint-2" / OPTIMIZER)
    asked = {"resume_from_checkpoint": str(tmp_path / "out/checkpoint-2"), "overwrite_output_dir": True}
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=2, **asked)
    with pytest.raises(AssertionError, match=rf"checkpoint-2: {OPTIMIZER} is damaged: its digest does not match"):
        pool.run(1, train, settings, tmp_path)


def test_a_checkpoint_of_the_last_version_is_verified_and_resumed(
    pool: RankPool, model: Path, trained: Path, tmp_path: Path
) -> None:
    """Its optimizer has whole tensors, and no digests of blocks: all of it is verified before it is loaded."""
    shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("*.png", "launch"))
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    shutil.rmtree(tmp_path / "out/checkpoint-2/training/digests")
    folder = tmp_path / "out/checkpoint-2"
    manifest = read_manifest(folder)
    kept = tuple(file for file in manifest.files if "/digests/" not in file.name)
    write_manifest(folder, Manifest(manifest.step, kept, manifest.metadata))
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=2)
    assert pool.run(1, train, settings, tmp_path) == [0]
    assert "are verified while they are loaded" not in (tmp_path / "out/start.log").read_text()
    assert_same_tensors(tmp_path / "out", trained)
    # And a flipped bit is found, too.
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    flip_bit(folder / OPTIMIZER)
    with pytest.raises(AssertionError, match=rf"{OPTIMIZER} is damaged: its digest does not match"):
        pool.run(1, train, settings, tmp_path)
