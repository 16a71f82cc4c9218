"""`mtp_num_layers`: a run trains the layer that predicts a further token, and saves it with the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from mtp_kit import add_layer
from pool import RankPool
from runs import assert_same_runs, evaluations, leave_as_crashed, metrics, run, settings_of, tensors
from safetensors.torch import load_file, save_file

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.families import load_architecture
from megatune.plan.memory.estimate import checkpoint_bytes

FEW = {"template": None, "max_steps": 4, "save_steps": 1, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
WORDS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_layer(make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("deepseek") / "model", num_layers=2))


@pytest.mark.parametrize(
    "layout",
    [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}],
    ids=str,
)
def test_it_learns_is_saved_and_resumes(pool: RankPool, model: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    few = FEW | layout | {"eval_strategy": "steps", "eval_steps": 2, "val_size": 8}
    run(pool, 2, settings_of(model, tmp_path / "out", **few), tmp_path / "runs")
    settings = settings_of(model, tmp_path / "out", **few)
    counted = checkpoint_bytes(settings, load_architecture(model, "sft", mtp_num_layers=1))
    written = sum(tensor.nbytes for tensor in tensors(tmp_path / "out/checkpoint-4").values())
    assert written == counted.model
    losses = [record["mtp_loss"] for _, record in sorted(metrics(tmp_path / "out").items())]
    assert losses[-1] < losses[0] - 0.1
    assert evaluations(tmp_path / "out")[4]["eval_mtp_loss"] < losses[0]
    before, after = tensors(model), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    ours = [name for name in before if name.startswith("model.layers.2.") and "bias" not in name]
    assert all((before[name] != after[name]).any() for name in ours)
    # What the model shares with it is repeated as it is now.
    for name, copy in ((WORDS, "embed_tokens"), (OUTPUT, "shared_head.head")):
        assert (after[f"model.layers.2.{copy}.weight"] == after[name]).all()
        assert (before[name] != after[name]).any()

    leave_as_crashed(tmp_path / "out", 1, tmp_path / "again")
    run(pool, 2, settings_of(model, tmp_path / "again", **few), tmp_path / "runs")
    assert_same_runs(tmp_path / "again", tmp_path / "out", 4)


def test_a_run_resumes_in_another_layout_and_not_without_it(pool: RankPool, model: Path, tmp_path: Path) -> None:
    run(pool, 2, settings_of(model, tmp_path / "out", **FEW), tmp_path / "runs")
    leave_as_crashed(tmp_path / "out", 2, tmp_path / "again")
    other = FEW | {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 4}
    run(pool, 2, settings_of(model, tmp_path / "again", **other), tmp_path / "runs")
    one, two = metrics(tmp_path / "again"), metrics(tmp_path / "out")
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert one[4][name] == pytest.approx(two[4][name], rel=1e-5)
    leave_as_crashed(tmp_path / "out", 2, tmp_path / "without")
    with pytest.raises(AssertionError, match="training"):
        run(pool, 1, settings_of(model, tmp_path / "without", **FEW | {"mtp_num_layers": 0}), tmp_path / "runs")


def test_the_logged_loss_is_that_of_next_tokens(pool: RankPool, model: Path, tmp_path: Path) -> None:
    few = {"template": None, "max_steps": 1, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1}
    few |= {"val_size": 8, "compute_accuracy": True}
    run(pool, 1, settings_of(model, tmp_path / "with", **few | {"mtp_num_layers": 1}), tmp_path / "runs")
    run(pool, 1, settings_of(model, tmp_path / "without", **few), tmp_path / "runs")
    one, two = metrics(tmp_path / "with")[1], metrics(tmp_path / "without")[1]
    assert one["loss"] == two["loss"]
    assert "mtp_loss" not in two
    one_evaluation, other = (evaluations(tmp_path / name)[1] for name in ("with", "without"))
    assert "eval_mtp_loss" in one_evaluation
    assert one_evaluation["eval_accuracy"] == pytest.approx(other["eval_accuracy"], abs=0.1)
    assert one["grad_norm"] != two["grad_norm"]


def test_a_checkpoint_without_it_is_refused(pool: RankPool, model: Path, tmp_path: Path) -> None:
    without = make_checkpoint("deepseek_v3", tmp_path / "model", num_layers=2)
    with pytest.raises(AssertionError, match="no multi-token prediction layers, which mtp_num_layers trains"):
        run(pool, 1, settings_of(without, tmp_path / "out", **FEW), tmp_path / "runs")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.enorm.weight"]
    save_file(tensors, without / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=r"1 keys are missing: model\.layers\.2\.enorm\.weight"):
        run(pool, 1, settings_of(without, tmp_path / "out", **FEW), tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mtp_num_layers=2"], "mtp_num_layers 2"),
        (["stage=dpo"], "stage"),
        (["finetuning_type=lora"], "finetuning_type"),
        (["finetuning_type=freeze"], "finetuning_type"),
        (["save_format=torch_dist"], "save_format"),
        (["mcore_model=folder"], "mcore_model"),
        (["neftune_noise_alpha=5"], "neftune_noise_alpha"),
    ],
)
def test_what_it_is_not_trained_with_is_refused(words: list[str], said: str) -> None:
    findings = load(None, ["mtp_num_layers=1", *words]).check()
    assert [each for each in findings if "mtp_num_layers" in each.what and said in each.what], findings


def test_families_without_it_are_named(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    with pytest.raises(MegatuneError, match="mtp_num_layers 1 with a qwen3"):
        load_architecture(model, "sft", mtp_num_layers=1)
