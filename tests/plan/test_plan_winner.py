"""The file of the layout that was found: it loads without a finding, and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pool_launch import CommandLine

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.load import Loaded, dump, load
from megatune.config.settings import GROUPS, Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.estimate import Estimate
from megatune.plan.launch import winner_yaml
from megatune.plan.layouts import SearchRequest
from megatune.plan.search import search

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def found(
    model: PlannedModel, settings: Settings, world_size: int = 8, trainable: FinetuningSettings | None = None
) -> Estimate:
    settings = settings.model_copy(update={"finetuning": trainable or FinetuningSettings()})
    case = Case(model=model, settings=settings, world_size=world_size, machine=find_machine("h100-80g"))
    best = search(SearchRequest(case=case, global_batch_size=64)).best
    assert best is not None
    return best


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def run_file(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    values = {
        "model_name_or_path": str(model),
        "output_dir": str(tmp_path / "out"),
        "dataset_dir": str(DEMO),
        "dataset": "identity",
        "template": "qwen3_nothink",
        "model_name": "Tuna",
        "model_author": "the team",
        "cutoff_len": 256,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "plot_loss": False,
        "recompute_granularity": "full",
    }
    path.write_text(yaml.safe_dump(values))
    return path


def plan(loaded: Loaded, world_size: int = 4) -> Estimate:
    """The fastest layout with two stages, which nobody would choose here, and which has most to write."""
    folder = loaded.settings.model.model_name_or_path
    assert folder is not None
    machine = cpu_machine(16 * 2**30, 4, world_size)
    model = PlannedModel(name="demo", architecture=load_architecture(folder))
    case = Case(model=model, settings=loaded.settings, world_size=world_size, machine=machine)
    request = SearchRequest(case=case, global_batch_size=8, keep=1000)
    wanted = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    return next(
        estimate
        for estimate in search(request).ranked
        if all(getattr(estimate.case.settings.parallel, key) == value for key, value in wanted.items())
    )


def test_of_a_file_every_line_is_kept_and_the_layout_is_marked(run_file: Path, tmp_path: Path) -> None:
    loaded = load(run_file)
    best = plan(loaded)
    text = winner_yaml(best, loaded.origins)
    winner = tmp_path / "winner.yaml"
    winner.write_text(text)
    again = load(winner)
    assert again.check(best.case.model.architecture, best.case.world_size) == []
    assert again.settings == best.case.settings
    marked = {line.partition(":")[0] for line in text.splitlines() if line.endswith("# plan")}
    assert {"tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "num_processes",
            "per_device_train_batch_size", "gradient_accumulation_steps"} <= marked  # fmt: skip
    assert "recompute_granularity" in marked, "the file's own was replaced"
    as_it_was = dump(again.settings, loaded.origins).splitlines()
    changed = {old.partition(":")[0] for old, new in zip(as_it_was, text.splitlines()[2:], strict=True) if old != new}
    assert changed == marked


def test_a_winner_trains(run_file: Path, tmp_path: Path, command_line: CommandLine, monkeypatch: Any) -> None:
    loaded = load(run_file)
    winner = tmp_path / "winner.yaml"
    winner.write_text(winner_yaml(plan(loaded), loaded.origins))
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    done = command_line("train", winner)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp 2" in done.stdout
    assert "pp 2" in done.stdout
    assert (tmp_path / "out" / "config.json").is_file()


def test_of_a_model_only_what_was_planned_is_written(tmp_path: Path) -> None:
    model = find_model("Qwen3-8B")
    base = Settings(precision=GROUPS["precision"](bf16=True), data=GROUPS["data"](cutoff_len=4096))
    best = found(model, base)
    text = winner_yaml(best, {})
    lines = text.splitlines()
    missing = [line.partition(":")[0] for line in lines if line.startswith("# ") and ": " in line]
    assert {"# model_name_or_path", "# dataset", "# output_dir"} <= set(missing)
    assert not any(line.startswith("save_steps") for line in lines)
    assert "Qwen3-8B" in text
    winner = tmp_path / "winner.yaml"
    winner.write_text(text)
    loaded = load(winner, overrides=["model_name_or_path=model", "dataset=rows", "output_dir=out"])
    assert loaded.check(model.architecture, 8) == []
    for group in ("parallel", "batch", "recompute", "precision"):
        assert getattr(loaded.settings, group) == getattr(best.case.settings, group)
    assert loaded.settings.data.cutoff_len == 4096
    assert loaded.settings.run.num_processes == 8


def test_processes_of_several_machines_are_started_on_each_of_them() -> None:
    base = Settings(run=GROUPS["run"](num_processes=8))
    best = found(find_model("Qwen3-8B"), base, world_size=16)
    assert best.case.settings.run.num_processes is None


def test_adapters_are_written(tmp_path: Path) -> None:
    asked = FinetuningSettings(finetuning_type="lora", lora_target=["q_proj", "v_proj"], lora_rank=16)
    model = find_model("Qwen3-8B")
    best = found(model, Settings(precision=GROUPS["precision"](bf16=True)), trainable=asked)
    winner = tmp_path / "winner.yaml"
    winner.write_text(winner_yaml(best, {}))
    loaded = load(winner, overrides=["model_name_or_path=model", "dataset=rows", "output_dir=out"])
    assert loaded.check(model.architecture, best.case.world_size) == []
    assert loaded.settings.finetuning == asked


@pytest.mark.parametrize(
    "trainable",
    [{}, {"freeze_vision_tower": False}, {"freeze_language_model": True, "freeze_multi_modal_projector": False}],
)
def test_what_is_frozen_is_written(trainable: dict[str, bool], tmp_path: Path) -> None:
    model, asked = find_model("Qwen3-VL-8B"), FinetuningSettings(**trainable)
    best = found(model, Settings(precision=GROUPS["precision"](bf16=True)), trainable=asked)
    winner = tmp_path / "winner.yaml"
    winner.write_text(winner_yaml(best, {}))
    loaded = load(winner, overrides=["model_name_or_path=model", "dataset=rows", "output_dir=out", "template=qwen3_vl"])
    assert loaded.check(model.architecture, 8) == []
    assert loaded.settings.finetuning == asked
