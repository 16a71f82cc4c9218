"""Layers of Transformer Engine: through Megatron-Core's wrappers around a stand-in, and on a GPU around the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from layouts import LAYOUTS
from model_sizes import tiny_config
from settings_gradients import run_with, worst_error
from transformer_engine_ranks import engine_name

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.groups.performance import PerformanceSettings
from megatune.config.settings import PrecisionSettings, Settings
from megatune.engine import device
from megatune.engine.layers import linear
from megatune.errors import ExitCode, MegatuneError
from megatune.families import read_architecture

HERE = Path(__file__).parent
# A bias of queries, keys and values, sequence parallelism; norms of heads, experts in some layers; norms of 1 + weight
# and behind both parts; sinks and biases of the output projection.
CASES = [("qwen2", "1"), ("qwen2", "tp2 sp"), ("qwen3_moe", "1"), ("gemma3_text", "1"), ("gpt_oss", "tp2 sp")]


def asking_for(impl: str, **groups) -> Settings:
    return Settings(performance=PerformanceSettings(transformer_impl=impl), **groups)


def architecture(family: str):
    return read_architecture(tiny_config(family).to_dict(), "config.json")


@pytest.mark.skipif(device.HAS_GPU, reason="the stand-in is for CPUs")
def test_models_of_its_layers_compute_the_same(model_dir):
    """Megatron-Core's own wrappers, the names of their parameters and the marks on them; not the package's kernels."""
    cases = [f"{model_dir(family)}={layout}" for family, layout in CASES]
    path = os.pathsep.join(map(str, (HERE, HERE.parent)))
    done = subprocess.run(
        [sys.executable, str(HERE / "transformer_engine_ranks.py"), *cases],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES)
    for (family, _), (error, losses, native_losses, used, native) in zip(CASES, answers, strict=True):
        assert error < 1e-5, family
        assert losses == pytest.approx(native_losses, rel=1e-6)
        assert used == ["TELayerNormColumnParallelLinear", "TERowParallelLinear"]
        assert native == []


@pytest.mark.skipif(
    not device.HAS_GPU or find_spec("transformer_engine") is None, reason="needs a GPU with Transformer Engine"
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma3_text"])
def test_models_of_the_package_compute_the_same_but_for_rounding(pool, model_dir, family):
    found, truth = (
        run_with(pool, model_dir(family), LAYOUTS["1"], {"transformer_impl": impl}, precision={"bf16": True})
        for impl in ("transformer_engine", "native")
    )
    renamed = [(loss, {engine_name(name): each for name, each in one.items()}, direct) for loss, one, direct in found]
    assert worst_error(renamed, truth) < 2**-4
    assert found[0][0] == pytest.approx(truth[0][0], rel=2**-8)


@pytest.mark.parametrize(
    ("has_gpu", "has_package", "reason"),
    [(False, True, "it has no kernels for a CPU"), (True, False, "the package transformer-engine is not installed")],
)
def test_a_machine_without_it_is_refused_by_name(monkeypatch, has_gpu, has_package, reason):
    monkeypatch.setattr(linear.device, "HAS_GPU", has_gpu)
    monkeypatch.setattr(linear, "find_spec", lambda name: has_package or None)
    qwen3 = architecture("qwen3")
    with pytest.raises(MegatuneError, match="transformer_impl transformer_engine is not available here") as refused:
        linear.require_transformer_engine(asking_for("transformer_engine"), qwen3)
    assert reason in str(refused.value)
    assert refused.value.exit_code is ExitCode.SETTINGS
    for impl in ("auto", "native"):
        linear.require_transformer_engine(asking_for(impl), qwen3)
        assert not linear.uses_transformer_engine(asking_for(impl), qwen3)
    assert reason in linear.describe(asking_for("auto"), qwen3)
    assert linear.describe(asking_for("native"), qwen3) == ""


@pytest.mark.parametrize(
    ("family", "groups", "reason"),
    [
        ("deepseek_v3", {}, "latent attention"),
        ("qwen3_next", {}, "gated delta nets"),
        ("olmo3", {}, "the norm before it"),
        ("qwen3", {"finetuning": FinetuningSettings(finetuning_type="lora")}, "adapters"),
        (
            "qwen3",
            {"precision": PrecisionSettings(bf16=True, fp8="rowwise")},
            "fp8 is supported by the engine's own layers only",
        ),
    ],
)
def test_what_its_layers_do_not_compute_is_left_to_the_engine(monkeypatch, family, groups, reason):
    monkeypatch.setattr(linear, "why_unavailable", lambda: "")
    assert linear.uses_transformer_engine(asking_for("auto"), architecture("qwen3"))
    assert not linear.uses_transformer_engine(asking_for("auto", **groups), architecture(family))
    assert reason in linear.describe(asking_for("auto", **groups), architecture(family))
    with pytest.raises(MegatuneError, match=reason):
        linear.require_transformer_engine(asking_for("transformer_engine", **groups), architecture(family))
