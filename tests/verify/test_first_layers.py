"""`megatune verify --layers N`: the first layers of a model, for one that takes too much memory or time whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import MakeModel
from pool import RankPool
from pool_launch import CommandLine
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import open_checkpoint
from megatune.errors import ExitCode
from megatune.families import FAMILIES, load_architecture
from megatune.verify.checkpoints import first_layers
from megatune.verify.reference import load_reference_model

LAYERS = 2


@pytest.fixture
def command(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(pool, monkeypatch)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_first_layers_of_every_family_are_a_checkpoint(family: str, model_dir: MakeModel) -> None:
    """All of its tensors are used, and none is missing, on both sides."""
    model = model_dir(family)
    whole = load_reference_model(model, torch.float32).state_dict()
    with first_layers(model, LAYERS) as folder:
        architecture = load_architecture(folder)
        assert architecture.num_layers == LAYERS < load_architecture(model).num_layers
        open_checkpoint(folder, architecture)
        found: Any = load_reference_model(folder, torch.float32)
    assert found.config.get_text_config().num_hidden_layers == LAYERS
    # What is not read from a file would be random.
    assert not [name for name, values in found.state_dict().items() if not torch.equal(values, whole[name])]
    assert not folder.exists()


def with_wrong_layer(model: Path, folder: Path, layer: int) -> Path:
    """Return a copy whose files lack what the layer needs."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_later_layers_are_not_read(command: CommandLine, model_dir: MakeModel, tmp_path: Path) -> None:
    few = ("--samples", 2, "--length", 8)
    last = with_wrong_layer(model_dir("qwen3"), tmp_path / "last", 3)
    ended = command("verify", last, "--layers", 2, "--pipeline_model_parallel_size", 2, *few)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    assert f"the first 2 layers of {last}: pp 2" in ended.stdout
    assert "PASS" in ended.stdout
    ended = command("verify", last, *few)
    assert ended.returncode == ExitCode.INPUT
    first = with_wrong_layer(model_dir("qwen3"), tmp_path / "first", 1)
    ended = command("verify", first, "--layers", 2, *few)
    assert ended.returncode == ExitCode.INPUT
    assert "model.layers.1.self_attn.o_proj.weight" in ended.stderr


@pytest.mark.parametrize(
    ("family", "layers", "said"),
    [
        ("qwen3", 4, "the model has 4 layers"),
        ("qwen3_vl", 1, "an encoder's features are added to the first"),
        ("gemma4_text", 3, "such as without a window\n    fix: --layers 2"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(
    command: CommandLine, model_dir: MakeModel, family: str, layers: int, said: str
) -> None:
    ended = command("verify", model_dir(family), "--layers", layers)
    assert ended.returncode == ExitCode.SETTINGS
    assert said in ended.stderr
