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

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    # Unequal: one part of the factor stretches cosine and sine, another one the scores.
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
# Of families with sizes of their own. Dense layers among sparse ones, at the start and in the middle.
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [2],
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_parameters": YARN_ROPE,
    },
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
        key = (model_type, tied, max_shard_size, repr(sorted(sizes.items())))
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
    config = AutoConfig.for_model(model_type, **{**SIZES, **FAMILY_SIZES.get(model_type, {}), **sizes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are 1 and biases 0 at first: nothing would show that they are used
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
