"""`rope_scaling`: a run trains and saves a model with longer rotary embeddings than its checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import RankPool
from runs import leave_as_crashed, metrics, run, settings_of, tensors

from megatune.config.load import load
from megatune.config.model import as_scaled
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.families import load_architecture
from megatune.rope_scaling import YarnRopeScaling
from megatune.training.source import RunModel
from megatune.training.train_state import check_rerun

YARN = YarnRopeScaling(factor=2.0, original_max_position_embeddings=64, attention_factor=pytest.approx(1.0693147))


def test_a_run_trains_and_saves_the_scaled_model(pool: RankPool, tmp_path: Path) -> None:
    """A resume goes on with the same bits for three steps, and another scaling is refused before anything starts."""
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2, max_position_embeddings=64)
    few = {"max_steps": 4, "save_steps": 1, "rope_scaling": "yarn"}
    run(pool, 2, settings_of(model, tmp_path / "out", **few), tmp_path / "runs")
    for folder in (tmp_path / "out", tmp_path / "out/checkpoint-1"):
        assert load_architecture(folder).rope_scaling == YARN
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128
    assert load_architecture(model).rope_scaling is None

    leave_as_crashed(tmp_path / "out", 1, tmp_path / "again")
    run(pool, 2, settings_of(model, tmp_path / "again", **few), tmp_path / "runs")
    ours, whole = tensors(tmp_path / "again"), tensors(tmp_path / "out")
    assert all((ours[name] == whole[name]).all() for name in whole)
    assert load_architecture(tmp_path / "again").rope_scaling == YARN

    unscaled = settings_of(model, tmp_path / "plain", max_steps=2, cutoff_len=64)
    run(pool, 2, unscaled, tmp_path / "runs")
    assert metrics(tmp_path / "plain")[1]["loss"] != metrics(tmp_path / "out")[1]["loss"]

    check_rerun(settings_of(model, tmp_path / "out", **few), 2)
    for value, said in ((None, "null"), ("linear", "linear")):
        with pytest.raises(MegatuneError, match=f"rope_scaling was yarn, and is {said} in this run"):
            check_rerun(settings_of(model, tmp_path / "out", **few | {"rope_scaling": value}), 2)


@pytest.mark.parametrize(
    ("cutoff_len", "line"),
    [
        (65, "model      rope_scaling yarn: factor 2, 128 positions instead of 64"),
        (64, "accepted   rope_scaling: no effect, cutoff_len 64 is within the model's 64 positions"),
    ],
)
def test_a_user_is_told_of_the_factor(cutoff_len: int, line: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2, max_position_embeddings=64)
    settings = settings_of(model, tmp_path / "out", rope_scaling="yarn", cutoff_len=cutoff_len)
    found = RunModel(settings, asks=True)
    folder = found.config_dir(str(model))
    assert found.lines == [line]
    assert found.fetch() == str(folder)
    assert (Path(folder) / "model.safetensors").samefile(model / "model.safetensors")


def test_what_is_wrong_with_a_models_own_file_is_said_of_that_file(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2, max_position_embeddings=64)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu"}))
    with pytest.raises(MegatuneError, match="hidden_act") as raised:
        RunModel(settings_of(model, tmp_path / "out", rope_scaling="yarn"), asks=True).config_dir(str(model))
    assert [finding.where for finding in raised.value.findings] == [str(path)]


def test_a_family_that_is_not_computed_with_it_is_named() -> None:
    settings = load(None, ["rope_scaling=yarn", "cutoff_len=9000"]).settings
    with pytest.raises(MegatuneError, match="'yarn' is not supported") as raised:
        as_scaled({"model_type": "phi3", "max_position_embeddings": 4096}, settings)
    assert [finding.where for finding in raised.value.findings] == ["rope_scaling"]


def test_adapters_need_the_whole_model() -> None:
    words = ["rope_scaling=yarn", "finetuning_type=lora"]
    (finding,) = (each for each in load(None, words).check() if "missing" not in each.what)
    assert finding.fix == "write `merge_lora: true`, or remove `rope_scaling`".replace("`", "")
    assert not [each for each in load(None, [*words, "merge_lora=true"]).check() if "missing" not in each.what]
