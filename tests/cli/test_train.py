"""`megatune train` as a user types it, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pool import RankPool
from pool_launch import CommandLine
from safetensors import safe_open

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint

DEMO = Path(__file__).parents[2] / "examples" / "demo"
LIMIT = 240.0  # seconds for one run; the machine may be busy with other tests

# LLaMA-Factory's Megatron example for 8 GPUs (contract, section 1), its sizes and names as published.
MCA_8_GPUS = """
stage: sft
do_train: true
finetuning_type: full  # only support full for now
template: qwen
cutoff_len: 4096
overwrite_cache: false
preprocessing_num_workers: 2
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
num_train_epochs: 1.0
learning_rate: 2.0e-5
lr_scheduler_type: cosine
bf16: true
ddp_timeout: 180000000
tensor_model_parallel_size: 4
sequence_parallel: true
pipeline_model_parallel_size: 2
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
"""

# LLaMA-Factory's Megatron example of a mixture of experts for 8 GPUs, its sizes and names as published.
MCA_8_GPUS_EXPERTS = """
do_train: true
stage: sft
finetuning_type: full  # only support full for now
preprocessing_num_workers: 2
cutoff_len: 4096
template: qwen3_nothink
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 2
learning_rate: 3e-6
logging_steps: 1
save_steps: 100
lr_scheduler_type: constant
bf16: true
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 4
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
expert_model_parallel_size: 2
recompute_granularity: full
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def run_file(model: Path, tmp_path: Path) -> Path:
    """Twelve steps with tp 2, a checkpoint after every third."""
    path = tmp_path / "run.yaml"
    values = {
        "model_name_or_path": str(model),
        "output_dir": str(tmp_path / "out"),
        "dataset_dir": str(DEMO),
        "dataset": "identity",
        "template": "qwen3_nothink",
        "model_name": "Tuna",
        "model_author": "the team",
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1.0e-3,
        "tensor_model_parallel_size": 2,
        "report_to": "none",
        "plot_loss": False,
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def start(*words: object, cache: Path, module: tuple[str, ...] = ("-m", "megatune")) -> subprocess.Popen[str]:
    env = {**os.environ, "MEGATUNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *module, *map(str, words)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def megatune(*words: object, cache: Path) -> tuple[int, str]:
    """Exit code and output of one command."""
    return finish(start(*words, cache=cache))


def lines_until(process: subprocess.Popen[str], beginning: str) -> Iterator[str]:
    """The output's lines up to the one that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if line.startswith(beginning):
            return
    pytest.fail(f"the run ended before {beginning!r}")


def tensors(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name).numpy().tobytes() for name in file.keys()})  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def whole(model: Path, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATUNE_CACHE", str(folder))
        ended = CommandLine(pool, patch)("train", _write_run_file(model, folder))
    assert ended.returncode == 0, ended
    return tensors(folder / "out")


def _write_run_file(model: Path, folder: Path) -> Path:
    return run_file.__wrapped__(model, folder)  # type: ignore[attr-defined,no-any-return]


def test_in_a_terminal_that_is_closed_it_saves_and_goes_on_later(
    run_file: Path,
    whole: dict[str, bytes],
    command_line: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The run that is stopped is one of processes of its own."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    process = start("train", run_file, cache=tmp_path)
    list(lines_until(process, "step 2/"))
    assert process.stdout is not None
    process.stdout.close()  # as `| head` does, too: by itself it ends nothing
    log = tmp_path / "out/launch/logs/rank-0.log"
    deadline = time.monotonic() + LIMIT
    while "step 4/" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.wait(LIMIT) == 75
    assert "stopped on request: checkpoint-" in log.read_text()
    workers = f"dataloader_num_workers={len(os.sched_getaffinity(0)) + 1}"  # torch warns of more than cores
    ended = command_line("train", run_file, workers)
    assert ended.returncode == 0, ended
    assert tensors(tmp_path / "out") == whole
    assert "dataloader_num_workers: null in the run before" in ended.stdout
    assert "This DataLoader" not in ended.stdout + ended.stderr
    # Once more, in a folder where all is done.
    ended = command_line("train", run_file, workers, "learning_rate=0.5")
    assert ended.returncode == 0, ended
    output = ended.stdout + ended.stderr
    told = output.index("changed    learning_rate: 0.001 in the run before, 0.5 now")
    assert told < output.index("12 steps done of 12, so nothing is left to train")
    assert tensors(tmp_path / "out") == whole


def test_torchrun_starts_the_same_run(run_file: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "megatune")
    code, output = finish(start("train", run_file, cache=tmp_path, module=torchrun))
    assert code == 0, output
    assert tensors(tmp_path / "out") == whole
    # Before the first step, and at the end; by one process of the two. The rest is in start.log.
    plans = [line for line in output.splitlines() if line.startswith("plan  ")]
    assert len(plans) == 2, output
    assert "GiB" in plans[0]
    assert " a step, was " in plans[1]
    details = (tmp_path / "out/start.log").read_text()
    assert "tp2 on 2 × cpu" in details
    assert details.count("\nplan  ") == 2


def test_the_published_file_for_8_gpus_runs_on_8_processes(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_checkpoint("qwen2", tmp_path / "qwen2")
    path = tmp_path / "qwen2_full.yaml"
    path.write_text(
        f"model_name_or_path: {model}\noutput_dir: {tmp_path}/out\ndataset_dir: {DEMO}\ndataset: identity\n"
        f"model_name: Tuna\nmodel_author: the team\n{MCA_8_GPUS}"
    )
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    ended = command_line("train", path, "max_steps=2")
    assert ended.returncode == 0, ended
    assert "tp 4 + sp × pp 2 × dp 1 on 8 ×" in ended.stdout
    assert "step 2/2" in ended.stdout


@pytest.mark.extended
def test_the_published_file_of_experts_for_8_gpus_runs_on_8_processes(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "qwen3_moe")
    path = tmp_path / "qwen3_moe_full.yaml"
    path.write_text(
        f"model_name_or_path: {model}\noutput_dir: {tmp_path}/out\ndataset_dir: {DEMO}\ndataset: identity\n"
        f"model_name: Tuna\nmodel_author: the team\n{MCA_8_GPUS_EXPERTS}"
    )
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    ended = command_line("train", path, "num_processes=8", "max_steps=3")
    assert ended.returncode == 0, ended
    assert "pp 4 × ep 2 × dp 2 on 8 ×" in ended.stdout
    assert "step 3/3" in ended.stdout


def test_everything_wrong_is_said_at_once_before_anything_starts(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, run_file: Path, tmp_path: Path
) -> None:
    with run_file.open("a") as file:
        file.write("lerning_rate: 1e-5\nlora_rank: 16\nsequence_parallel: maybe\n")
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path))
    code, _, output = command_line("train", run_file, "tensor_model_parallel_size=3", "warmup_ratio=2")
    assert code == 64
    for expected in (
        "lerning_rate",
        "learning_rate",
        "lora_rank",
        "maybe",
        "warmup_ratio",
        "4 attention heads",
        "run.yaml:16",
    ):
        assert expected in output, output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("written", "flags", "places"),
    [("", ["--stage", "kto"], ["--stage"]), ("stage: kto\n", [], ["run.yaml:16"]), ("", ["stage=dpo"], ["stage=dpo"])],
)
def test_a_stage_that_contradicts_the_verb_is_refused(
    written: str, flags: list[str], places: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_file.open("a") as file:
        file.write(written)
    assert main(["sft", str(run_file), "lerning_rate=1", *flags]) == 64
    said = capsys.readouterr().err
    assert all(f"{place}: stage " in said and "contradicts `megatune sft`" in said for place in places), said
    assert "did you mean learning_rate?" in said


def test_a_stage_is_an_override_of_train(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []
    monkeypatch.setattr("megatune.training.start.start", lambda loaded: stages.append(loaded.settings.run.stage) or 0)
    with run_file.open("a") as file:
        file.write("stage: kto\n")
    assert main(["train", str(run_file), "--stage", "dpo"]) == 0
    assert main(["kto", str(run_file)]) == 0
    assert main(["sft", str(run_file), "--stage", "sft"]) == 0
    assert main(["train", "--config", str(run_file), "seed=3"]) == 0
    assert main(["train", f"--config={run_file}", "--seed", "3"]) == 0
    assert stages == ["dpo", "kto", "sft", "kto", "kto"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "-c", "run.yaml", "seed=3"], "fix: megatune train run.yaml seed=3\n"),
        (["train", "--config_file", "a b.yaml"], "fix: megatune train 'a b.yaml'\n"),
        (["plan", "--gpus", "8", "--yaml=run.yaml"], "fix: megatune plan run.yaml --gpus 8\n"),
        (
            ["train", "run.yaml", "--config", "zero3.yaml"],
            "unexpected word 'zero3.yaml': the settings file is already 'run.yaml'",
        ),
        (["sft", "--config", "recipe"], "fix: megatune sft recipe\n"),
    ],
)
def test_files_named_as_other_tools_do_get_the_command_to_type(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 64
    assert says in capsys.readouterr().err


def test_data_without_one_usable_row_is_65(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"instruction": "hi"}\n{"instruction": 3, "output": "x"}\n')
    code, output = megatune("train", run_file, f"dataset={tmp_path}/bad.jsonl", cache=tmp_path)
    assert code == 65, output
    assert "bad.jsonl:1" in output
    assert "Traceback" not in output
