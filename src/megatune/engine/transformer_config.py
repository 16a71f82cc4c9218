"""Megatron-Core's configuration of a model in a layout."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatune.architecture import Architecture
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import ParallelSettings, Settings
from megatune.engine import device


def transformer_config(architecture: Architecture, settings: Settings) -> TransformerConfig:
    """Megatron-Core's configuration of this model in this layout."""
    kind = TransformerConfig if architecture.mla is None else MLATransformerConfig
    return kind(
        **_model(architecture),
        **_layout(settings.parallel, architecture.num_layers),
        **_computation(settings),
        **_recompute(settings.recompute),
    )


def _model(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_layernorm,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.add_qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": architecture.initializer_range,
        # Every weight is loaded, so none is drawn at random first.
        "perform_initialization": False,
    }


def _layout(parallel: ParallelSettings, num_layers: int) -> dict[str, Any]:
    virtual = parallel.virtual_stages
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": _pipeline_layout(parallel, num_layers),
        "sequence_parallel": parallel.sequence_parallel,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        # With virtual stages on two pipeline ranks a batch holds several messages between the same two ranks, which
        # gloo confuses; one by one they are exact.
        "overlap_p2p_comm": parallel.overlap_p2p_comm and virtual is not None,
        "batch_p2p_comm": virtual is None,
        "deallocate_pipeline_outputs": device.SENDS_HOLD_MEMORY,
    }


def _computation(settings: Settings) -> dict[str, Any]:
    performance, precision = settings.performance, settings.precision
    dtype = getattr(torch, precision.params_dtype)
    return {
        "fp16": precision.fp16,
        "bf16": precision.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_softmax_in_fp32": True,
        # The stock scaling of fp16 scores by layer is not what Transformers computes.
        "apply_query_key_layer_scaling": False,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": performance.bias_activation_fusion,
        "apply_rope_fusion": performance.apply_rope_fusion,
        "masked_softmax_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
    }


def _pipeline_layout(parallel: ParallelSettings, num_layers: int) -> list[list[str]] | None:
    """What each chunk holds, written out: one way for every setting that shapes a pipeline."""
    if parallel.pipeline_model_parallel_size == 1:
        return None
    return [
        ["embedding"] * chunk.embedding + ["decoder"] * chunk.num_layers + ["loss"] * chunk.loss
        for chunk in pipeline_chunks(parallel, num_layers)
    ]


def _recompute(recompute: RecomputeSettings) -> dict[str, Any]:
    granularity = recompute.recompute_granularity
    if granularity == "full":
        method = recompute.recompute_method or "uniform"
        # Without a number uniform recomputes layer by layer, and block every layer that a stage has.
        count = recompute.recompute_num_layers or (1 if method == "uniform" else sys.maxsize)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    modules = list(recompute.recompute_modules) if granularity == "selective" else []
    if recompute.moe_layer_recompute and "moe" not in modules:
        modules.append("moe")
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
