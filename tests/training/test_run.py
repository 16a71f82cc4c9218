"""Whole runs: what they leave behind, and that a resume is exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import (
    DEMO,
    assert_same_runs,
    assert_same_tensors,
    evaluations,
    leave_as_crashed,
    metrics,
    run,
    said,
    settings_of,
    tensors,
    train,
)
from transformers import TrainerState, TrainingArguments

from megatune.config.settings import Settings
from megatune.data.order import PreparedSteps
from megatune.data.rows import TokenRows
from megatune.demo.checkpoint import make_checkpoint
from megatune.engine.step import StepTotals
from megatune.training import loop
from megatune.training.callbacks.metrics import GENERATIONS_NAME
from megatune.training.model_files import small_files
from megatune.training.storage.manifest import TRAINING_FOLDER, digest_files, read_manifest, write_manifest
from megatune.training.storage.store import list_checkpoints
from megatune.training.train_state import STATE_NAME, read_state


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four layers: for as many parts, and more easily ruined."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "larger")


@pytest.fixture(scope="module")
def straight(pool: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps in one process, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert pool.run(1, train, settings_of(model, folder / "out"), folder) == [0]
    return folder / "out"


def test_the_final_model_loads_in_transformers(straight: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in (straight, straight / "checkpoint-12"):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in tensors(folder).items():
            assert torch.equal(model.state_dict()[name], tensor)
        assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_model_made_from_a_run_has_none_of_its_records(straight: Path) -> None:
    assert (straight / "train_results.json").is_file()
    names = {path.name for path in small_files(straight)}
    assert {name for name in names if "token" not in name and "template" not in name} == {
        "config.json",
        "generation_config.json",
    }


def test_the_answers_of_a_run_are_not_copied_into_a_model(tmp_path: Path) -> None:
    (tmp_path / GENERATIONS_NAME).touch()
    assert not small_files(tmp_path)


def test_every_row_of_an_epoch_is_trained(pool: RankPool, model: Path, tmp_path: Path) -> None:
    # 63 rows in steps of 16: the fourth step has 15, and one of the micro-batches an empty row.
    settings = settings_of(model, tmp_path / "out", max_steps=-1, num_train_epochs=1)
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    logged = metrics(tmp_path / "out")
    report = json.loads(next(tmp_path.glob("cache/rows/*/report.json")).read_text())
    assert len(logged) == 4
    assert sum(record["num_input_tokens"] for record in logged.values()) == report["train"]["tokens"]
    assert sum(record["num_tokens"] for record in logged.values()) == report["train"]["trained"]


@pytest.mark.parametrize("setting", ["disable_shuffling", "group_by_length"])
def test_a_run_trains_rows_in_the_order_that_is_asked_for(
    setting: str, pool: RankPool, model: Path, straight: Path, tmp_path: Path
) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=3, **{setting: True})
    assert pool.run(1, train, settings, tmp_path) == [0]
    rows = TokenRows(next(tmp_path.glob("cache/rows/*/train")))
    steps = PreparedSteps.from_settings(rows, settings, global_batch_size=8)
    seen = [record["num_input_tokens"] for record in metrics(tmp_path / "out").values()]
    assert seen == [sum(int(row.sum()) for row in steps.lengths(step)) for step in range(3)]
    assert seen != [record["num_input_tokens"] for record in metrics(straight).values()][:3]


EVALUATED = {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}


def test_evaluation_is_the_same_in_every_layout(pool: RankPool, larger: Path, tmp_path: Path) -> None:
    losses = []
    evaluated = {**EVALUATED, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for index, (world_size, parallel) in enumerate(
        [(1, {}), (4, {**stages, **overlaps, "per_device_train_batch_size": 2})]
    ):
        output_dir = tmp_path / str(index)
        assert (
            pool.run(world_size, train, settings_of(larger, output_dir, **evaluated, **parallel), tmp_path)
            == [0] * world_size
        )
        seen = evaluations(output_dir)
        assert list(seen) == [2, 4]
        losses.append([record["eval_loss"] for record in seen.values()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_best_model_is_kept_and_left_at_the_end(pool: RankPool, larger: Path, tmp_path: Path) -> None:
    # A learning rate that ruins the model after a good start.
    changes = {
        **EVALUATED,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 20,
        "save_total_limit": 1,
    }
    (lines,) = pool.run(1, said, settings_of(larger, tmp_path / "out", **changes), tmp_path)
    warned = "warm-up takes 20 steps, all of the run's 12: the learning rate reaches 0.275, not 0.5"
    assert f"warning    {warned}" in lines
    seen = evaluations(tmp_path / "out")
    best = min(seen, key=lambda step: seen[step]["eval_loss"])
    assert best < 12
    assert {path.name for path in list_checkpoints(tmp_path / "out")} == {f"checkpoint-{best}", "checkpoint-12"}
    assert_same_tensors(tmp_path / "out", tmp_path / f"out/checkpoint-{best}")


def with_a_spoiled_evaluation(settings: Settings, folder: Path) -> int:
    """One rank's run, whose first evaluation has a loss that is not a number."""
    evaluate, evaluated = loop.evaluate, []

    def spoiled(*arguments: Any) -> StepTotals:
        totals = evaluate(*arguments)
        if not evaluated:
            totals._totals[0] = float("nan")
        evaluated.append(totals)
        return totals

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop, "evaluate", spoiled)
        return train(settings, folder)


def test_a_loss_that_is_not_a_number_is_never_the_best(pool: RankPool, model: Path, tmp_path: Path) -> None:
    evaluated = {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 1}
    settings = settings_of(model, tmp_path / "out", max_steps=3, save_steps=3, **evaluated)
    assert pool.run(1, with_a_spoiled_evaluation, settings, tmp_path) == [0]
    state = read_state(tmp_path / "out/checkpoint-3")
    assert state is not None
    found = evaluations(tmp_path / "out")
    assert found[1]["eval_loss"] is None
    assert state.best_loss == min(found[step]["eval_loss"] for step in (2, 3))


def test_a_run_ends_early_where_the_loss_falls_no_more(pool: RankPool, larger: Path, tmp_path: Path) -> None:
    ruin = {"learning_rate": 0.5, "lr_scheduler_type": "constant"}
    changes = {**EVALUATED, **ruin, "early_stopping_steps": 2, "eval_steps": 2, "save_steps": 2, "eval_on_start": True}
    settings = settings_of(larger, tmp_path / "out", **changes)
    assert pool.run(1, train, settings, tmp_path) == [0]
    losses = {step: record["eval_loss"] for step, record in evaluations(tmp_path / "out").items()}
    start = losses.pop(0)  # of the model before the first step, which is not saved
    best = min(losses, key=lambda step: losses[step])
    assert start < losses[best]
    assert list(losses) == list(range(2, best + 5, 2))
    assert best < 8
    steps = list(metrics(tmp_path / "out"))
    assert steps == list(range(1, best + 5))
    assert_same_tensors(tmp_path / "out", tmp_path / f"out/checkpoint-{best}")
    assert pool.run(1, train, settings, tmp_path) == [0]  # has nothing left to do
    assert list(metrics(tmp_path / "out")) == steps


def test_numbers_that_are_not_finite_end_the_run_before_they_are_saved(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    settings = settings_of(model, tmp_path / "out", learning_rate=1e25, save_steps=1, lr_scheduler_type="constant")
    with pytest.raises(AssertionError, match=r"step \d+: loss \S+, gradient norm nan") as refusal:
        pool.run(2, train, settings, tmp_path)
    assert "gradients that are not finite on rank 0: model." in str(refusal.value)
    for checkpoint in list_checkpoints(tmp_path / "out"):
        assert all(tensor.isfinite().all() for tensor in tensors(checkpoint).values())


def test_a_run_that_has_ended_is_resumed_in_another_folder(pool: RankPool, model: Path, tmp_path: Path) -> None:
    ended, other = tmp_path / "ended", tmp_path / "other"
    assert pool.run(1, train, settings_of(model, ended, max_steps=2), tmp_path) == [0]
    again = {"max_steps": 2, "resume_from_checkpoint": str(ended / "checkpoint-2")}
    assert pool.run(1, train, settings_of(model, other, **again), tmp_path) == [0]
    assert_same_tensors(other, ended)


def test_checkpoints_of_another_course_go_only_where_the_user_says_so(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    output_dir = tmp_path / "out"
    assert pool.run(1, train, settings_of(model, output_dir, max_steps=9), tmp_path) == [0]
    earlier = {"resume_from_checkpoint": str(output_dir / "checkpoint-3"), "max_steps": 9}
    with pytest.raises(AssertionError, match="holds checkpoint-6, checkpoint-9 of an earlier run"):
        pool.run(1, train, settings_of(model, output_dir, **earlier), tmp_path)
    assert len(list_checkpoints(output_dir)) == 3
    again = settings_of(model, output_dir, **earlier, overwrite_output_dir=True)
    assert pool.run(1, train, again, tmp_path, 5) == [-1]
    assert [path.name for path in list_checkpoints(output_dir)] == ["checkpoint-3"]


def test_intervals_may_be_shares_of_all_steps(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """Of eleven steps, rounded up as Transformers does; the first and the last step are logged, too."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 0.5, "val_size": 4, "save_only_model": True}
    shares = {"logging_steps": 0.4, "save_steps": 0.3, "per_device_train_batch_size": 1}
    settings = settings_of(model, tmp_path / "out", max_steps=11, **shares, **evaluated)
    assert pool.run(1, train, settings, tmp_path) == [0]
    state, asked = TrainerState(), TrainingArguments(tmp_path, logging_steps=0.4, save_steps=0.3, eval_steps=0.5)
    state.compute_steps(asked, 11)
    assert (state.logging_steps, state.save_steps, state.eval_steps) == (5, 4, 6)
    logged = [
        json.loads(line)["current_steps"] for line in (tmp_path / "out/trainer_log.jsonl").read_text().splitlines()
    ]
    assert sorted({*logged}) == [1, 5, 6, 10, 11]
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == [
        "checkpoint-4",
        "checkpoint-8",
        "checkpoint-11",
    ]
    assert list(evaluations(tmp_path / "out")) == [6, 11]


@pytest.mark.parametrize(("strategy", "delay", "evaluated"), [("steps", 5, [6, 8, 9]), ("epoch", 2, [8, 9])])
def test_early_evaluations_are_left_out(
    strategy: str, delay: int, evaluated: list[int], pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Epochs are of four steps."""
    changes = {
        "val_size": 0.5,
        "eval_steps": 2 if strategy == "steps" else None,
        "max_steps": 9,
        "save_only_model": True,
    }
    changes |= {"eval_strategy": strategy, "eval_delay": delay, "compute_accuracy": True}
    assert pool.run(1, train, settings_of(model, tmp_path / "out", **changes), tmp_path) == [0]
    seen = evaluations(tmp_path / "out")
    assert list(seen) == evaluated
    assert all(0 < record["eval_accuracy"] < 1 for record in seen.values())
    assert json.loads((tmp_path / "out/eval_results.json").read_text())["eval_accuracy"] == seen[9]["eval_accuracy"]


@pytest.mark.parametrize(("world_size", "changes"), [(1, {"packing": True}), (2, {"per_device_eval_batch_size": 2})])
def test_each_data_set_is_evaluated_by_itself(
    world_size: int, changes: dict[str, bool | int], pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Its loss and accuracy are those of a run that evaluates it alone, and the loss of all is that of their tokens."""
    rows = json.loads((DEMO / "identity.json").read_text())
    for name, part in {"identity": rows[:40], "first": rows[40:43], "second": rows[43:50]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    files = {name: {"file_name": f"{name}.json"} for name in ("identity", "first", "second")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(files))
    common = {**changes, "dataset_dir": tmp_path, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    common |= {"compute_accuracy": True, "per_device_train_batch_size": 2, "save_only_model": True}
    found = {}
    for name, each in (("first", False), ("second", False), ("first,second", True)):
        settings = settings_of(
            model, tmp_path / f"out-{name}", **common, eval_dataset=name, eval_on_each_dataset=each, model_name="T"
        )
        run(pool, world_size, settings, tmp_path)
        found[name] = evaluations(tmp_path / f"out-{name}")[1]
    together = found.pop("first,second")
    assert {key for key in together if "first" in key} == {"eval_first_loss", "eval_first_accuracy"}
    for name, alone in found.items():
        assert together[f"eval_{name}_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
        assert together[f"eval_{name}_accuracy"] == pytest.approx(alone["eval_accuracy"], rel=1e-6)
    tokens = {name: alone["eval_num_tokens"] for name, alone in found.items()}
    total = sum(tokens[name] * found[name]["eval_loss"] for name in found) / sum(tokens.values())
    assert together["eval_loss"] == pytest.approx(total, rel=1e-6)
    assert found["first"]["eval_loss"] != pytest.approx(found["second"]["eval_loss"], rel=1e-3)


def test_a_checkpoint_of_before_losses_had_a_state_of_their_own_is_resumed(
    pool: RankPool, model: Path, straight: Path, tmp_path: Path
) -> None:
    """Until November 2026, BCO's was a part of every run's state."""
    leave_as_crashed(straight, 9, tmp_path / "out")
    checkpoint = tmp_path / "out/checkpoint-9"
    state = json.loads((checkpoint / TRAINING_FOLDER / STATE_NAME).read_text())
    assert state.pop("objective") == {}
    state |= {"reward_sum": 0.0, "reward_pairs": 0.0}
    (checkpoint / TRAINING_FOLDER / STATE_NAME).write_text(json.dumps(state))
    manifest = read_manifest(checkpoint)
    files = digest_files(checkpoint, [checkpoint / file.name for file in manifest.files])
    write_manifest(checkpoint, replace(manifest, files=tuple(files)))
    run(pool, 1, settings_of(model, tmp_path / "out"), tmp_path)
    assert_same_runs(tmp_path / "out", straight, 12)


def test_a_model_without_training_state_can_be_saved(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=3, save_only_model=True)
    assert pool.run(1, train, settings, tmp_path) == [0]
    training = tmp_path / "out/checkpoint-3/training"
    assert [path.name for path in training.iterdir()] == ["manifest.json"]
    with pytest.raises(AssertionError, match="holds a model without training state"):
        pool.run(1, train, settings, tmp_path)


NOISY = {
    "neftune_noise_alpha": 10,
    "max_steps": 5,
    "save_steps": 2,
    **EVALUATED,
    "eval_steps": 2,
    "eval_on_start": True,
}


def test_noise_on_word_embeddings_is_the_same_in_every_layout(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """Also after a resume in another one, over three steps; evaluation has none."""
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "per_device_train_batch_size": 2}
    run(pool, 1, settings_of(model, tmp_path / "whole", **NOISY), tmp_path)
    run(pool, 4, settings_of(model, tmp_path / "other", **NOISY, **parallel), tmp_path, crash_at=3)
    run(pool, 1, settings_of(model, tmp_path / "other", **NOISY), tmp_path)
    quiet = {**NOISY, "neftune_noise_alpha": None, "max_steps": 1}
    run(pool, 1, settings_of(model, tmp_path / "quiet", **quiet), tmp_path)
    losses = [[record["loss"] for record in metrics(tmp_path / name).values()] for name in ("whole", "other", "quiet")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] != pytest.approx(losses[0][:1], rel=1e-5)
    assert evaluations(tmp_path / "quiet")[0]["eval_loss"] == evaluations(tmp_path / "whole")[0]["eval_loss"]
