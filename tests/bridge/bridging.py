"""What the tests of the bridge share: weights and the optimizer's state, loaded in one layout, saved in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from layouts import Layout
from safetensors.torch import load_file
from saving import save_optimizer, save_weights
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble, load_optimizer
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import main_shards, step
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples


def resave_weights(model: Path, settings: Settings, folder: Path, max_file_bytes: int) -> list[str]:
    """On every rank: names of the files that it wrote."""
    assembly = assemble(model, settings)
    what = (assembly.parameters, assembly.architecture, assembly.coords)
    written = save_weights(folder, *what, form=assembly.form, max_file_bytes=max_file_bytes)
    return [path.name for path in written]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def whole_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """Tensors that ranks may have written in parts."""
    found = SafetensorsFolder(folder, stem)
    return {name: found.whole(name) for name in found.names()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def save_all(assembly: Assembly, folder: Path) -> None:
    """As a checkpoint has it: the model, and training/ below it."""
    what = (assembly.architecture, assembly.coords)
    save_weights(folder, assembly.parameters, *what, form=assembly.form)
    shards = main_shards(assembly.optimizer)
    save_optimizer(folder / "training", assembly.parameters, shards, *what)


def train_and_save(model: Path, settings: Settings, folder: Path) -> None:
    """On every rank: two steps, so that averages differ from gradients."""
    assembly = assemble(model, settings)
    batches = shard_samples(random_samples(301, [9, 16, 12, 7]), assembly.coords, settings.parallel)
    for _ in range(2):
        measure_loss(assembly, batches)
        assert step(assembly.optimizer, 1e-2)[0]
    gather_parameters(assembly.model)
    save_all(assembly, folder)


def resave_all(checkpoint: Path, settings: Settings, folder: Path) -> None:
    """On every rank."""
    assembly = assemble(checkpoint, settings)
    shards = main_shards(assembly.optimizer)
    load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, settings.finetuning)
    save_all(assembly, folder)


def move(pool, model: Path, one: Layout, other: Layout, tmp_path: Path, **settings: Any) -> tuple[dict, dict]:
    """Train in one layout, load in the other: what each of them saved."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        (folder / "training").mkdir(parents=True)
    (folders[0] / "config.json").write_text((model / "config.json").read_text())
    pool.run(one.world_size, train_and_save, model, one.settings(**settings), folders[0])
    pool.run(other.world_size, resave_all, folders[0], other.settings(**settings), folders[1])
    saved, moved = (whole_tensors(folder / "training", "optimizer") for folder in folders)
    return saved, moved
