"""Builds the model of a layout: one factory, so that nothing else depends on where Megatron-Core keeps its classes."""

from __future__ import annotations

from typing import TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.architecture import Architecture
from megatune.config.settings import ParallelSettings, Settings
from megatune.engine.layers import gradient_accumulation, swiglu
from megatune.engine.layers.attention.choice import require
from megatune.engine.layers.cross_entropy import OutputLayer
from megatune.engine.layers.rotary import attention_factor, cos_sin, inverse_frequencies
from megatune.engine.optimizer import shards_optimizer
from megatune.engine.sequences import Sequences
from megatune.engine.specs import block_spec
from megatune.engine.transformer_config import transformer_config
from megatune.engine.upstream import answer
from megatune.families.weights import padded_vocab_size

# A pipeline chunk as the rest of the project sees it.
Chunk: TypeAlias = DistributedDataParallel


class DecoderModel(GPTModel):
    """One pipeline chunk of the decoder."""

    def __init__(self, architecture: Architecture, config: TransformerConfig, vp_stage: int | None) -> None:
        tp_size = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, vp_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, tp_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            # Rotary embeddings follow the positions of each micro-batch, below.
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        _mark_tensor_parallel(self)
        self.inverse_frequencies = inverse_frequencies(architecture).to(torch.cuda.current_device())
        self.attention_factor = attention_factor(architecture)
        size = self.vocab_size // tp_size
        # Rows of this rank's part of the vocabulary that are real; the rest only pads it.
        self.num_vocabulary_rows = min(
            max(architecture.vocab_size - parallel_state.get_tensor_model_parallel_rank() * size, 0), size
        )
        if self.post_process:
            # GPTModel makes the layer itself. The subclass has no state of its own, only another way to call it.
            self.output_layer.__class__ = OutputLayer
            self.output_layer.num_vocabulary_rows = self.num_vocabulary_rows

    def _set_attention_backend(self) -> None:
        """Megatron-Core sets Transformer Engine's environment here; the core attention reads the configuration."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, sequences: Sequences, labels: Tensor | None = None
    ) -> Tensor:
        """Compute this chunk's layers.

        Args:
            input_ids: int64 [b, s / cp].
            labels: int64 [b, s / cp], below 0 where a token is not trained; None asks for logits.

        Returns:
            Hidden states [s / cp (/ tp), b, h] for the next chunk; from the last one the loss of each token, fp32
            [b, s / cp], 0 where it is not trained, or logits [b, s / cp, padded vocabulary / tp].
        """
        hidden_states = self.decoder(
            hidden_states=self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self._rotary_embedding(sequences.position_ids),
            packed_seq_params=sequences,
        )
        return self.head(hidden_states, labels, sequences.trained) if self.post_process else hidden_states

    def head(self, hidden_states: Tensor, labels: Tensor | None, trained: Tensor) -> Tensor:
        """The output layer and, given labels, the loss.

        Args:
            hidden_states: [s (/ tp), b, h], of the last layer.
            labels: int64 [b, s].
            trained: int64 [n], places of the trained tokens in the flattened labels.

        Returns:
            As `forward` of the last chunk.
        """
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if labels is not None and self.config.cross_entropy_loss_fusion:
            return self.output_layer(hidden_states, weight=weight, labels=labels, trained=trained)[0]
        logits, _ = self.output_layer(hidden_states, weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _rotary_embedding(self, position_ids: Tensor) -> Tensor:
        """int64 [s / cp] to [2, s / cp, 1, 1, channels], once for all layers."""
        return cos_sin(position_ids, self.inverse_frequencies, self.attention_factor, self.config.params_dtype)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross-entropy over the real vocabulary from all logits: what `cross_entropy_loss_fusion` replaces.

        Args:
            labels: int64 [b, s]; below 0 where a token is not trained.
            logits: [s, b, padded vocabulary / tp].

        Returns:
            fp32 [b, s].
        """
        if self.num_vocabulary_rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.num_vocabulary_rows :] = torch.finfo(logits.dtype).min
        return super().compute_language_model_loss(labels.clamp(min=0), logits) * (labels >= 0)


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark the weights that tensor parallelism cuts. Megatron-Core does so only where it draws them at random; an
    unmarked weight passes for a copy, and all but one rank's part of it is missing in the norm of the gradient."""
    dims: dict[type, int] = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        dim = dims.get(type(module))
        if dim is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def build_model(architecture: Architecture, settings: Settings) -> list[DistributedDataParallel]:
    """This rank's pipeline chunks, in order, in Megatron-Core's DDP. Weights are uninitialized memory: load them next.

    `engine.groups.build` comes first.
    """
    answer()
    require(settings, architecture)
    parallel, performance = settings.parallel, settings.performance
    if performance.bias_activation_fusion:
        swiglu.install()
    if performance.gradient_accumulation_fusion:
        gradient_accumulation.install()
    config = transformer_config(architecture, settings)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=shards_optimizer(parallel),
        check_for_nan_in_grad=False,
    )
    stages = parallel.virtual_stages
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
