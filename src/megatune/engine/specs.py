"""Which modules a layer is made of."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from megatune.architecture import Architecture, MultiLatentAttention
from megatune.engine.layers.attention import CoreAttention
from megatune.engine.layers.decoder_layer import DecoderLayer
from megatune.engine.layers.feed_forward import FeedForward
from megatune.engine.layers.mla import MLASelfAttention, ReplicatedLinear
from megatune.engine.layers.moe.layer import MoELayer, RecomputedMoELayer
from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.self_attention import GroupedQueryAttention, HeadNorm


def block_spec(
    architecture: Architecture, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline chunk."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [_layer(_self_attention(architecture), _mlp(architecture, config, first, i)) for i in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _mlp(architecture: Architecture, config: TransformerConfig, first: int, index: int) -> type:
    """Return the feed-forward of a chunk's layer, counted from the chunk's first."""
    if not architecture.is_moe_layer(first + index):
        return FeedForward
    # Full recomputation in blocks keeps the layers beyond the first of each chunk.
    keeps = config.recompute_method == "block" and index >= config.recompute_num_layers
    return RecomputedMoELayer if keeps and config.moe_layer_recompute else MoELayer


def _layer(self_attention: ModuleSpec, mlp: type) -> ModuleSpec:
    return ModuleSpec(
        module=DecoderLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _self_attention(architecture: Architecture) -> ModuleSpec:
    if architecture.mla is not None:
        return _mla(architecture.mla)
    qk_norm = HeadNorm if architecture.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=GroupedQueryAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _mla(mla: MultiLatentAttention) -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "rope_interleaved": mla.rope_interleaved},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
