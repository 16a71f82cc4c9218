"""Weights of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

from megatune.architecture import Architecture
from megatune.families.dense import ENGINE_LAYER, HF_LAYER
from megatune.families.weights import HFTensor, Layout, Weight

_HF = f"{HF_LAYER}.self_attn"
_ENGINE = f"{ENGINE_LAYER}.self_attention"


def _has_query_latent(architecture: Architecture) -> bool:
    return architecture.mla is not None and architecture.mla.q_lora_rank is not None


_QUERY = (
    Weight(
        f"{_ENGINE}.linear_q_proj.weight",
        Layout.ROWS,
        (HFTensor(f"{_HF}.q_proj.weight", ("query_size", "hidden_size")),),
        exists=lambda architecture: not _has_query_latent(architecture),
    ),
    Weight(
        f"{_ENGINE}.linear_q_down_proj.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_HF}.q_a_proj.weight", ("mla.q_lora_rank", "hidden_size")),),
        exists=_has_query_latent,
    ),
    Weight(
        f"{_ENGINE}.q_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_HF}.q_a_layernorm.weight", ("mla.q_lora_rank",)),),
        exists=_has_query_latent,
    ),
    Weight(
        f"{_ENGINE}.linear_q_up_proj.weight",
        Layout.ROWS,
        (HFTensor(f"{_HF}.q_b_proj.weight", ("query_size", "mla.q_lora_rank")),),
        exists=_has_query_latent,
    ),
)
_KEY_VALUE = (
    Weight(
        f"{_ENGINE}.linear_kv_down_proj.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_HF}.kv_a_proj_with_mqa.weight", ("latent_size", "hidden_size")),),
    ),
    Weight(
        f"{_ENGINE}.kv_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_HF}.kv_a_layernorm.weight", ("mla.kv_lora_rank",)),),
    ),
    Weight(
        f"{_ENGINE}.linear_kv_up_proj.weight",
        Layout.ROWS,
        (HFTensor(f"{_HF}.kv_b_proj.weight", ("latent_key_value_size", "mla.kv_lora_rank")),),
    ),
)
_OUTPUT = Weight(
    f"{_ENGINE}.linear_proj.weight",
    Layout.COLUMNS,
    (HFTensor(f"{_HF}.o_proj.weight", ("hidden_size", "attention_size")),),
)

LATENT_ATTENTION = (*_QUERY, *_KEY_VALUE, _OUTPUT)
