"""Parameters and operations, against the models that Transformers builds and against sums by hand."""

from __future__ import annotations

import pytest

from megatune.families import FAMILIES
from megatune.plan.flops import num_matmul_parameters, num_parameters, train_flops

_DENSE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
}  # fmt: skip
_SPARSE = _DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "config", [_DENSE, _DENSE | {"tie_word_embeddings": True}, _SPARSE], ids=["dense", "tied", "sparse"]
)
def test_parameters_are_those_that_transformers_builds(config: dict) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert num_parameters(FAMILIES[config["model_type"]].architecture(config)) == model.num_parameters()


def test_a_token_is_multiplied_with_its_own_experts_only() -> None:
    attention = 32 * (64 + 32 + 32) + 64 * 32
    dense, sparse = 3 * 32 * 48, 8 * 32 + 2 * 3 * 32 * 24
    architecture = FAMILIES["qwen3_moe"].architecture(_SPARSE)
    assert num_matmul_parameters(architecture) == 2 * attention + dense + sparse + 100 * 32


def test_documents_attend_to_themselves() -> None:
    architecture = FAMILIES["qwen3"].architecture(_DENSE)
    matmuls = 6 * num_matmul_parameters(architecture)
    assert train_flops(architecture, [10, 6]) == 16 * matmuls + 6 * 2 * 64 * (10**2 + 6**2)
