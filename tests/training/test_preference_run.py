"""Runs of preference training: the reference's log-probabilities, what is logged, and that a resume is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, reference_files, run, settings_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatune.config.settings import Settings
from megatune.data.rows import TokenRows
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.storage.manifest import TRAINING_FOLDER
from megatune.training.train_state import STATE_NAME, read_state

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 5e-3}
WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "window", "paper")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family, num_layers=2) for family in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of which the chosen answer says yes, with answers of different lengths."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {
            "instruction": f"Is the {word} {number}?",
            "chosen": f"Yes, the {' '.join(WORDS[: number % 5])}.",
            "rejected": f"No, the {' '.join(WORDS[number % 3 : 6])}, {word}.",
        }
        for number, word in enumerate(3 * WORDS)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "pairs.json", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    return folder


def preference(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Six steps of eight pairs, an epoch of which has three."""
    values = {
        "stage": "dpo",
        "dataset_dir": data,
        "dataset": "pairs",
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    return settings_of(model, output_dir, **values | changes)


@pytest.mark.parametrize("adapters", [{}, LORA], ids=("full", "lora"))
def test_a_run_prefers_what_was_chosen(
    adapters: dict[str, Any], pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    settings = preference(models["qwen3"], data, tmp_path / "out", **TP2, **adapters)
    run(pool, 2, settings, tmp_path)
    logged = metrics(tmp_path / "out")
    assert logged[1]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert abs(logged[1]["rewards/margins"]) < 1e-5
    assert logged[6]["rewards/accuracies"] == 1
    assert logged[6]["loss"] < 0.6
    assert logged[6]["num_tokens"] > 8 * 2
    assert len(reference_files(tmp_path)) == 1


BCO_EVALUATED = {"pref_loss": "sigmoid,bco_pair", "val_size": 4, "eval_strategy": "steps", "eval_steps": 2}
RESUMED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full, tp2 sp, BCO's running mean, evaluated": ("qwen3", 2, {**TP2, **BCO_EVALUATED}),
    "LoRA, bf16, pp2, dropout": ("qwen3", 2, {**LORA, **PP2, "bf16": True, "lora_dropout": 0.1}),
    "full, dp2, overlaps, two losses": (
        "qwen3",
        2,
        {**OVERLAPS, "pref_loss": "ipo,hinge", "per_device_train_batch_size": 2},
    ),
    "full, experts, ep2": ("qwen3_moe", 2, {**EP2, "per_device_train_batch_size": 2}),
    "LoRA, words trained whole": ("qwen3", 1, {**LORA, "additional_target": "embed_tokens,norm"}),
}


_FIRST, *_OTHERS = RESUMED
RESUMED_CASES = [
    pytest.param(_FIRST, True, marks=pytest.mark.extended),
    (_FIRST, False),
    *((name, True) for name in _OTHERS),
]


@pytest.mark.extended("LoRA, words trained whole", "full, experts, ep2")
@pytest.mark.parametrize(("name", "kept"), RESUMED_CASES)
def test_a_resume_is_exact(
    name: str, kept: bool, pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Over three steps from the middle of an epoch; where the reference's values are gone they are computed again, of
    the start."""
    family, world_size, changes = RESUMED[name]
    whole, crashed = (
        preference(models[family], data, tmp_path / each, max_steps=5, **changes) for each in ("whole", "crashed")
    )
    run(pool, world_size, whole, tmp_path / "a")
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    again = tmp_path / ("a" if kept else "b")
    before = {path: path.stat().st_mtime_ns for path in reference_files(again)}
    run(pool, world_size, crashed, again)
    assert not kept or {path: path.stat().st_mtime_ns for path in reference_files(again)} == before
    for folder in (".", "checkpoint-5", "checkpoint-5/training"):
        assert_same_tensors(tmp_path / "whole" / folder, tmp_path / "crashed" / folder)
    for records in (metrics, evaluations):
        one, other = (
            {step: [record[key] for key in record if "/" in key or "loss" in key] for step, record in found.items()}
            for found in (records(tmp_path / "whole"), records(tmp_path / "crashed"))
        )
        assert one == other
    for one, other in zip(reference_files(tmp_path / "a"), reference_files(again), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_values_are_those_of_transformers(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """In another order than the rows', on the ranks that have the output layer; kept for other layouts."""
    from transformers import AutoModelForCausalLM

    layout = {**PP2, "context_parallel_size": 2, "max_steps": 1}
    run(pool, 4, preference(models["qwen3"], data, tmp_path / "one", **layout), tmp_path)
    (path,) = reference_files(tmp_path)
    values, written = np.load(path), path.stat().st_mtime_ns
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32)
    expected = []
    for document in (document for row in TokenRows(path.parent) for document in row):
        ids, labels = (torch.from_numpy(np.array(each)).long() for each in document[:2])
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        trained = labels[1:] >= 0
        expected.append(float(log_probs[trained].gather(1, labels[1:][trained, None]).sum()))
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    run(pool, 2, preference(models["qwen3"], data, tmp_path / "two", **TP2, max_steps=1), tmp_path)
    assert reference_files(tmp_path) == [path]
    assert path.stat().st_mtime_ns == written


def test_a_wrong_reference_stops_the_run(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    settings = preference(models["qwen3"], data, tmp_path / "out", max_steps=1)
    run(pool, 1, settings, tmp_path)
    (path,) = reference_files(tmp_path)
    np.save(path, np.load(path) * np.float32(1.001))
    again = preference(models["qwen3"], data, tmp_path / "again", max_steps=1)
    with pytest.raises(Exception, match="the reference is not the model that training starts from"):
        run(pool, 1, again, tmp_path)
    assert not (tmp_path / "again/checkpoint-1").exists()


def test_another_model_can_be_the_reference(
    pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """It is not held against the start; a run goes on with the one that it began with."""
    model, other = models["qwen3"], make_checkpoint("qwen3", tmp_path / "other", seed=1, num_layers=2)
    settings = preference(model, data, tmp_path / "out", ref_model=str(other))
    run(pool, 1, settings, tmp_path, crash_at=3)
    logged = metrics(tmp_path / "out")
    assert abs(logged[1]["rewards/margins"]) > 1e-3
    with pytest.raises(Exception, match="answers were compared with another reference"):
        run(pool, 1, preference(model, data, tmp_path / "out", ref_model=str(model)), tmp_path)
    own = preference(model, data, tmp_path / "own", ref_model=str(model), max_steps=1)
    run(pool, 1, own, tmp_path)
    assert metrics(tmp_path / "own")[1]["rewards/margins"] == pytest.approx(0, abs=1e-5)


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_equal_weights_with_another_configuration_are_another_reference(
    pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Values of the first configuration would stop the run, as those of another model."""
    shutil.copytree(models["qwen3"], tmp_path / "model")
    for number, theta in enumerate((1e4, 1e2), 1):
        rewrite(tmp_path / "model/config.json", rope_parameters={"rope_type": "default", "rope_theta": theta})
        run(pool, 1, preference(tmp_path / "model", data, tmp_path / f"{number}", max_steps=1), tmp_path)
        assert len(reference_files(tmp_path)) == number


def test_equal_adapters_with_another_alpha_are_another_reference(
    pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    model, adapter = models["qwen3"], tmp_path / "adapter"
    run(pool, 1, preference(model, data, adapter, max_steps=1, **LORA), tmp_path / "first")
    margins = []
    for alpha in (8, 64):
        rewrite(adapter / "adapter_config.json", lora_alpha=alpha)
        other = {"ref_model": str(model), "ref_model_adapters": str(adapter), "max_steps": 1}
        run(pool, 1, preference(model, data, tmp_path / f"{alpha}", **other), tmp_path)
        margins.append(abs(metrics(tmp_path / f"{alpha}")[1]["rewards/margins"]))
    assert margins[1] > 2 * margins[0] > 0
    assert len(reference_files(tmp_path)) == 2


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_losses_without_a_reference_compute_none(
    loss: str, pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    settings = preference(models["qwen3"], data, tmp_path / "out", pref_loss=loss, save_strategy="no")
    run(pool, 1, settings, tmp_path)
    assert not reference_files(tmp_path)
    logged = metrics(tmp_path / "out")
    assert logged[6]["rewards/margins"] > logged[1]["rewards/margins"]


def test_what_is_measured_is_everywhere(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """Evaluated, too: in the files that other programs read, in TensorBoard and in the plot."""
    evaluated = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 3, "pref_ftx": 0.5, "packing": True}
    shown = {"plot_loss": True, "report_to": "tensorboard"}
    run(pool, 1, preference(models["qwen3"], data, tmp_path / "out", **evaluated, **shown), tmp_path)
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen"}
    names |= {"logps/rejected", "loss/sigmoid", "nll_loss"}
    logged, held_out = metrics(tmp_path / "out"), evaluations(tmp_path / "out")
    assert names <= logged[6].keys()
    assert {f"eval_{name}" for name in names} <= held_out[3].keys()
    assert held_out[6]["eval_rewards/margins"] > 0
    assert held_out[6]["eval_perplexity"] is None
    log = [json.loads(line) for line in (tmp_path / "out/trainer_log.jsonl").read_text().splitlines()]
    assert [record["accuracy"] for record in log if "loss" in record][-1] == logged[6]["rewards/accuracies"]
    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert any("rewards/accuracies" in record for record in history)
    assert any("eval_rewards/accuracies" in record for record in history)
    results = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert "eval_perplexity" not in results
    assert results["eval_rewards/accuracies"] == held_out[6]["eval_rewards/accuracies"]
    events = EventAccumulator(str(tmp_path / "out/runs/out"))
    events.Reload()
    assert {f"{group}/{name}" for group in ("train", "eval") for name in names} <= set(events.Tags()["scalars"])
    assert (tmp_path / "out/training_loss.png").stat().st_size > 10_000
    assert len(reference_files(tmp_path)) == 2


def test_the_state_of_bco_in_earlier_checkpoints_is_read(tmp_path: Path) -> None:
    """It was a part of the run's state until a loss had one of its own."""
    (tmp_path / TRAINING_FOLDER).mkdir()
    content = {"step": 3, "reward_sum": 1.5, "reward_pairs": 4.0}
    (tmp_path / TRAINING_FOLDER / STATE_NAME).write_text(json.dumps(content))
    state = read_state(tmp_path)
    assert state is not None
    assert state.objective == {"reward_sum": 1.5, "reward_pairs": 4.0}
