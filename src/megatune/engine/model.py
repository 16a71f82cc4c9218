"""Builds the model of a layout: one factory, so that nothing else depends on where Megatron-Core keeps its classes."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatune.architecture import Architecture
from megatune.config.settings import ParallelSettings, PrecisionSettings
from megatune.engine import device
from megatune.engine.layers.attention import SDPAttention
from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.rotary import fused_rotary, inverse_frequencies
from megatune.families.weights import padded_vocab_size

# A pipeline chunk as the rest of the project sees it.
Chunk: TypeAlias = DistributedDataParallel


class DecoderModel(GPTModel):
    """One pipeline chunk of the decoder.

    With `labels` it returns the loss of each token, otherwise this rank's logits; see `forward` of GPTModel.
    """

    def __init__(self, architecture: Architecture, config: TransformerConfig, vp_stage: int | None) -> None:
        tp_size = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(config, vp_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, tp_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        _mark_tensor_parallel(self)
        self.rotary_pos_emb.inv_freq = inverse_frequencies(architecture).to(torch.cuda.current_device())
        size = self.vocab_size // tp_size
        # Rows of this rank's part of the vocabulary that are real; the rest only pads it.
        self.num_vocabulary_rows = min(
            max(architecture.vocab_size - parallel_state.get_tensor_model_parallel_rank() * size, 0), size
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross-entropy over the real vocabulary.

        Args:
            labels: int64 [b, s]; any value in the vocabulary where a token is not trained.
            logits: [s, b, padded vocabulary / tp].

        Returns:
            fp32 [b, s].
        """
        if self.num_vocabulary_rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.num_vocabulary_rows :] = torch.finfo(logits.dtype).min
        return super().compute_language_model_loss(labels, logits)


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark the weights that tensor parallelism cuts. Megatron-Core does so only where it draws them at random; an
    unmarked weight passes for a copy, and all but one rank's part of it is missing in the norm of the gradient."""
    dims: dict[type, int] = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        dim = dims.get(type(module))
        if dim is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def transformer_config(
    architecture: Architecture, parallel: ParallelSettings, precision: PrecisionSettings
) -> TransformerConfig:
    """Megatron-Core's configuration of this model in this layout."""
    if parallel.apply_rope_fusion:
        rope_utils.fused_apply_rotary_pos_emb = fused_rotary
    dtype = getattr(torch, precision.params_dtype)
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=architecture.qk_layernorm,
        add_bias_linear=False,
        add_qkv_bias=architecture.add_qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=architecture.initializer_range,
        # Every weight is loaded, so none is drawn at random first.
        perform_initialization=False,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        fp16=precision.fp16,
        bf16=precision.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # The stock scaling of fp16 scores by layer is not what Transformers computes.
        apply_query_key_layer_scaling=False,
        calculate_per_token_loss=True,
        # With virtual stages on two pipeline ranks a batch holds several messages between the same two ranks, which
        # gloo confuses; one by one they are exact.
        overlap_p2p_comm=parallel.overlap_p2p_comm and parallel.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=parallel.virtual_pipeline_model_parallel_size is None,
        deallocate_pipeline_outputs=device.SENDS_HOLD_MEMORY,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=parallel.bias_activation_fusion,
        apply_rope_fusion=parallel.apply_rope_fusion,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(
    architecture: Architecture, parallel: ParallelSettings, precision: PrecisionSettings
) -> list[DistributedDataParallel]:
    """This rank's pipeline chunks, in order, in Megatron-Core's DDP. Weights are uninitialized memory: load them next.

    `engine.groups.build` comes first.
    """
    config = transformer_config(architecture, parallel, precision)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    stages = parallel.virtual_pipeline_model_parallel_size
    chunks = [
        DecoderModel(architecture, config, vp_stage).to(config.params_dtype)
        for vp_stage in (range(stages) if stages else [None])
    ]
    model = [
        # The first chunk's buckets overlap with the later chunks' backward passes; those go out as one.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    _hand_over_overlaps(config, model, parallel)
    return model


def gather_parameters(model: list[Chunk]) -> None:
    """Bring parameters up to date that the distributed optimizer has updated and not yet sent to the other ranks.

    With overlap_param_gather they are sent during the next forward pass of training; whoever else reads them, to
    evaluate or to save, must ask first.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _hand_over_overlaps(
    config: TransformerConfig, model: list[DistributedDataParallel], parallel: ParallelSettings
) -> None:
    """Tell the pipeline schedules when to start and hold back communication of gradients and parameters."""
    if parallel.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func, config.grad_sync_func = config.no_sync_func[0], config.grad_sync_func[0]
    if parallel.overlap_param_gather:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]
        if len(model) == 1:
            config.param_sync_func = config.param_sync_func[0]


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SDPAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[_layer_spec(config)] * num_layers, layer_norm=RMSNorm)
