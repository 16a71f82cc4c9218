"""Megatron-Core's configuration for a model in a parallel layout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import ParallelSettings, Settings
from megatune.engine import device
from megatune.engine.layers.linear import uses_transformer_engine
from megatune.engine.layers.vision.features import sum_vision_gradients
from megatune.families.quantized import form_of

_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "softmax_scale")


def transformer_config(architecture: Architecture, settings: Settings) -> TransformerConfig:
    """Build Megatron-Core's configuration for this model in this layout."""
    kind = TransformerConfig if architecture.mla is None else MLATransformerConfig
    config: Any = kind(
        **_model(architecture),
        **({} if architecture.mla is None else _same(architecture.mla, _MLA)),
        **_experts(architecture.moe, settings),
        **_layout(settings.parallel, architecture),
        **_computation(settings),
        **_recompute(settings.recompute),
    )
    # Passed to the constructor, it would require Transformer Engine's kernels; ours do not need it.
    config.apply_rope_fusion = settings.performance.apply_rope_fusion
    # Megatron-Core has no fields for the following; its own field for fp8 requires Transformer Engine.
    config.quantized_form = form_of(settings.finetuning)
    config.fp8_scaling = settings.precision.fp8
    config.uses_transformer_engine = uses_transformer_engine(settings, architecture)
    config.windows = architecture.windows or (None,) * (architecture.num_layers + architecture.mtp_num_layers)
    config.bidirectional_images = architecture.bidirectional_images
    config.whole_in_windows = architecture.vision is not None and architecture.vision.whole_in_windows
    config.query_scaling = architecture.query_scaling
    config.value_norms, config.keys_are_values = architecture.value_norms, False
    has_two = architecture.local_rotary_base is not None
    config.global_rotary_channels = architecture.of_heads(True).rotary_dim if has_two else None
    config.neftune_noise_alpha = settings.finetuning.neftune_noise_alpha
    config.rms_norm_fusion = settings.performance.rms_norm_fusion
    config.moe_layer_recompute = settings.recompute.moe_layer_recompute
    if architecture.activation == "gelu_tanh":  # the constructor accepts fusions for other activations only
        config.activation_func = functools.partial(F.gelu, approximate="tanh")
    config.mtp_loss_scaling_factor = settings.model.mtp_loss_scaling_factor
    # Passed to the constructor, it would reject expert tensor parallelism.
    config.add_bias_linear = architecture.add_bias_linear
    if architecture.moe is not None:
        config.moe_swiglu_limit = architecture.moe.swiglu_limit
        # Passed to the constructor, an expert bias would require sigmoid scores.
        config.moe_router_score_function = architecture.moe.score_function
        config.moe_router_group_best = architecture.moe.group_best
        config.moe_scaled_router = architecture.moe.scaled_router
        config.moe_separate_norms = architecture.moe.separate_norms
    if architecture.vision is not None:
        config.finalize_model_grads_func = _finalize_with_vision
    return config  # type: ignore[no-any-return]


def _finalize(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Finalize gradients, and divide them by the number of tokens, int64 []. Megatron-Core can do both, but it
    synchronizes with the device to check whether there are any tokens."""
    finalize_model_grads(model, **kwargs)
    if num_tokens is None:
        return
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast(num_tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    torch.distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    scaling = torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0)
    for chunk in model:
        chunk.scale_gradients(scaling)


def _finalize_with_vision(model: list[DistributedDataParallel], *args: Any, **kwargs: Any) -> None:
    """Do the same, then sum the gradients of the vision encoder, of which each tensor-parallel rank has a part."""
    _finalize(model, *args, **kwargs)
    sum_vision_gradients(model)


def _model(architecture: Architecture) -> dict[str, Any]:
    shared = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "qk_layernorm", "add_qkv_bias", "attention_output_gate",
    )  # fmt: skip
    scale = {} if architecture.mla is not None else {"softmax_scale": architecture.softmax_scale}
    return {
        **_same(architecture, shared),
        **scale,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": architecture.zero_centered_norms,
        "rotary_interleaved": architecture.rope_interleaved,
        "no_rope_freq": _without_rotary(architecture),
        "add_bias_linear": False,
        "softmax_type": "learnable" if architecture.attention_sinks else "vanilla",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": architecture.initializer_range,
        # Every weight is loaded, so none is initialized.
        "perform_initialization": False,
    }


def _without_rotary(architecture: Architecture) -> list[int] | None:
    """Return a list with 1 for each layer without rotary embedding, and 0 for the others; None if all have it."""
    without = set(architecture.no_rope_layers)
    return [int(layer in without) for layer in range(architecture.num_layers)] if without else None


def _same(source: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes that have the same name in Megatron-Core."""
    return {name: getattr(source, name) for name in names}


def _experts(moe: MixtureOfExperts | None, settings: Settings) -> dict[str, Any]:
    if moe is None:
        return {}
    experts = settings.experts
    shared = (
        "moe_shared_expert_overlap", "moe_router_bias_update_rate", "moe_router_load_balancing_type",
        "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_grouped_gemm",
    )  # fmt: skip
    return {
        **_same(experts, shared),
        "moe_aux_loss_coeff": experts.moe_aux_loss_coeff or 0.0,
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.layers],
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_router_topk": moe.router_topk,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_num_groups": moe.num_groups or None,
        "moe_router_group_topk": moe.group_topk or None,
        "moe_router_topk_scaling_factor": moe.topk_scaling_factor if moe.topk_scaling_factor != 1.0 else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": experts.moe_router_dtype or moe.router_dtype,
        # Megatron-Core merged alltoall and alltoall_seq.
        "moe_token_dispatcher_type": experts.moe_token_dispatcher_type.removesuffix("_seq"),
    }


def _layout(parallel: ParallelSettings, architecture: Architecture) -> dict[str, Any]:
    virtual = parallel.virtual_stages
    shared = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "context_parallel_size",
        "cp_comm_type", "expert_model_parallel_size",
    )  # fmt: skip
    layout = None
    if parallel.pipeline_model_parallel_size > 1:
        # The content of each chunk, spelled out: one form for every setting that shapes a pipeline.
        layout = [
            ["embedding"] * chunk.embedding + ["decoder"] * chunk.num_layers + ["loss"] * chunk.loss
            for chunk in pipeline_chunks(parallel, architecture.num_layers)
        ]
        layout[-1][-1:-1] = ["mtp"] * architecture.mtp_num_layers
    return {
        "mtp_num_layers": architecture.mtp_num_layers or None,
        **_same(parallel, shared),
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": layout,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        # With virtual stages on two pipeline ranks a batch has several messages between the same two ranks, which gloo
        # mixes up; sent one by one they are correct.
        "overlap_p2p_comm": parallel.overlap_p2p_comm and virtual is not None,
        "batch_p2p_comm": virtual is None,
        "deallocate_pipeline_outputs": device.SENDS_HOLD_MEMORY,
    }


_FLAGS = ("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "bias_activation_fusion", "deterministic_mode")


def _computation(settings: Settings) -> dict[str, Any]:
    performance, dtype = settings.performance, getattr(torch, settings.precision.params_dtype)
    return {
        **_same(settings.precision, ("fp16", "bf16")),
        **_same(performance, _FLAGS),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_backend": AttnBackend[performance.attention_backend],
        "attention_softmax_in_fp32": True,
        # Megatron-Core's layer-dependent scaling of fp16 scores is not what Transformers computes.
        "apply_query_key_layer_scaling": False,
        "calculate_per_token_loss": True,
        "masked_softmax_fusion": False,
        "finalize_model_grads_func": _finalize,
    }


def _recompute(recompute: RecomputeSettings) -> dict[str, Any]:
    if recompute.recompute_granularity == "full":
        method = recompute.recompute_method or "uniform"
        # Without a number, uniform recomputes layer by layer, and block recomputes every layer of a stage.
        count = recompute.recompute_num_layers or (1 if method == "uniform" else sys.maxsize)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    modules = list(recompute.selective_modules)
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
