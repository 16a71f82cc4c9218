"""Steps that are not finite or spike (T46): nothing of them is used, and the run stops, skips them, or goes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_steps_kit import train_spoiled
from pool import RankPool
from runs import assert_same_tensors, settings_of, tensors

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.bad_steps import BadSteps
from megatune.training.storage.files import read_json_lines
from megatune.training.storage.store import CheckpointStore, list_checkpoints
from megatune.training.train_state import TrainState

NAN = float("nan")
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAPS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
SIX = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_checkpoint(family, path, num_layers=2)

    return model


def run(pool: RankPool, world_size: int, settings: Settings, folder: Path, *spoiled: Any, code: int = 0) -> None:
    assert pool.run(world_size, train_spoiled, settings, folder, *spoiled) == [code] * world_size


def bad_steps(output_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(output_dir / "bad_steps.jsonl")


@pytest.mark.extended("pp2", "dp2", "cp2", "ep2 experts", "packed", "streamed", "lora dp2", "biased experts")
@pytest.mark.parametrize(
    ("name", "family", "changes"),
    [
        ("tp2", "qwen3", TP2),
        ("pp2", "qwen3", PP2),
        ("dp2", "qwen3", OVERLAPS),
        ("cp2", "qwen3", CP2),
        ("ep2 experts", "qwen3_moe", EP2),
        ("biased experts", "deepseek_v3", {**EP2, "moe_router_bias_update_rate": 0.01, "template": None}),
        ("packed", "qwen3", {**TP2, "packing": True}),
        ("streamed", "qwen3", {**TP2, "streaming": True, "buffer_size": 15}),
        ("lora dp2", "qwen3", {"finetuning_type": "lora", "lora_rank": 4}),
    ],
)
def test_a_skipped_step_leaves_no_trace_in_what_is_trained(
    name: str, family: str, changes: dict[str, Any], pool: RankPool, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """NaN in one rank's gradient; beside it the run whose optimizer is not called at that step."""
    values = {**SIX, **changes}
    if name == "biased experts":
        # Megatron-Core changes the biases before the optimizer: without an update they stay as they were, too.
        values["max_steps"] = 3
        spoiled = settings_of(models(family), tmp_path / "out", **values, on_bad_step="skip")
        run(pool, 2, spoiled, tmp_path, {1: NAN, 2: NAN, 3: NAN})
        assert_same_tensors(tmp_path / "out", models(family))
        return
    spoiled = settings_of(models(family), tmp_path / "out", **values, on_bad_step="skip")
    run(pool, 2, spoiled, tmp_path, {4: NAN})
    whole = settings_of(models(family), tmp_path / "whole", **values)
    run(pool, 2, whole, tmp_path, {}, {}, [4])
    for folder in (".", "checkpoint-6/training"):
        assert_same_tensors(tmp_path / "out" / folder, tmp_path / "whole" / folder)
    (record,) = bad_steps(tmp_path / "out")
    assert (record["step"], record["action"], record["grad_norm"]) == (4, "skip", None)


@pytest.mark.extended
def test_what_overflows_at_the_smallest_loss_scale_is_bad(
    pool: RankPool, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """An overflow of fp16 halves its loss scale, 2^32 at first; there is an end to that."""
    changes = {"max_steps": 60, "save_strategy": "no", "gradient_accumulation_steps": 1, "fp16": True}
    settings = settings_of(models("qwen3"), tmp_path / "out", **changes)
    with pytest.raises(AssertionError, match=r"step 3\d: loss \d.*, gradient norm nan"):
        run(pool, 1, settings, tmp_path, dict.fromkeys(range(1, 61), NAN))


def test_a_spike_is_skipped_and_a_resume_goes_on_bit_for_bit(
    pool: RankPool, models: Callable[[str], Path], tmp_path: Path, told: Callable[..., None]
) -> None:
    """The medians are part of a checkpoint: a process that starts again judges as the one before would have."""
    changes = {"max_steps": 13, "save_steps": 5, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    changes |= {"on_bad_step": "skip", "loss_spike_bound": 2, "grad_norm_spike_bound": 50, "max_bad_steps": 2}
    spoiled = {11: 1e4}, {12: 3.0}
    one, other = (settings_of(models("qwen3"), tmp_path / name, **changes) for name in ("one", "other"))
    run(pool, 2, one, tmp_path, *spoiled)
    run(pool, 2, other, tmp_path, *spoiled, (), 1, 12, code=-1)
    assert [record["step"] for record in bad_steps(tmp_path / "other")] == [11, 12]
    run(pool, 2, other, tmp_path, *spoiled)
    for folder in (".", "checkpoint-13/training"):
        assert_same_tensors(tmp_path / "one" / folder, tmp_path / "other" / folder)
    states = [
        json.loads((tmp_path / name / "checkpoint-13/training/state.json").read_text()) for name in ("one", "other")
    ]
    assert states[0] == states[1]
    assert states[0]["bad_steps"] == 2
    told(
        case="T46", fault="a loss and a gradient norm that spike, with on_bad_step: skip",
        got=f"step 12: {bad_steps(tmp_path / 'one')[1]['problem']}",
        lost="the rows of these steps; a resume continues bit for bit",
    )  # fmt: skip
    for name in ("one", "other"):
        records = bad_steps(tmp_path / name)
        assert [(record["step"], record["action"]) for record in records] == [(11, "skip"), (12, "skip")]
        assert "gradient norm" in records[0]["problem"]
        assert "loss" in records[1]["problem"]
        assert all("<|im_start|>user" in row["begins"][0] for record in records for row in record["rows"])
    logged = [each for each in read_json_lines(tmp_path / "one" / "metrics.jsonl") if "bad_step" in each]
    assert [each["step"] for each in logged] == [11, 12]


def counts_of_skipped(model: Path, folder: Path) -> list[int]:
    """On a rank: the state's count after each of two skipped steps, in a run that has gone back once before."""
    settings = settings_of(model, folder, on_bad_step="skip", max_bad_steps=9)
    state, rows = TrainState(), SimpleNamespace(names=lambda step: [], documents=lambda step, rows: [])
    bad = BadSteps(settings, state, rows, CheckpointStore(folder), model, frozenset(), times_back=1)
    result: Any = SimpleNamespace(totals=SimpleNamespace(loss=NAN), grad_norm=NAN, problem="loss nan")
    counts = []
    for step in (3, 4):
        notice = bad.handle(step, result, {})
        assert f"(bad step {step - 1} of at most 9" in notice.text
        counts.append(state.bad_steps)
    return counts


def test_going_back_is_counted_once_among_skipped_steps(
    pool: RankPool, models: Callable[[str], Path], tmp_path: Path
) -> None:
    assert pool.run(1, counts_of_skipped, models("qwen3"), tmp_path) == [[1, 2]]


def test_more_bad_steps_than_allowed_end_the_run(
    pool: RankPool, models: Callable[[str], Path], tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(models("qwen3"), tmp_path / "out", **SIX, **PP2, on_bad_step="skip", max_bad_steps=1)
    why = "1 bad steps were skipped before it, the limit of max_bad_steps; gradients that are not finite on rank"
    with pytest.raises(AssertionError, match=rf"step 4: loss \d.*, gradient norm nan\n +why: {why}") as ended:
        run(pool, 2, settings, tmp_path, {3: NAN, 4: NAN})
    assert [(record["step"], record["action"]) for record in bad_steps(tmp_path / "out")] == [(3, "skip"), (4, "stop")]
    for checkpoint in list_checkpoints(tmp_path / "out"):
        assert all(tensor.isfinite().all() for tensor in tensors(checkpoint).values())
    (line,) = [line for line in str(ended.value).splitlines() if "step 4: loss" in line and "Error" in line][:1]
    told(
        case="T46", fault="NaN in a gradient of one of two ranks, twice, with on_bad_step: skip, max_bad_steps: 1",
        got=line.partition("MegatuneError: ")[2], lost="nothing: the weights are as they were before the step",
    )  # fmt: skip


@pytest.mark.parametrize("layout", [OVERLAPS], ids=["dp2"])
def test_a_run_that_goes_back_leaves_out_the_step_and_the_one_before(
    layout: dict[str, Any], pool: RankPool, models: Callable[[str], Path], tmp_path: Path, told: Callable[..., None]
) -> None:
    values = {**SIX, **layout, "save_steps": 2}
    settings = settings_of(models("qwen3"), tmp_path / "out", **values, on_bad_step="go_back")
    with pytest.raises(AssertionError, match="the run goes back to its newest checkpoint and leaves out step 3 and 4"):
        run(pool, 2, settings, tmp_path, {4: NAN})
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    # As the launcher does, the same once more: the gradient is still spoiled, and nobody computes it.
    run(pool, 2, settings, tmp_path, {4: NAN})
    run(pool, 2, settings_of(models("qwen3"), tmp_path / "whole", **values), tmp_path, {}, {}, [3, 4])
    for folder in (".", "checkpoint-6/training"):
        assert_same_tensors(tmp_path / "out" / folder, tmp_path / "whole" / folder)
    logged = [each for each in read_json_lines(tmp_path / "out" / "metrics.jsonl") if "bad_step" in each]
    assert [(each["step"], each["action"]) for each in logged] == [(3, "left_out"), (4, "left_out")]
    assert [record["left_out"] for record in bad_steps(tmp_path / "out")] == [[3, 4]]
    told(
        case="T46", fault="NaN in a gradient of one of two ranks, with on_bad_step: go_back", got=logged[1]["notice"],
        lost="the rows of two steps; all else is as in a run without them",
    )  # fmt: skip


def test_there_must_be_something_to_go_back_to(pool: RankPool, models: Callable[[str], Path], tmp_path: Path) -> None:
    settings = settings_of(models("qwen3"), tmp_path / "out", **SIX, on_bad_step="go_back")
    with pytest.raises(AssertionError, match="why: there is no checkpoint to go back to yet; gradients"):
        run(pool, 1, settings, tmp_path, {1: NAN}, {}, [], 0)
    assert [record["action"] for record in bad_steps(tmp_path / "out")] == ["stop"]


@pytest.mark.extended
@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_preferences_skip_a_step_without_a_trace(
    stage: str, pool: RankPool, models: Callable[[str], Path], tmp_path: Path
) -> None:
    columns = {
        "dpo": {"prompt": "instruction", "chosen": "yes", "rejected": "no"},
        "kto": {"prompt": "instruction", "response": "yes", "kto_tag": "wanted"},
    }
    rows = [
        {"instruction": f"Is {each}?", "yes": f"Yes, {each}.", "no": "No.", "wanted": each % 3 > 0}
        for each in range(24)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    entry = {"file_name": "rows.json", "ranking": stage == "dpo", "columns": columns[stage]}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    values = {**SIX, **TP2, "stage": stage, "dataset_dir": tmp_path, "dataset": "rows"}
    run(pool, 2, settings_of(models("qwen3"), tmp_path / "out", **values, on_bad_step="skip"), tmp_path, {4: NAN})
    run(pool, 2, settings_of(models("qwen3"), tmp_path / "whole", **values), tmp_path, {}, {}, [4])
    for folder in (".", "checkpoint-6/training"):
        assert_same_tensors(tmp_path / "out" / folder, tmp_path / "whole" / folder)
    (record,) = bad_steps(tmp_path / "out")
    assert record["step"] == 4
