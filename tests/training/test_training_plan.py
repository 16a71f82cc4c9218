"""A run notes what was planned and what was measured, from which the planner learns the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import settings_of, train
from transformers import AutoConfig, AutoModelForCausalLM

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.families import load_architecture
from megatune.plan.calibration import calibrate
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import cpu_machine
from megatune.plan.catalogue.own import calibration_for, write_calibration
from megatune.plan.estimate import estimate
from megatune.plan.run.preflight import preflight
from megatune.plan.run.record import RunRecord, dump_records, read_rank_memory, read_records
from megatune.plan.run.trouble import diagnose


def run(
    pool: RankPool,
    model: Path,
    output: Path,
    *,
    world: int = 1,
    crash_at: int | None = None,
    cores: float = 2,
    **values: Any,
) -> RunRecord:
    """The newest record of a run on `world` ranks."""
    settings = settings_of(model, output, **values)
    case = Case(
        model=PlannedModel(name="tuna", architecture=load_architecture(model)),
        settings=settings,
        world_size=world,
        machine=cpu_machine(16 * 2**30, cores, world),
    )
    # As when `train` starts it: below output_dir, where `explain` looks.
    codes = pool.run(world, train, settings, output / "launch", crash_at, case)
    assert codes == [0 if crash_at is None else -1] * world
    return read_records(output)[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.mark.parametrize(
    ("family", "template", "dense"),
    [
        ("deepseek_v3", "deepseek3", {"first_k_dense_replace": 2}),
        ("qwen3_moe", "qwen3_nothink", {"mlp_only_layers": [0, 1]}),
    ],
)
def test_a_family_of_experts_without_a_sparse_layer_is_planned_and_trained(
    pool: RankPool, tmp_path: Path, family: str, template: str, dense: dict[str, Any]
) -> None:
    model = make_checkpoint(family, tmp_path / "model", num_layers=2)
    config = AutoConfig.from_pretrained(model, **dense)
    assert config.num_hidden_layers == 2
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    words = [f"model_name_or_path={model}", "dataset=identity", f"template={template}", f"output_dir={tmp_path}/out"]
    checked = preflight(load(None, words), 1, machine=cpu_machine(16 * 2**30, 2))
    assert checked.planned is not None
    record = run(pool, model, tmp_path / "out", max_steps=2, template=template)
    assert record.outcome == "finished"
    steps = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert 0 < json.loads(steps[-1])["loss"] < 12


def test_planned_and_measured_of_every_rank(pool: RankPool, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    record = run(pool, model, output, world=2, pipeline_model_parallel_size=2, max_steps=4, save_steps=2)
    assert record.outcome == "finished"
    measured = record.measured
    assert measured is not None
    assert [stage.stage for stage in measured.stages] == [0, 1]
    assert len(measured.peaks) == 2
    for each in read_rank_memory(output / "launch"):
        assert 0 < each.joined <= each.loaded <= each.peak
        assert 0 < each.stepped <= each.peak <= measured.peaks[each.rank] * 1.02
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(step["seconds"] for step in steps if step["step"] > 2)
    assert measured.num_steps == 2
    assert measured.step_seconds == pytest.approx(sum(seconds) / 2)
    assert 20 < measured.row_tokens <= measured.longest_row <= 128
    assert measured.tokens_per_step == pytest.approx(sum(s["num_input_tokens"] for s in steps if s["step"] > 2) / 2)
    content = json.loads((output / "plan.json").read_text())["runs"][0]
    trained = record.as_trained()
    assert trained is not None
    lengths = record.case.lengths
    assert lengths is not None
    assert content["planned"]["sequence_length"] == lengths.longest
    assert 20 < lengths.mean < measured.longest_row <= lengths.longest < 128
    assert content["planned_for_longest_row"]["memory_bytes"][1]["total"] == trained[0].stages[1].total
    assert content["planned_for_mean_row"]["step_seconds"]["total"] == trained[1].time.total


def test_a_run_that_goes_on_keeps_what_was_noted_before(pool: RankPool, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    broken = run(pool, model, output, max_steps=6, save_steps=2, crash_at=5)
    assert broken.measured is not None  # noted when step 4 was saved, and once more on the way down
    run(pool, model, output, max_steps=6, save_steps=2)
    first, second = read_records(output)
    assert (first.outcome, first.first_step) == ("failed", 0)
    assert (second.outcome, second.first_step) == ("finished", 4)
    again = run(pool, model, output, max_steps=2, save_steps=2, overwrite_output_dir=True)
    assert dump_records(read_records(output)) == dump_records([again])
    values = {"max_steps": 3, "save_steps": 3, "overwrite_output_dir": True}
    assert pool.run(1, train, settings_of(model, output, **values), output / "launch", None, None) == [0]
    with pytest.raises(MegatuneError, match="it has no plan"):  # the plan of the run before is not this one's
        diagnose(output)


def test_tiny_runs_calibrate_this_cpu_for_another_one(pool: RankPool, tmp_path: Path) -> None:
    """What the planner takes the machine for is hundreds of times too slow, however busy it is; three runs say so."""
    folders = []
    for number, (layers, hidden, rows) in enumerate(((2, 64, 8), (2, 128, 8), (2, 128, 16), (3, 96, 16))):
        model = make_checkpoint("qwen3", tmp_path / f"m{number}", num_layers=layers, hidden_size=hidden)
        folders.append(tmp_path / f"r{number}")
        batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
        run(pool, model, folders[-1], cores=0.002, max_steps=6, save_strategy="no", **batch)
    report = calibrate(folders[:3])
    before, after, apart = (report.median("time", when) for when in ("before", "after", "left_out"))
    assert before is not None
    assert after is not None
    assert apart is not None
    assert max(after, apart) < before
    write_calibration(report.calibration, tmp_path / "cpu.yaml", "cpu")

    [record] = read_records(folders[3])
    trained, measured = record.as_trained(), record.measured
    assert trained is not None
    assert measured is not None
    assert measured.step_seconds is not None
    case = trained[1].case
    fitted = replace(case, machine=replace(case.machine, calibration=calibration_for("cpu", tmp_path / "cpu.yaml")))
    error_before, error_after = (abs(estimate(each).time.total / measured.step_seconds - 1) for each in (case, fitted))
    assert error_after < error_before
    lines = diagnose(folders[3])
    assert lines[0] == f"{folders[3]}: finished"
    assert "a step, was" in lines[1]
