"""Module specs: the modules of each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatune.architecture import Architecture, LayerKind, MultiLatentAttention
from megatune.engine.layers.attention.core import CoreAttention
from megatune.engine.layers.delta_net import DeltaNetSubmodules, GatedDeltaNet
from megatune.engine.layers.feed_forward import FeedForward
from megatune.engine.layers.linear import feed_forward_layers, linear_layer, normed_linear, row_linear
from megatune.engine.layers.moe.layer import MoELayer, RecomputedMoELayer
from megatune.engine.layers.mtp import MTPLayer
from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.self_attention import (
    AllKeysNorm,
    AllQueriesNorm,
    GlobalAttention,
    GroupedQueryAttention,
    HeadNorm,
    MLASelfAttention,
    ReplicatedLinear,
)


class DecoderLayer(TransformerLayer):
    """Megatron-Core's layer, which also passes the micro-batch's sequences to the feed-forward: experts must know which
    tokens are padding. They are an argument, so that recomputing a layer uses those of its own forward pass, even if
    other micro-batches ran in between.

    Image features that are added after a layer (deepstack) are passed as Megatron-Core's `context`, because
    recomputation only computes gradients of arguments.

    Args:
        post_norms: normalize the outputs of attention and feed-forward before adding them.
        has_scalar: multiply the output of the layer by a scalar.
    """

    layer_scalar: Tensor | None

    def __init__(
        self, config: TransformerConfig, *args: Any, post_norms: bool = False, has_scalar: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        one = torch.ones(1, dtype=config.params_dtype, device=torch.cuda.current_device()) if has_scalar else None
        self.register_buffer("layer_scalar", one)
        if post_norms:
            sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.post_attention_layernorm = RMSNorm(config, **sizes)
            self.post_mlp_layernorm = RMSNorm(config, **sizes)
            self.self_attn_bda = _adding(self.post_attention_layernorm)
            self.mlp_bda = _adding(self.post_mlp_layernorm)

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer on hidden_states [s / cp (/ tp), b, h]; see TransformerLayer.

        Args:
            context: [s / cp (/ tp), b, k, h], added after each of the decoder's first k layers; the last of these does
                not pass it on.
        """
        kwargs.pop("dynamic_inference_decode_only", None)
        hidden_states, _ = self._forward_attention(*args, **kwargs)
        hidden_states = self._forward_mlp(hidden_states, padding_mask=kwargs["packed_seq_params"])
        if self.layer_scalar is not None:
            hidden_states = hidden_states * self.layer_scalar
        if context is None:
            return hidden_states, None
        hidden_states = hidden_states + context[:, :, self.layer_number - 1]
        return hidden_states, context if self.layer_number < context.shape[2] else None


def block_spec(
    architecture: Architecture, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of this pipeline chunk's layers."""
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _layer(architecture, config, architecture.layer_kind(first + index), keeps=_keeps(config, index))
        for index in range(get_num_layers_to_build(config, vp_stage=vp_stage))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def mtp_spec(
    architecture: Architecture, config: TransformerConfig, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules:
    """Return the specs of the multi-token prediction layers, which follow the last pipeline chunk. They are fully
    recomputed if one more layer of the chunk would be."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = architecture.num_layers - get_transformer_layer_offset(config, vp_stage)
    layers = []
    for index in range(architecture.mtp_num_layers):
        keeps = _keeps(config, count + index)
        kind = architecture.layer_kind(architecture.num_layers + index)
        params = {
            "layer": _layer(architecture, config, kind, keeps=keeps),
            "index": first + index,
            "recomputed": config.recompute_granularity == "full" and not keeps,
        }
        layers.append(ModuleSpec(module=MTPLayer, params=params))
    return MultiTokenPredictionBlockSubmodules(layer_specs=layers)


def _keeps(config: TransformerConfig, index: int) -> bool:
    """Return whether recompute_method "block" stores a layer's activations, because it is after the first layers."""
    return config.recompute_method == "block" and index >= config.recompute_num_layers


def _layer(architecture: Architecture, config: TransformerConfig, kind: LayerKind, *, keeps: bool) -> ModuleSpec:
    """Return the spec of a layer."""
    before = RMSNorm if architecture.pre_norms and not config.uses_transformer_engine else IdentityOp
    scale = architecture.residual_multiplier
    add = get_bias_dropout_add if scale == 1 else _adding(lambda output: output * scale)
    layer = TransformerLayerSubmodules(
        input_layernorm=before,
        self_attention=_mixer(architecture, config, kind),
        self_attn_bda=add,
        pre_mlp_layernorm=_before_mlp(architecture, config, kind),
        mlp=_mlp(config, kind, keeps=keeps),
        mlp_bda=add,
    )
    params = {"post_norms": architecture.post_norms, "has_scalar": architecture.layer_scalars}
    return ModuleSpec(module=DecoderLayer, params=params, submodules=layer)


def _before_mlp(architecture: Architecture, config: TransformerConfig, kind: LayerKind) -> type:
    """Return the norm before a layer's feed-forward; experts and Transformer Engine's projections may contain it."""
    if architecture.moe is not None and kind.sparse:
        return RMSNorm if architecture.pre_norms and not architecture.moe.separate_norms else IdentityOp
    return RMSNorm if architecture.pre_norms and not config.uses_transformer_engine else IdentityOp


def _adding(transform: Callable[[Tensor], Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """Return a factory, as Megatron-Core expects, of the function that adds a transformed output to the residual."""

    def add(output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + transform(output_with_bias[0])

    def get_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        return add

    return get_add


def _mlp(config: TransformerConfig, kind: LayerKind, *, keeps: bool) -> ModuleSpec | type:
    """Return the spec of a layer's feed-forward."""
    if not kind.sparse:
        if config.uses_transformer_engine:
            return ModuleSpec(module=FeedForward, submodules=feed_forward_layers())
        return FeedForward
    return RecomputedMoELayer if keeps and config.moe_layer_recompute else MoELayer


def _mixer(architecture: Architecture, config: TransformerConfig, kind: LayerKind) -> ModuleSpec:
    """Return the spec of a layer's attention or gated delta net."""
    if not kind.delta:
        attention = _self_attention(architecture, config)
        if kind.has_global_heads:
            attention.module, attention.params["heads"] = GlobalAttention, architecture.global_heads
        return attention
    linear = (linear_layer(kind, config) for kind in (ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        module=GatedDeltaNet, params={"delta": architecture.delta}, submodules=DeltaNetSubmodules(*linear)
    )


def _self_attention(architecture: Architecture, config: TransformerConfig) -> ModuleSpec:
    if architecture.mla is not None:
        return _mla(architecture.mla, config)
    q_norm, k_norm = _qk_norms(architecture)
    linear_qkv, linear_proj = (linear_layer(kind, config) for kind in (ColumnParallelLinear, RowParallelLinear))
    if config.uses_transformer_engine:
        linear_qkv, linear_proj = normed_linear(), row_linear()
    return ModuleSpec(
        module=GroupedQueryAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear_qkv,
            core_attention=CoreAttention,
            linear_proj=linear_proj,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def _qk_norms(architecture: Architecture) -> tuple[type, type]:
    """Return the norms of queries and of keys."""
    if architecture.wide_qk_norms:
        return AllQueriesNorm, AllKeysNorm
    norm = HeadNorm if architecture.qk_layernorm else IdentityOp
    return norm, norm


def _mla(mla: MultiLatentAttention, config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"rope_interleaved": mla.rope_interleaved},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=linear_layer(ColumnParallelLinear, config),
            linear_q_down_proj=linear_layer(ReplicatedLinear, config),
            linear_q_up_proj=linear_layer(ColumnParallelLinear, config),
            linear_kv_down_proj=linear_layer(ReplicatedLinear, config),
            linear_kv_up_proj=linear_layer(ColumnParallelLinear, config),
            core_attention=CoreAttention,
            linear_proj=linear_layer(RowParallelLinear, config),
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
