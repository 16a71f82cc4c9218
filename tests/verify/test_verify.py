"""`megatune verify`, as a user runs it: real processes, real checkpoints."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatune.cli import verify as verb
from megatune.config.settings import ParallelSettings, Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.compare import Difference
from megatune.verify.run import verify_layout
from megatune.verify.samples import random_samples

LIMIT = 240  # seconds; the machine may be busy with others' tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return make_checkpoint("qwen3", folder, num_layers=2, hidden_size=32, vocab_size=300, max_position_embeddings=64)


def verify(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatune", "verify", *map(str, words)]
    # Wide enough that the table breaks no name.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)


def test_good_layout_passes(model):
    ended = verify(
        model, "--tensor_model_parallel_size", "2", "sequence_parallel=true", "--samples", "2", "--length", "8"
    )
    assert ended.returncode == 0, ended.stderr
    assert "tp 2, sequence parallel, float32, 2 rows of 6 to 8 tokens" in ended.stdout
    assert "logits" in ended.stdout
    assert "loss" in ended.stdout
    assert "FAIL" not in ended.stdout
    # 11 tensors a layer, the embedding and the last norm (tied), and three totals.
    assert "PASS: all 27 are within their tolerance" in ended.stdout
    assert "14 more parameters are closer than these" in ended.stdout


def test_bf16_passes_and_verbose_shows_every_parameter(model):
    ended = verify(model, "--bf16", "--verbose", "--samples", "2", "--length", "16")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "one process, bfloat16" in ended.stdout
    assert ended.stdout.count("gradient of ") == 24


def test_changed_weight_is_found(model, tmp_path, capsys):
    """One element of one weight of the engine's checkpoint differs from what Transformers loads."""
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    world = World(nnodes=1, node_rank=0, nproc_per_node=2, master_addr=LOOPBACK, master_port=find_free_port())
    settings = Settings(parallel=ParallelSettings(tensor_model_parallel_size=2))
    verdict = verify_layout(changed, settings, random_samples(300, [8, 6]), world, reference_dir=model)
    failed = {one.name for one in verdict.differences if not one.passes}
    assert {"logits", "loss", "gradient"} <= failed
    assert verb.show(verdict.differences) == ExitCode.DIFFERENT == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("error", [math.nan, math.inf, 2e-5])
def test_one_wrong_gradient_is_enough(error, capsys):
    differences = [
        Difference("logits", 0.0, 1e-4),
        Difference("model.norm.weight", 0.0, 1e-5),
        Difference("lm_head.weight", error, 1e-5),
    ]
    assert verb.show(differences) == ExitCode.DIFFERENT
    assert "FAIL: 1 of 3 differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], ExitCode.INPUT, "no folder 'nowhere'"),
        (["{model}", "--tensor_model_parallel_size", "3"], ExitCode.SETTINGS, "write tensor_model_parallel_size: 2"),
        (
            ["{model}", "--pipeline_model_parallel_size", "4"],
            ExitCode.SETTINGS,
            "write pipeline_model_parallel_size: 2",
        ),
        (["{model}", "sequence_parallel=true"], ExitCode.SETTINGS, "remove sequence_parallel"),
        (["{model}", "--tensor_parallel", "2"], ExitCode.SETTINGS, "unknown setting 'tensor_parallel'"),
        (["{model}", "--learning_rate", "1"], ExitCode.SETTINGS, "learning_rate has no part in verify"),
        (["{model}", "--length", "65"], ExitCode.SETTINGS, "--length 64 or less"),
        (["{model}", "--samples", "0"], ExitCode.SETTINGS, "--samples 1 or more"),
        ([], ExitCode.SETTINGS, "which checkpoint?"),
    ],
)
def test_mistakes_are_named_before_any_process_starts(model, words, code, said):
    ended = verify(*(word.format(model=model) for word in words))
    assert ended.returncode == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_checkpoint_that_lacks_a_tensor_is_named(model, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(model, lacking)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    ended = verify(lacking, "--samples", "2", "--length", "8")
    assert ended.returncode == ExitCode.INPUT
    assert "model.norm.weight" in ended.stderr
    assert "Traceback" not in ended.stderr
