"""`megatune verify`: one run as a user starts it, and what it finds in the pool of ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from pool_launch import CommandLine, Ended
from safetensors.torch import load_file, save_file

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import ParallelSettings, PrecisionSettings, RecomputeSettings, Settings
from megatune.data.rows import IGNORE_INDEX
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.families import load_architecture
from megatune.families.scores import as_saved
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.results import Difference, Errors, check_layouts
from megatune.verify.run import Verdict, show, verify_layout, verify_layouts
from megatune.verify.samples import random_media, random_samples

LIMIT = 240  # seconds; the machine may be busy with others' tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return make_checkpoint("qwen3", folder, num_layers=2, hidden_size=32, vocab_size=300, max_position_embeddings=64)


def verify_in_a_process(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatune", "verify", *map(str, words)]
    # Wide enough that the table breaks no name.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)


@pytest.fixture
def verify(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("COLUMNS", "160")
    return partial(command_line, "verify")


def test_a_user_starts_it(model):
    """Each side computes in processes of its own."""
    ended = verify_in_a_process(model, "--samples", "2", "--length", "8")
    assert ended.returncode == 0, ended.stderr
    assert "one process, float32, 2 rows of 6 to 8 tokens" in ended.stdout
    assert "PASS: all 27 are within their tolerance" in ended.stdout


WORDS = ("--tensor_model_parallel_size", "2", "sequence_parallel=true", "--samples", "2", "--length", "8")


@pytest.mark.extended  # one process above, and ranks that are started together in tests/launch and tests/training
def test_a_user_starts_several_ranks(model):
    ended = verify_in_a_process(model, *WORDS)
    assert ended.returncode == 0, ended.stderr
    assert "PASS: all 27 are within their tolerance" in ended.stdout


def test_good_layout_passes(verify, model):
    ended = verify(model, *WORDS)
    assert ended.returncode == 0, ended.stderr
    assert "tp 2, sequence parallel, float32, 2 rows of 6 to 8 tokens" in ended.stdout
    assert "logits" in ended.stdout
    assert "loss" in ended.stdout
    assert "FAIL" not in ended.stdout
    # 11 tensors a layer, the embedding and the last norm (tied), and three totals.
    assert "PASS: all 27 are within their tolerance" in ended.stdout
    assert "14 more parameters have smaller errors" in ended.stdout


@pytest.mark.parametrize("count", [1, 3])
def test_a_reward_model_and_a_classifier_are_verified(verify, model, tmp_path, count):
    """And a language model with an adapter that has their scores."""
    folder = shutil.copytree(model, tmp_path / "reward")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(as_saved(config, "Qwen3ForSequenceClassification", config["pad_token_id"], count))
    )
    tensors["score.weight"] = torch.randn(count, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ended = verify(folder, "--tensor_model_parallel_size", "2", "sequence_parallel=true", "--length", "8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS: all 28 are within their tolerance" in ended.stdout
    selection = FinetuningSettings(finetuning_type="lora", lora_rank=4)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_random_adapter(adapter, folder, load_architecture(folder), selection, seed=7)
    ended = verify(model, "--adapter_name_or_path", adapter, "packing=true", "--length", "8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # A and B of seven matrices a layer, the score, and three totals.
    assert "PASS: all 32 are within their tolerance" in ended.stdout


def test_pictures_are_verified_in_a_vision_language_model(verify, tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model", num_layers=3, hidden_size=32, max_position_embeddings=100)
    ended = verify(folder, "--tensor_model_parallel_size", "2", "sequence_parallel=true", "--samples", "4")
    assert ended.returncode == 0, ended.stderr
    assert "4 rows of 56 to 90 tokens, 3 images, 1 video" in ended.stdout
    assert "PASS: all " in ended.stdout
    refused = verify(folder, "--length", "80")
    assert refused.returncode == ExitCode.SETTINGS
    assert "--length 80, with 26 tokens of images and videos, is more than the model's 100 positions" in refused.stderr
    assert "fix: --length 74 or less" in refused.stderr


def test_pictures_are_those_of_each_family(tmp_path):
    """Each frame of a video is behind its time where the family has it so; text is before and behind pictures."""
    for family, blocks in (("qwen2_5_vl", 1), ("qwen3_vl", 3)):
        vision = load_architecture(make_checkpoint(family, tmp_path / family)).vision
        *_, sample = random_samples(400, [9] * 4, media=random_media(4, vision), vision=vision)
        assert sample.input_ids.count(vision.vision_start_token_id) == blocks
        assert sample.input_ids.count(vision.video_token_id) == 3 * 4 * 2
        assert vision.image_token_id not in sample.input_ids
        media = [place for place, token in enumerate(sample.input_ids) if token == vision.video_token_id]
        assert media[0] > 0
        assert media[-1] + 2 < len(sample.input_ids)
        assert all(sample.labels[place] == IGNORE_INDEX for place in media)


def test_bf16_passes_and_verbose_shows_every_parameter(verify, model):
    ended = verify(model, "--bf16", "--verbose", "--samples", "2", "--length", "16")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "one process, bfloat16" in ended.stdout
    assert ended.stdout.count("gradient of ") == 24


@pytest.fixture(scope="module")
def changed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with one element of one weight changed."""
    folder = tmp_path_factory.mktemp("models") / "changed"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def world(size: int) -> World:
    return World(nnodes=1, node_rank=0, nproc_per_node=size, master_addr=LOOPBACK, master_port=find_free_port())


TP2 = Settings(parallel=ParallelSettings(tensor_model_parallel_size=2))
SAMPLES = random_samples(300, [8, 6])


@pytest.mark.usefixtures("command_line")
def test_changed_weight_is_found_and_located(model, changed, capsys):
    """The engine's checkpoint differs from what Transformers loads."""
    verdict = verify_layout(changed, TP2, SAMPLES, world(2), reference_dir=model)
    failed = {one.name for one in verdict.differences if not one.passes}
    assert {"logits", "loss", "gradient"} <= failed
    assert show(verdict) == ExitCode.DIFFERENT == 1
    shown = capsys.readouterr().out
    assert "the first difference arises at: layer 1 MLP (most of it in row " in shown
    before, here = (line for line in shown.splitlines() if "    layer 1 " in line)
    assert "layer 1 attention" in before
    assert "<-" not in before
    assert here.endswith("<- more than 1.0e-05")
    assert "FAIL" in shown


@pytest.mark.usefixtures("command_line")
def test_changed_weight_is_located_between_two_layouts(model, changed, capsys):
    verdict = verify_layouts(model, TP2, world(2), Settings(), world(1), SAMPLES, against_dir=changed)
    assert show(verdict) == ExitCode.DIFFERENT
    assert "the first difference arises at: layer 1 MLP" in capsys.readouterr().out


@pytest.mark.usefixtures("command_line")
def test_two_layouts_round_alike(model, capsys):
    precision = PrecisionSettings(bf16=True)
    settings = TP2.model_copy(update={"precision": precision})
    verdict = verify_layouts(model, settings, world(2), Settings(precision=precision), world(1), SAMPLES)
    assert all(0 < one.tolerance < 0.2 for one in verdict.differences)  # some percent, as bf16 rounds
    assert show(verdict) == ExitCode.DONE
    assert "within their tolerance" in capsys.readouterr().out


@pytest.mark.usefixtures("command_line")
def test_recomputing_changes_nothing(model, capsys):
    settings = Settings(
        precision=PrecisionSettings(bf16=True), recompute=RecomputeSettings(recompute_granularity="full")
    )
    alone = Settings(precision=PrecisionSettings(bf16=True))
    verdict = verify_layouts(model, settings, world(1), alone, world(1), SAMPLES)
    assert {one.error for one in verdict.differences} == {0.0}
    assert show(verdict) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert " 0.0 " in shown
    assert "PASS: all 27 are exactly equal" in shown


def test_against_another_layout(verify, model):
    ended = verify(
        *(model, "--tensor_model_parallel_size", "2", "--packing", "--samples", "3", "--length", "8"),
        *("--against", "pipeline_model_parallel_size=2 virtual_pipeline_model_parallel_size=2"),
    )
    assert ended.returncode == ExitCode.SETTINGS  # two layers are too few
    ended = verify(
        *(model, "--tensor_model_parallel_size", "2", "--packing", "--samples", "3", "--length", "8"),
        *("--against", "--pipeline_model_parallel_size 2 num_processes=4"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{model}: tp 2, packed against pp 2, dp 2, float32, 3 rows of 6 to 8 tokens" in ended.stdout
    assert "PASS: all 27 are within their tolerance" in ended.stdout


def errors(size: float) -> Errors:
    return Errors(logits=size, loss=0.1 * size, gradient=size, gradients={"lm_head.weight": size}, loss_reach=size)


@pytest.mark.parametrize(
    ("ratio", "failed"),
    [(1.4, set()), (1.6, {"logits", "gradient"}), (2.1, {"logits", "gradient", "lm_head.weight"})],
)
def test_neither_of_two_layouts_rounds_much_worse(ratio, failed):
    for pair in ((errors(1e-3), errors(ratio * 1e-3)), (errors(ratio * 1e-3), errors(1e-3))):
        assert {one.name for one in check_layouts(*pair) if not one.passes} == failed


@pytest.mark.parametrize("error", [math.nan, math.inf, 2e-5])
def test_one_wrong_gradient_is_enough(error, capsys):
    differences = [
        Difference("logits", 0.0, 1e-4),
        Difference("model.norm.weight", 0.0, 1e-5),
        Difference("lm_head.weight", error, 1e-5),
    ]
    assert show(Verdict(differences)) == ExitCode.DIFFERENT
    assert "FAIL: 1 of 3 differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], ExitCode.INPUT, "no folder 'nowhere'"),
        (
            ["{model}", "--tensor_model_parallel_size", "3"],
            ExitCode.SETTINGS,
            "--tensor_model_parallel_size: tensor_model_parallel_size 3 does not split",
        ),
        (
            ["{model}", "--pipeline_model_parallel_size", "4"],
            ExitCode.SETTINGS,
            "write pipeline_model_parallel_size: 2",
        ),
        (["{model}", "sequence_parallel=true"], ExitCode.SETTINGS, "remove sequence_parallel"),
        (["{model}", "--tensor_parallel", "2"], ExitCode.SETTINGS, "unknown setting 'tensor_parallel'"),
        (["{model}", "--learning_rate", "1"], ExitCode.SETTINGS, "learning_rate has no effect in verify"),
        (["{model}", "moe_aux_loss_coeff=0.01"], ExitCode.SETTINGS, "moe_aux_loss_coeff 0.01 changes the results"),
        (["{model}", "moe_expert_capacity_factor=2"], ExitCode.SETTINGS, "another layout that also has it: --against"),
        (["{model}", "--rope_scaling", "yarn"], ExitCode.SETTINGS, "rope_scaling yarn without a factor"),
        (["{model}", "--manual_gc"], ExitCode.SETTINGS, "manual_gc has no effect in verify"),
        (["{model}", "--bf16", "--against", "fp16=true"], ExitCode.SETTINGS, "fp16 is the same in both layouts"),
        (["{model}", "--against", "seed=1"], ExitCode.SETTINGS, "--against: seed is the same in both layouts"),
        (["{model}", "--against", "other"], ExitCode.SETTINGS, "--against: 'other' is not a setting"),
        (["{model}", "--against", "'"], ExitCode.SETTINGS, "No closing quotation"),
        (["{model}", "--against", "tp=2"], ExitCode.SETTINGS, "--against: unknown setting 'tp'"),
        (["{model}", "--against", "cutoff_len=9"], ExitCode.SETTINGS, "--against: cutoff_len has no effect in verify"),
        (
            ["{model}", "--against", "tensor_model_parallel_size=3"],
            ExitCode.SETTINGS,
            "--against: tensor_model_parallel_size 3",
        ),
        (["{model}", "--length", "65"], ExitCode.SETTINGS, "--length 64 or less"),
        (["{model}", "--samples", "0"], ExitCode.SETTINGS, "write --samples 1"),
        ([], ExitCode.SETTINGS, "no checkpoint is given"),
    ],
)
def test_mistakes_are_named_before_any_process_starts(verify, model, words, code, said):
    ended = verify(*(word.format(model=model) for word in words))
    assert ended.returncode == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_checkpoint_that_lacks_a_tensor_is_named(verify, model, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(model, lacking)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    ended = verify(lacking, "--samples", "2", "--length", "8")
    assert ended.returncode == ExitCode.INPUT
    assert "model.norm.weight" in ended.stderr
    assert "Traceback" not in ended.stderr
