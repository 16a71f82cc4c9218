"""The stages that start ranks, and what they compare: a small file from its first check to its table."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pool_launch import CommandLine
from safetensors.torch import save_file

from megatune.cli.main import main
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.doctor.check import Verdict
from megatune.errors import ExitCode
from megatune.rehearse import stages
from megatune.rehearse.file_checks import DISK, TEMPLATE
from megatune.rehearse.ranks import run_local
from megatune.rehearse.run import Rehearsal
from megatune.rehearse.stages import (
    different_rows,
    different_steps,
    different_tensors,
    largest_difference,
    not_finite,
    trained_steps,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=6)


def words(model: object, folder: Path, **changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "model_name_or_path": model, "dataset_dir": DEMO, "dataset": "identity", "template": "qwen3_nothink",
        "model_name": "Tuna", "model_author": "the team", "output_dir": folder / "out", "learning_rate": 1e-3,
        "val_size": 0.1, "eval_strategy": "steps", **changes,
    }  # fmt: skip
    return [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]


def test_a_file_is_trained_and_its_model_loads(model: Path, command_line: CommandLine, tmp_path: Path) -> None:
    """One start, of ranks of the pool; processes of their own, and the other stages, are in the test of all stages."""
    loaded = load(None, words(model, tmp_path, tensor_model_parallel_size=2, sequence_parallel=True))
    (tmp_path / "rehearsal").mkdir()
    rehearsal = Rehearsal(loaded.for_world(8), 8, None, tmp_path / "rehearsal", lambda line: None)
    rehearsal.run({stages.TRAIN: stages.train, stages.FINAL: stages.load_final})
    found = {one.stage: one for one in rehearsal.outcomes}
    assert [one.verdict for one in found.values()] == [Verdict.PASS] * 6, rehearsal.outcomes
    assert "6 steps" in found[stages.TRAIN].found
    assert "2 evaluations" in found[stages.TRAIN].found
    assert "Qwen3ForCausalLM" in found[stages.FINAL].found
    changed = {change.key: change for change in rehearsal.changes}
    assert changed["layout"].was == "tp2 dp4 sp"
    assert changed["layout"].now == "tp2 dp2 sp"
    assert "tokenizer" not in changed
    assert not (tmp_path / "out").exists()


@pytest.mark.extended
def test_all_stages_of_a_file(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept"
    settings = words(
        model, tmp_path, finetuning_type="lora", lora_rank=4, merge_lora=True, tensor_model_parallel_size=2
    )
    assert main(["rehearse", "--gpus", "2", "--keep", str(folder), *settings]) == 0
    printed = capfd.readouterr().out
    assert "9 passed" in printed
    assert "are bitwise equal to those of an uninterrupted run" in " ".join(printed.split())
    assert "merged, its logits are within" in printed
    assert (folder / "whole" / "merged" / "config.json").is_file()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "gpus"), [("moe/qwen3_moe_full", 8), ("vision/qwen2_vl_full", 8), ("vision/qwen3_vl_8b_32gpu", 32)]
)
def test_a_published_file(name: str, gpus: int, tmp_path: Path) -> None:
    """As it is; its model is on no machine of ours, and only its data is other. The disk may well be too small."""
    data = written_data(tmp_path)
    words = [f"dataset_dir={data}", f"output_dir={tmp_path / 'out'}", "--json", str(tmp_path / "report.json")]
    main(["rehearse", str(EXAMPLES / f"{name}.yaml"), "--gpus", str(gpus), *words])
    report = json.loads((tmp_path / "report.json").read_text())
    verdicts = {act["act"]: act["verdict"] for act in report["acts"]}
    del verdicts[DISK]
    assert verdicts.pop(TEMPLATE) == "not rehearsable"  # its tokenizer is not here
    assert set(verdicts.values()) == {"passed"}, report
    assert len(verdicts) == 7


def written_data(folder: Path) -> Path:
    """Data sets under the names of the published files."""
    Image.new("RGB", (150, 200), "red").save(folder / "red.jpg")
    asked = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}. " * (n % 5 + 1)} for n in range(48)]
    seen = [
        {"messages": [{"role": "user", "content": f"<image>Is it {n}?"}, {"role": "assistant", "content": f"{n}" * 9}],
         "images": ["red.jpg"]}
        for n in range(16)
    ]  # fmt: skip
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    media = {"file_name": "seen.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    info = {"alpaca_en_demo": {"file_name": "asked.json"}, "llava_1k_en": media, "mllm_demo": media}
    for file, content in (("asked", asked), ("seen", seen), ("dataset_info", info)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def logged(folder: Path, *steps: tuple[int, float | None, float | None, int]) -> Path:
    """A run's metrics.jsonl, of (step, loss, grad_norm, tokens)."""
    folder.mkdir()
    names = ("step", "loss", "grad_norm", "num_tokens")
    lines = (json.dumps(dict(zip(names, each, strict=True))) for each in steps)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_a_number_that_differs_is_found(tmp_path: Path) -> None:
    one = logged(tmp_path / "one", (1, 2.0, 0.5, 10), (2, 1.0, 0.25, 12))
    other = logged(tmp_path / "other", (1, 2.0, 0.5, 10), (2, 1.0000001, 0.25, 12))
    fewer = logged(tmp_path / "fewer", (1, 2.0, 0.5, 11))
    assert not different_steps(one, one, ("loss", "grad_norm"))
    assert different_steps(one, other, ("loss", "grad_norm")) == ["loss of step 2: 1.0 and 1.0000001"]
    assert largest_difference(one, other) == pytest.approx(1e-7)
    assert different_rows(one, fewer, first=1) == ["steps [1, 2] and [1]", "num_tokens of step 1: 10 and 11"]
    assert not different_rows(one, other, first=1)


def test_a_loss_that_is_no_number_is_found(tmp_path: Path) -> None:
    one, broken = logged(tmp_path / "one", (1, 2.0, 0.5, 10)), logged(tmp_path / "broken", (1, None, 0.5, 10))
    assert not_finite(broken) == ["loss of step 1"]
    assert not not_finite(one)
    assert largest_difference(one, broken) == float("inf")


def test_steps_that_were_skipped_are_no_numbers_that_are_missing(tmp_path: Path) -> None:
    one = logged(tmp_path / "one", (1, 2.0, None, 10), (2, 2.0, 0.5, 10))
    records = [{**json.loads(line), "num_skipped": 0} for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert not_finite(one) == ["grad_norm of step 1"]
    records[0]["num_skipped"] = 1
    (one / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert not not_finite(one)
    assert list(trained_steps(one)) == [2]


def test_a_tensor_that_differs_is_found(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3), "b": torch.ones(2)}
    for name, bit in (("one", 0.0), ("same", 0.0), ("other", 2.0**-140)):
        (tmp_path / name).mkdir()
        save_file({**tensors, "a": tensors["a"] + bit}, tmp_path / name / "model.safetensors")
    assert different_tensors(tmp_path / "one", tmp_path / "same") == (2, [])
    assert different_tensors(tmp_path / "one", tmp_path / "other") == (2, ["model.safetensors: a"])


def test_ranks_end_when_they_are_killed_and_at_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    target, begun = "rehearse_targets:sleep", tmp_path / "begun"
    payload = {"folder": str(tmp_path)}
    killed = run_local(target, payload, 1, tmp_path / "killed", limit=300, kill_when=begun.exists)
    assert killed.killed
    assert killed.code == ExitCode.PROCESS_DIED
    assert "SIGKILL" in str(killed.findings[0])
    began = time.monotonic()
    late = run_local(target, payload, 1, tmp_path / "late", limit=1)
    assert late.code == ExitCode.PROCESS_DIED
    assert late.findings[0].what == "not done within 1 s"
    assert time.monotonic() - began < 200
