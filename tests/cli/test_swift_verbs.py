"""The command lines of Megatron-SWIFT as its users type them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from pool_launch import CommandLine

from megatune.cli.main import main
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.training.start import prepare_devices

# The published quick start of version 3.4; only model, data, lengths and numbers of steps are others.
QUICK_START = """sft --load {model} --dataset {data}#40 {data}#20 --tensor_model_parallel_size 2
--sequence_parallel true --micro_batch_size 4 --global_batch_size 16 --recompute_granularity selective --train_iters 3
--eval_iters 5 --finetune true --cross_entropy_loss_fusion true --lr 1e-5 --lr_warmup_iters 1 --min_lr 1e-6 --save {out}
--save_interval 100 --max_length 128 --num_workers 0 --no_save_optim true --no_save_rng true --dataset_num_proc 1
--model_author swift --model_name swift-robot"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
            for n in range(60)]  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": make_checkpoint("qwen3", tmp_path / "model"), "data": data, "out": tmp_path / "out"}


def test_the_published_quick_start_trains_on_two_processes(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    before = dict(os.environ)
    prepare_devices(before, use_cpu=False)
    words = [*QUICK_START.format(**files).split(), "--system", "You are a helpful assistant."]
    ended = command_line("megatron", *words)
    assert ended.returncode == 0, ended
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("swift      version 3 ")
    assert any("--load" in line and "a Hugging Face model" in line for line in lines)
    assert any("--eval_iters 5" in line and "ignored: " in line for line in lines)
    assert any("(adam_beta2 0.95)" in line for line in lines)
    assert "step 3/3" in ended.stdout
    settings = load(files["out"] / "run.yaml").require_valid(world_size=2)
    assert settings.run.num_processes == 2
    assert settings.batch.gradient_accumulation_steps == 4
    assert settings.precision.fp16  # of a model in float32, as there
    assert settings.data.default_system == "You are a helpful assistant."
    assert dict(os.environ) == before


def test_verbs_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["swift", "sft"], "fix: `megatune megatron sft`"),
        (["swift", "infr"], "fix: did you mean `megatune swift infer`?"),
        (["megatron", "infer"], "one of: sft, pt, rlhf, export"),
    ):
        assert main(words) == ExitCode.SETTINGS
        assert said in capsys.readouterr().err
    assert main(["megatron", "sft", "--help"]) == 0
    assert "megatune megatron sft --model" in capsys.readouterr().out


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--lrr", "1", "--tp_comm_overlap", "--tensor_model_parallel_size", "2", "--output_dir"]
    assert main(["megatron", "sft", *words, str(tmp_path / "out")]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    for expected in (
        "unknown flag --lrr",
        "did you mean --lr?",
        "tp_comm_overlap: true is not supported",
        "train_iters is missing",
        "--model is missing",
        "write NPROC_PER_NODE=2 before the command",
    ):
        assert expected in said
    assert not (tmp_path / "out").exists()


def test_of_a_command_line_for_ray_nothing_else_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["megatron", "rlhf", "--use_ray", "true", "--config", "ray.yaml"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "use_ray: true is not supported" in said
    assert "config: ray.yaml is not supported" in said
    assert "missing" not in said


def test_models_that_are_missing_are_named_by_their_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}\n')
    flags = f"--dataset {rows} --train_iters 2 --use_vllm false --output_dir {tmp_path}/out"
    words = f"--rlhf_type gkd --model {tmp_path}/m --teacher_model {tmp_path}/t {flags}"
    assert main(["megatron", "rlhf", *words.split()]) == ExitCode.INPUT
    said = capsys.readouterr().err
    assert f"--model: no folder '{tmp_path}/m'" in said
    assert f"--teacher_model: no folder '{tmp_path}/t'" in said
    flags = f"--dataset {rows} --train_iters 2 --output_dir {tmp_path}/out"
    assert main(["megatron", "sft", "--model", f"{tmp_path}/m", *flags.split()]) == ExitCode.INPUT
    assert f"--model: no folder '{tmp_path}/m'" in capsys.readouterr().err


def test_export_takes_what_it_reads_and_says_what_it_leaves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "export.yaml"
    path.write_text(f"model: {tmp_path}/none\nexist_ok: TRUE\nENV:\n  USE_HF: 1\n")
    words = ["--to_ollama", "true", "--pipeline_model_parallel_size", "2", "--quant_method", "awq"]
    assert main(["swift", "export", str(path), *words]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "to_ollama: true is not supported" in said
    assert "quant_method: awq is not supported" in said


def test_shims_run_as_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["shims", str(tmp_path)]) == 0
    assert "not in PATH" in capsys.readouterr().out
    assert main(["shims", str(tmp_path)]) == 0  # ours are written again
    ended = subprocess.run([tmp_path / "swift", "sft"], capture_output=True, text=True)
    assert ended.returncode == ExitCode.SETTINGS
    assert "`megatune megatron sft`" in ended.stderr
    (tmp_path / "swift").write_text("another program's")
    assert main(["shims", str(tmp_path)]) == ExitCode.CANNOT_WRITE
    assert "swift is another program" in capsys.readouterr().err
    assert main(["shims", str(tmp_path), "--remove"]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["swift"]
