"""T41 and T48: layouts that do not divide, and lines of a settings file that nobody can mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatune.config.dialects.swift import read_swift
from megatune.config.load import load
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import read_architecture

Tell = Callable[..., None]
_BASE = "stage: sft\nmodel_name_or_path: MODEL\ndataset: a\noutput_dir: out\n"
_EXPERTS = {
    "model_type": "qwen3_moe", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 512, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "max_position_embeddings": 4096, "rope_theta": 1e6,
}  # fmt: skip
# Lines of which the first has what does not divide.
LAYOUTS = (
    "tensor_model_parallel_size: 8\nsequence_parallel: true",
    "pipeline_model_parallel_size: 8",
    "expert_model_parallel_size: 4",
    "virtual_pipeline_model_parallel_size: 4\npipeline_model_parallel_size: 2\ngradient_accumulation_steps: 2",
)


def told_of(text: str, folder: Path, world_size: int = 8) -> tuple[tuple[Finding, ...], float]:
    """What is said of a file beside a model of six layers, twelve heads and six experts, and after how long."""
    path = folder / "run.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(MegatuneError) as caught:
        load(path).require_valid(read_architecture(_EXPERTS, "config.json"), world_size)
    assert caught.value.exit_code == ExitCode.SETTINGS
    return caught.value.findings, time.monotonic() - began


@pytest.mark.parametrize("lines", LAYOUTS)
def test_what_does_not_divide_is_told_with_what_does(lines: str, tmp_path: Path, told: Tell) -> None:
    findings, seconds = told_of(_BASE + lines + "\n", tmp_path)
    name = lines.partition(":")[0]
    (finding,) = findings
    assert finding.where == f"{tmp_path / 'run.yaml'}:5"
    assert f"{name}: " in finding.fix
    # Whoever does what is said is told of it no more.
    fixed = finding.fix[finding.fix.index(f"{name}: ") :].split(" or ")[0].split(",")[0]
    again = load(_written(tmp_path, f"{_BASE}{fixed}\n{lines.partition(chr(10))[2]}\n"))
    assert not [each for each in again.check(read_architecture(_EXPERTS, "c"), 8) if each.what == finding.what]
    told(case="T41", fault=lines.split("\n")[0], got=f"{finding.what}; fix: {finding.fix}", seconds=seconds)


def _written(folder: Path, text: str) -> Path:
    path = folder / "fixed.yaml"
    path.write_text(text)
    return path


def test_a_batch_that_the_ranks_do_not_divide(tmp_path: Path, told: Tell) -> None:
    """Of Megatron-SWIFT's global_batch_size, which is a number of rows."""
    flags = "--model MODEL --dataset a --save out --global_batch_size 12 --micro_batch_size 2"
    loaded = read_swift("sft", flags.split(), env={"NPROC_PER_NODE": "4"}).loaded
    (finding,) = [each for each in loaded.check(world_size=4) if "global_batch_size" in each.what]
    assert "8 or 16" in finding.fix
    told(case="T41", fault="a global batch that the ranks do not divide", got=f"{finding.what}; fix: {finding.fix}")


def test_lines_that_nobody_can_mean(tmp_path: Path, told: Tell) -> None:
    """All of them at once, each with its line; what can only be meant one way is taken so."""
    text = _BASE + 'lerning_rate: 1e-5\nseed: many\nwarmup_ratio: "1e-1"\ncutoff_len: 10\ncutoff_len: 20\n'
    findings, seconds = told_of(text, tmp_path)
    path = tmp_path / "run.yaml"
    said = {each.where: f"{each.what}; {each.fix}" for each in findings}
    assert "did you mean learning_rate?" in said[f"{path}:5"]
    assert "seed is 'many'" in said[f"{path}:6"]
    assert "cutoff_len is written twice" in said[f"{path}:9"]
    assert len(said) == 3  # "1e-1" is a number
    tabbed, _ = told_of("stage: sft\ndataset:\n\t- a\n", tmp_path)
    assert [(each.where, each.what) for each in tabbed] == [(f"{path}:3", "a tab where YAML allows only spaces")]
    got = f"run.yaml:5: {said[f'{path}:5']}"
    told(case="T48", fault="a misspelt key, text for a number, a key twice, a tab", got=got, seconds=seconds)
