"""What the tests of the engine, the bridge and the proof share: a pool of ranks, and tiny checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short enough that rows of the tests are longer: every branch of the scaling is computed with.
    "original_max_position_embeddings": 16,
}
# Odd on purpose: tp divides no vocabulary, heads are not hidden / heads wide, tp 4 exceeds the key/value heads.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 301,
    "max_position_embeddings": 128,
    # Wide enough that attention is far from uniform: a wrong position or mask must show.
    "initializer_range": 0.125,
}

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks."""
    ranks = RankPool(8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """model_dir("qwen3", tied=True, vocab_size=130): a checkpoint as Transformers saves it, made once a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(model_type: str, *, tied: bool = False, max_shard_size: str = "5GB", **sizes: Any) -> Path:
        key = (model_type, tied, max_shard_size, *sorted(sizes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            _save_random_model(made[key], model_type, max_shard_size, {"tie_word_embeddings": tied, **sizes})
        return made[key]

    return make


def _save_random_model(folder: Path, model_type: str, max_shard_size: str, sizes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    rope = {"rope_parameters": LLAMA3_ROPE} if model_type == "llama" else {}
    config = AutoConfig.for_model(model_type, **{**SIZES, **rope, **sizes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are 1 and biases 0 at first: nothing would show that they are used
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
