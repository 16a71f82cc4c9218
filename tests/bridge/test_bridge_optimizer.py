"""The optimizer's state, saved in one layout and loaded in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layouts import LAYOUTS, MORE_LAYOUTS, Layout
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.load import load_optimizer
from megatune.bridge.save import save_optimizer, save_weights
from megatune.config.settings import Settings
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import main_shards, step
from megatune.errors import ExitCode, MegatuneError
from megatune.verify.measure import deal, measure_loss
from megatune.verify.samples import random_samples

ALL = {**LAYOUTS, **MORE_LAYOUTS}


def save_all(assembly: Assembly, folder: Path, max_file_bytes: int = 5 * 10**9) -> None:
    """As a checkpoint has it: the model, and training/ below it."""
    what = (assembly.architecture, assembly.place)
    save_weights(folder, assembly.parameters, *what)
    shards = main_shards(assembly.optimizer)
    save_optimizer(folder / "training", assembly.parameters, shards, *what, max_file_bytes=max_file_bytes)


def train_and_save(model: Path, settings: Settings, folder: Path) -> None:
    """On every rank: two steps, so that averages differ from gradients."""
    assembly = assemble(model, settings)
    batches = deal(random_samples(301, [9, 16, 12, 7]), assembly.place, settings.parallel)
    for _ in range(2):
        measure_loss(assembly, batches)
        assert step(assembly.optimizer, 1e-2)[0]
    gather_parameters(assembly.model)
    save_all(assembly, folder, max_file_bytes=200_000)


def load_and_save(checkpoint: Path, settings: Settings, folder: Path) -> None:
    """On every rank."""
    assembly = assemble(checkpoint, settings)
    shards = main_shards(assembly.optimizer)
    load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, assembly.place)
    save_all(assembly, folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def move(pool, model: Path, one: Layout, other: Layout, tmp_path: Path, **settings: Any) -> tuple[dict, dict]:
    """Train in one layout, load in the other: what each of them saved."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        (folder / "training").mkdir(parents=True)
    (folders[0] / "config.json").write_text((model / "config.json").read_text())
    pool.run(one.world_size, train_and_save, model, one.settings(**settings), folders[0])
    pool.run(other.world_size, load_and_save, folders[0], other.settings(**settings), folders[1])
    return tensors(folders[0] / "training"), tensors(folders[1] / "training")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tp2 pp2 dp2 sp", "1"),
        ("1", "tp2 pp2 dp2 sp"),
        ("dp2", "tp2 pp2 vpp2"),
        ("dp2, whole optimizer", "dp4"),
        ("tp4 sp", "dp2, whole optimizer"),
    ],
)
def test_state_moves_between_layouts_bit_for_bit(pool, model_dir, tmp_path, one, other, precision):
    settings = {"precision": {} if precision == "fp32" else {precision: True}}
    model = model_dir("qwen3", tied=True)
    saved, moved = move(pool, model, ALL[one], ALL[other], tmp_path, **settings)
    kinds = {name.partition("/")[0] for name in saved}
    # Master weights of an fp32 model are the model.
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"main"} if precision == "bf16" else set())
    with safe_open(model / "model.safetensors", "pt") as file:
        assert {name.partition("/")[2] for name in saved} == set(file.keys())
    assert saved.keys() == moved.keys()
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]
    assert all(tensor.abs().max() > 0 for tensor in saved.values())


def test_momentum_moves(pool, model_dir, tmp_path):
    sgd = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
    saved, moved = move(pool, model_dir("qwen2"), ALL["dp2"], ALL["tp2"], tmp_path, **sgd)
    assert {name.partition("/")[0] for name in saved} == {"momentum_buffer"}
    assert not [name for name, tensor in saved.items() if tensor.numpy().tobytes() != moved[name].numpy().tobytes()]


def load_with_sgd(checkpoint: Path) -> tuple[str, int]:
    try:
        load_and_save(checkpoint, ALL["1"].settings(optimizer={"optimizer": "sgd"}), checkpoint)
    except MegatuneError as error:
        return str(error), error.exit_code
    return "", 0


def test_state_of_another_optimizer_is_refused(pool, model_dir, tmp_path):
    move(pool, model_dir("qwen2"), ALL["1"], ALL["1"], tmp_path)
    text, code = pool.run(1, load_with_sgd, tmp_path / "one")[0]
    assert code == ExitCode.INPUT
    assert "holds exp_avg, exp_avg_sq, this run's optimizer needs momentum_buffer" in text
