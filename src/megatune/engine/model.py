"""Build the model for a parallel layout. Only this module knows where Megatron-Core keeps its classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.encoders import Vision
from megatune.engine import device
from megatune.engine.layers import fp8
from megatune.engine.layers.attention.choice import activate_newest, require
from megatune.engine.layers.cross_entropy import PLAIN, Head, OutputLayer, Score
from megatune.engine.layers.linear import require_transformer_engine
from megatune.engine.layers.noise import with_noise
from megatune.engine.layers.rotary import (
    attention_factor,
    cos_sin,
    inverse_frequencies,
    mrope_axes,
    multimodal_cos_sin,
)
from megatune.engine.layers.vision.features import VisionFeatures, place_features
from megatune.engine.optimizer import shards_optimizer
from megatune.engine.patches import patch_model
from megatune.engine.sequences import BatchMedia, MTPTargets, Sequences
from megatune.engine.specs import block_spec, mtp_spec
from megatune.engine.trained import add_adapters, detach_stage_input, freeze
from megatune.engine.transformer_config import transformer_config
from megatune.engine.weights import mark_weights
from megatune.families.weights import Weight, padded_vocab_size
from megatune.half_precision import multiply_in_fp32
from megatune.rope_scaling import LongRopeScaling

# A pipeline chunk as the rest of the project sees it. A frozen chunk is wrapped too, but has no gradient buffers.
Chunk: TypeAlias = DistributedDataParallel


class DecoderModel(GPTModel):
    """One pipeline chunk of the decoder.

    Attributes:
        propagates_gradient: whether earlier stages have trained weights, and so need a gradient from this chunk.
        input_requires_grad: whether the input of the first layer requires a gradient even if nothing before it does.
        adapter_weights: weight-map entries of this chunk's adapters.
    """

    propagates_gradient = True
    input_requires_grad = False
    adapter_weights: tuple[Weight, ...] = ()

    def __init__(self, architecture: Architecture, config: TransformerConfig, vp_stage: int | None) -> None:
        tp_size = config.tensor_model_parallel_size
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, vp_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, tp_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=is_last,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            # Rotary embeddings are computed from each micro-batch's positions, see `_rotary_embedding`.
            position_embedding_type="none",
            # Image features are inserted into whole rows, before sequence parallelism splits them.
            scatter_embedding_sequence_parallel=architecture.vision is None,
            # MTP layers need a copy of the first stage's word embedding on their own stage.
            mtp_block_spec=mtp_spec(architecture, config, vp_stage)
            if is_last and architecture.mtp_num_layers
            else None,
            vp_stage=vp_stage,
        )
        self.inverse_frequencies = inverse_frequencies(architecture.of_heads(True)).to(torch.cuda.current_device())
        self.attention_factor = attention_factor(architecture)
        self.long_frequencies: Tensor | None = None
        if isinstance(architecture.rope_scaling, LongRopeScaling):
            self.long_frequencies = inverse_frequencies(architecture, long=True).to(torch.cuda.current_device())
            self.original_length = architecture.rope_scaling.original_max_position_embeddings
        self.local_frequencies: Tensor | None = None
        if architecture.local_rotary_base is not None:
            local = replace(architecture, rotary_base=architecture.local_rotary_base, rope_scaling=None)
            self.local_frequencies = inverse_frequencies(local).to(torch.cuda.current_device())
        # Rounded to the dtype of the embeddings, as in Transformers.
        self.embedding_multiplier = torch.tensor(architecture.embedding_multiplier, dtype=config.params_dtype).item()
        self.noise_multiplier = architecture.noise_multiplier / architecture.hidden_size**0.5
        self.padding_token = architecture.padding_token
        self.logits_scaling, self.logits_softcap = architecture.logits_scaling, architecture.logits_softcap
        mrope = architecture.mrope
        self.mrope_axes = None if mrope is None else device.send(mrope_axes(mrope))
        size = self.vocab_size // tp_size
        # Rows of this rank's vocabulary shard that are not padding.
        before = parallel_state.get_tensor_model_parallel_rank() * size
        self.num_vocabulary_rows = min(max(architecture.vocab_size - before, 0), size)
        self.score: Score | None = None
        if self.post_process and architecture.num_labels:
            del self.output_layer
            self.score = Score(self.config, architecture.num_labels)
        elif self.post_process:
            # GPTModel creates the layer itself. The subclass adds no state, only another forward().
            self.output_layer.__class__ = OutputLayer
            self.output_layer.num_vocabulary_rows = self.num_vocabulary_rows
            self.output_layer.softcap = self.logits_softcap
            if self.mtp_process and architecture.tie_word_embeddings:
                # Shares this stage's word embedding, which accumulates the gradients of both uses.
                self.output_layer.weight = None
                self.embedding.word_embeddings.weight.zero_out_wgrad = True
        self.vision_features: VisionFeatures | None = None
        if self.pre_process and architecture.vision is not None:
            self._add_vision(architecture, architecture.vision)

    def _add_vision(self, architecture: Architecture, vision: Vision) -> None:
        # Imported here because it imports Transformers, which text-only models do not need.
        from megatune.engine.layers.vision.tower import Tower, build_encoder

        encoder = build_encoder(architecture, self.config).to(self.config.params_dtype)
        # Registered first because it runs first: DDP assigns parameters to buckets in reverse order of registration.
        decoder = dict(self._modules)
        self._modules.clear()
        self.vision_model = encoder
        self._modules.update(decoder)
        self.vision_features = VisionFeatures(Tower(encoder, vision, self.config), vision)

    def _set_attention_backend(self) -> None:
        """Do nothing: Megatron-Core sets environment variables here; our core attention reads the configuration."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        sequences: Sequences,
        labels: Tensor | None = None,
        media: BatchMedia | None = None,
        head: Head = PLAIN,
        mtp_targets: MTPTargets | None = None,
    ) -> Tensor:
        """Run this chunk's layers.

        Args:
            input_ids: int64 [b, s / cp].
            labels: int64 [b, s / cp], negative for tokens that are not trained; None returns logits.
            media: the images and videos of the whole micro-batch, on the host.
            head: what the last chunk computes for the labels.
            mtp_targets: inputs and labels of the multi-token prediction layer; its losses are appended to the output
                as the last channel, [b, s / cp, 2] for a plain head.

        Returns:
            Hidden states [s / cp (/ tp), b, h] for the next chunk. From the last chunk:
            with labels the loss of each token, fp32 [b, s / cp], 0 where it is not trained (with its entropy
            [b, s / cp, 2], see `token_losses`, or another quantity that the head selects); without labels logits
            [b, s / cp, padded vocabulary / tp]; with `head.hidden` the input of the output layer,
            [s / cp (/ tp), b, h]; from a model with a score instead of an output layer, with or without labels, the
            scores of each token, fp32 [b, s / cp], or [b, s / cp, labels] for several labels.
        """
        embeddings, deepstack = self._embed(input_ids, sequences, media) if self.pre_process else (None, None)
        rotary = self._rotary_embedding(sequences)
        hidden_states = self.decoder(
            hidden_states=self._first_layer_input(embeddings),
            attention_mask=None,
            context=deepstack,
            rotary_pos_emb=rotary,
            packed_seq_params=sequences,
        )
        if not self.post_process:
            return hidden_states
        output = self.head(hidden_states, labels, sequences.trained, head)
        if mtp_targets is None:
            return output
        (layer,) = self.mtp.layers
        hidden_states = layer(hidden_states, self._word_embeddings(mtp_targets.input_ids), rotary, sequences)
        further = self.head(hidden_states, mtp_targets.labels, mtp_targets.trained)
        return torch.cat((output.view(*further.shape, -1), further[..., None]), -1)

    def _embed(self, input_ids: Tensor, sequences: Sequences, media: BatchMedia | None) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [s / cp (/ tp), b, h] with image features inserted, and the `context` of the layers."""
        features = self.vision_features(media) if self.vision_features is not None else None
        embeddings, deepstack = self._word_embeddings(input_ids), None
        if sequences.noise is not None:
            embeddings = self._with_noise(embeddings, sequences.noise, sequences.lengths)
        if self.vision_features is None:
            return embeddings, None
        if features is not None:
            embeddings, deepstack = place_features(features, embeddings, media, sequences.boundaries)
        if not self.config.sequence_parallel:
            return embeddings, deepstack
        # Cloned: a view would keep the whole rows in memory.
        embeddings = scatter_to_sequence_parallel_region(embeddings).clone()
        return embeddings, None if deepstack is None else scatter_to_sequence_parallel_region(deepstack).clone()

    def _word_embeddings(self, input_ids: Tensor) -> Tensor:
        """Return embeddings [s / cp (/ tp), b, h]. As in Transformers, the embedding of the padding token, which may
        also end every answer, gets no gradient."""
        embeddings: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        if self.padding_token is not None and embeddings.requires_grad:
            is_padding = (input_ids == self.padding_token).t()[..., None]
            if len(embeddings) < len(is_padding):
                is_padding = scatter_to_sequence_parallel_region(is_padding)
            embeddings.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0))
        return embeddings if self.embedding_multiplier == 1 else embeddings * self.embedding_multiplier

    def _with_noise(self, embeddings: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        """Add noise of up to alpha / √(L · h) to word embeddings, where L is the length of a token's sequence."""
        alpha = self.config.neftune_noise_alpha * self.noise_multiplier
        keys, largest = keys.t(), (alpha / lengths.clamp(min=1).sqrt()).expand_as(keys).t()
        if len(embeddings) < len(keys):
            keys, largest = map(scatter_to_sequence_parallel_region, (keys, largest))
        return with_noise(embeddings, keys, largest)

    def _first_layer_input(self, embeddings: Tensor | None) -> Tensor:
        """Return the input of the first layer: the embeddings, or the output of the previous stage. It requires a
        gradient only if something needs one."""
        hidden_states: Tensor = self.decoder.input_tensor if embeddings is None else embeddings
        if not torch.is_grad_enabled():
            return hidden_states
        if not self.propagates_gradient:
            hidden_states = detach_stage_input(hidden_states)
            self.decoder.set_input_tensor(hidden_states)
        return hidden_states.requires_grad_() if self.input_requires_grad else hidden_states

    def head(self, hidden_states: Tensor, labels: Tensor | None, trained: Tensor, head: Head = PLAIN) -> Tensor:
        """Compute the output of `forward` from the last layer's [s (/ tp), b, h]: scores, logits, or losses.

        Args:
            trained: int64 [n], indices of the trained tokens in the flattened labels.
            head: unless it is PLAIN, it is computed fused with the output layer, regardless of the settings.
        """
        if self.score is not None:
            return self.score(hidden_states)
        if self.logits_scaling != 1:
            hidden_states = hidden_states / self.logits_scaling
        if head.hidden:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if labels is not None and (self.config.cross_entropy_loss_fusion or head != PLAIN):
            return self.output_layer(hidden_states, weight=weight, labels=labels, trained=trained, head=head)[0]
        logits, _ = self.output_layer(hidden_states, weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    @property
    def output_weight(self) -> Tensor:
        """This rank's shard of the output layer, [padded vocabulary / tp, h]; only on the last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _rotary_embedding(self, sequences: Sequences) -> Tensor:
        """Compute cosine and sine once for all layers, [2, s / cp, 1, 1, channels]; per row, [2, s / cp, b, 1,
        channels], with images, or if long sequences use other frequencies. If layers with a sliding window have their
        own frequencies, their channels are appended."""
        arguments = self.inverse_frequencies, self.attention_factor, self.config.params_dtype
        if self.local_frequencies is not None:
            local = cos_sin(sequences.position_ids, self.local_frequencies, 1.0, self.config.params_dtype)
            return torch.cat((cos_sin(sequences.position_ids, *arguments), local), -1)
        if self.long_frequencies is not None:
            long = cos_sin(sequences.position_ids, self.long_frequencies, *arguments[1:])
            is_long = (sequences.lengths > self.original_length).T[:, :, None, None]
            return torch.where(is_long, long, cos_sin(sequences.position_ids, *arguments))
        if sequences.rotary_position_ids is None or self.mrope_axes is None:
            return cos_sin(sequences.position_ids, *arguments)
        return multimodal_cos_sin(sequences.rotary_position_ids, self.mrope_axes, *arguments)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Compute cross-entropy over the real vocabulary from all logits, without `cross_entropy_loss_fusion`.

        From int64 [b, s], negative for tokens that are not trained, and [s, b, padded vocabulary / tp] to fp32 [b, s].
        """
        if self.num_vocabulary_rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.num_vocabulary_rows :] = torch.finfo(logits.dtype).min
        return super().compute_language_model_loss(labels.clamp(min=0), logits) * (labels >= 0)


def build_model(architecture: Architecture, settings: Settings, *, trained: bool = True) -> list[Chunk]:
    """Build this rank's pipeline chunks, in order, in Megatron-Core's DDP. Weights are uninitialized: load them next.

    Call `engine.groups.build` first. Each call creates its own configuration, so several models share only the groups.

    Args:
        trained: False freezes all parameters: they have no gradient buffers, and the model is in eval mode.
    """
    device.set_deterministic(settings.performance.deterministic_mode)  # decides about kernels
    require(settings, architecture)
    fp8.require(settings)
    require_transformer_engine(settings, architecture)
    activate_newest(settings, architecture)
    parallel, performance = settings.parallel, settings.performance
    patch_model(swiglu=performance.bias_activation_fusion, weight_gradients=performance.gradient_accumulation_fusion)
    device.compile_operators(performance.compile_operators)
    config = transformer_config(architecture, settings)
    multiply_in_fp32(config.params_dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=trained and parallel.overlap_grad_reduce,
        overlap_param_gather=trained and parallel.overlap_param_gather,
        use_distributed_optimizer=trained and shards_optimizer(parallel, settings.optimizer),
        check_for_nan_in_grad=False,
    )
    stages = parallel.virtual_stages
    chunks = []
    for vp_stage in range(stages) if stages else [None]:
        chunk = DecoderModel(architecture, config, vp_stage).to(config.params_dtype)
        add_adapters(chunk, architecture, settings.finetuning)
        mark_weights(chunk, architecture)
        freeze(chunk, architecture, settings.finetuning)
        if not trained:
            chunk.requires_grad_(False).eval()
            # The input that a pipeline stage receives requires a gradient.
            chunk.forward = torch.no_grad()(chunk.forward)
        if ddp_config.use_distributed_optimizer:
            _free_parameters(chunk)
        chunks.append(chunk)
    model = [
        # Only the first chunk is split into buckets: their reduction overlaps with later chunks' backward passes.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    _set_overlaps(config, model)
    return model


def _free_parameters(chunk: torch.nn.Module) -> None:
    """Free the memory of parameters that DDP will map into its buffers; otherwise it would hold both.

    A parameter keeps its shape: it becomes a single expanded element.
    """
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.new_zeros(()).expand(parameter.shape)
    torch.cuda.empty_cache()


def gather_parameters(model: list[Chunk]) -> None:
    """All-gather parameters that the distributed optimizer has updated but not yet sent to the other ranks.

    With overlap_param_gather they are sent during the next forward pass of training. Evaluation and saving, which read
    them earlier, call this first.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _set_overlaps(config: TransformerConfig, model: list[Chunk]) -> None:
    """Set the hooks by which pipeline schedules start or defer communication of gradients and parameters."""
    hooks: dict[str, list[Callable[..., Any]]] = {}
    if model[0].ddp_config.overlap_grad_reduce:
        hooks["no_sync_func"] = [chunk.no_sync for chunk in model]
        hooks["grad_sync_func"] = [chunk.start_grad_sync for chunk in model]
    if model[0].ddp_config.overlap_param_gather:
        hooks["param_sync_func"] = [chunk.start_param_sync for chunk in model]
    for name, by_chunk in hooks.items():
        setattr(config, name, by_chunk if len(model) > 1 else by_chunk[0])
