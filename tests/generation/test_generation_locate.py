"""Which folder is loaded, and what is said where something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families.scores import as_saved
from megatune.generation.generator import Generator
from megatune.generation.inputs import find_model
from megatune.generation.options import GenerationOptions


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture
def model(qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen3, tmp_path / "model"))


def refusal(path: Path, options: GenerationOptions | None = None) -> str:
    """The message with which loading is refused."""
    with pytest.raises(MegatuneError) as raised:
        Generator.load(path, options or GenerationOptions())
    assert raised.value.exit_code == ExitCode.INPUT
    return str(raised.value)


def test_a_reward_model_writes_nothing(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(as_saved(config, "Qwen3ForSequenceClassification", 0)))
    assert refusal(model) == (
        f"{model}: it is a reward model or a classifier\n"
        "    why: it has a score layer in place of the output layer, and cannot generate text\n"
        "    fix: load it with Transformers' AutoModelForSequenceClassification, whose logits are scores of whole texts"
    )


def test_a_model_is_itself_and_a_run_is_its_newest_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    assert find_model(qwen3) == qwen3
    for step in (9, 10, 100):
        shutil.copytree(qwen3, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-100" / "config.json").unlink()
    (tmp_path / "checkpoint-200.tmp").mkdir()
    assert find_model(tmp_path) == tmp_path / "checkpoint-10"
    assert find_model(tmp_path / "checkpoint-9") == tmp_path / "checkpoint-9"
    shutil.copytree(qwen3, tmp_path, dirs_exist_ok=True)  # the final model, once the run is done
    assert find_model(tmp_path) == tmp_path


def test_a_missing_folder_names_the_nearest(model: Path) -> None:
    assert f"did you mean {model}?" in refusal(model.with_name("modle"))
    assert "or the id of a model on a hub" in refusal(Path("Qwen/Qwen3-0.6B"))
    assert "is a file" in refusal(model / "config.json")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "has no model" in refusal(tmp_path)


def test_everything_missing_is_named_at_once(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    message = refusal(model)
    assert "there is no model.safetensors" in message
    assert "there is no tokenizer" in message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "m", num_layers=1, hidden_size=32, max_shard_size="50KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of weights" in refusal(folder)
    for file in ("../other/model.safetensors", "/etc/passwd", 7):
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert str(file) in refusal(folder)


def test_missing_tensors_are_never_made_up(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(model)


def test_a_cut_file_is_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be loaded" in refusal(model)


def test_no_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "add --raw" in refusal(model)
    assert Generator.load(model, GenerationOptions(raw=True, max_new_tokens=2)).complete("a").num_tokens == 2
