"""Builds the model of a layout: one factory, so that nothing else depends on where Megatron-Core keeps its classes."""

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
from megatune.engine.sequences import MTPTargets, Pictures, Sequences
from megatune.engine.specs import block_spec, mtp_spec
from megatune.engine.trained import add_adapters, detach_stage_input, freeze
from megatune.engine.transformer_config import transformer_config
from megatune.engine.weights import mark_weights
from megatune.families.weights import Weight, padded_vocab_size
from megatune.half_precision import multiply_in_fp32
from megatune.rope_scaling import LongRopeScaling

# A pipeline chunk as the rest of the project sees it. A frozen one is wrapped like a trained one, without buffers.
Chunk: TypeAlias = DistributedDataParallel


class DecoderModel(GPTModel):
    """One pipeline chunk of the decoder.

    Attributes:
        propagates_gradient: something before the chunk is trained: the stage before gets a gradient.
        input_requires_grad: what goes into the first layer has a gradient, whatever is before it.
        adapter_weights: entries of adapters beside its weights.
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
            # Rotary embeddings follow the positions of each micro-batch, below.
            position_embedding_type="none",
            # Features of pictures take their places in whole rows first.
            scatter_embedding_sequence_parallel=architecture.vision is None,
            # They need a word embedding where they are, a copy of the first stage's.
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
        # In the dtype of the embeddings, as Transformers has it.
        self.embedding_multiplier = torch.tensor(architecture.embedding_multiplier, dtype=config.params_dtype).item()
        self.noise_multiplier = architecture.noise_multiplier / architecture.hidden_size**0.5
        self.padding_token = architecture.padding_token
        self.logits_scaling, self.logits_softcap = architecture.logits_scaling, architecture.logits_softcap
        mrope = architecture.mrope
        self.mrope_axes = None if mrope is None else device.send(mrope_axes(mrope))
        size = self.vocab_size // tp_size
        # Rows of this rank's part of the vocabulary that are real; the rest only pads it.
        before = parallel_state.get_tensor_model_parallel_rank() * size
        self.num_vocabulary_rows = min(max(architecture.vocab_size - before, 0), size)
        self.score: Score | None = None
        if self.post_process and architecture.num_labels:
            del self.output_layer
            self.score = Score(self.config, architecture.num_labels)
        elif self.post_process:
            # GPTModel makes the layer itself. The subclass has no state of its own, only another way to call it.
            self.output_layer.__class__ = OutputLayer
            self.output_layer.num_vocabulary_rows = self.num_vocabulary_rows
            self.output_layer.softcap = self.logits_softcap
            if self.mtp_process and architecture.tie_word_embeddings:
                # The word embedding beside it is. As on one stage, it gets gradients from both.
                self.output_layer.weight = None
                self.embedding.word_embeddings.weight.zero_out_wgrad = True
        self.vision_features: VisionFeatures | None = None
        if self.pre_process and architecture.vision is not None:
            self._add_vision(architecture, architecture.vision)

    def _add_vision(self, architecture: Architecture, vision: Vision) -> None:
        # It imports Transformers, which models of text can do without.
        from megatune.engine.layers.vision.tower import Tower, build_encoder

        encoder = build_encoder(architecture, self.config).to(self.config.params_dtype)
        # First, as it computes first: buckets of gradients are made in this order, backward.
        decoder = dict(self._modules)
        self._modules.clear()
        self.vision_model = encoder
        self._modules.update(decoder)
        self.vision_features = VisionFeatures(Tower(encoder, vision, self.config), vision)

    def _set_attention_backend(self) -> None:
        """Megatron-Core sets Transformer Engine's environment here; the core attention reads the configuration."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        sequences: Sequences,
        labels: Tensor | None = None,
        pictures: Pictures | None = None,
        head: Head = PLAIN,
        mtp_targets: MTPTargets | None = None,
    ) -> Tensor:
        """Compute this chunk's layers.

        Args:
            input_ids: int64 [b, s / cp].
            labels: int64 [b, s / cp], below 0 where a token is not trained; None asks for logits.
            pictures: of the whole micro-batch, on the host.
            head: what the last chunk computes of labels.
            mtp_targets: of a model that predicts further tokens, what it is to predict: losses of these are put behind
                all that is computed of labels, [b, s / cp, 2] of a plain head.

        Returns:
            Hidden states [s / cp (/ tp), b, h] for the next chunk; from the last one the loss of each token, fp32
            [b, s / cp], 0 where it is not trained (with its entropy [b, s / cp, 2], see `token_losses`, or in its place
            what else a head asks for), or logits [b, s / cp, padded vocabulary / tp], or, where the head asks for it,
            what goes into the output layer, [s / cp (/ tp), b, h]; with a score in its place the scores of each
            token, fp32 [b, s / cp], or [b, s / cp, labels] of several, with labels or without.
        """
        embeddings, deepstack = self._embed(input_ids, sequences, pictures) if self.pre_process else (None, None)
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

    def _embed(
        self, input_ids: Tensor, sequences: Sequences, pictures: Pictures | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [s / cp (/ tp), b, h], of pictures their features; and the layers' `context`."""
        features = self.vision_features(pictures) if self.vision_features is not None else None
        embeddings, deepstack = self._word_embeddings(input_ids), None
        if sequences.noise is not None:
            embeddings = self._with_noise(embeddings, sequences.noise, sequences.lengths)
        if self.vision_features is None:
            return embeddings, None
        if features is not None:
            embeddings, deepstack = place_features(features, embeddings, pictures, sequences.boundaries)
        if not self.config.sequence_parallel:
            return embeddings, deepstack
        # Clones: parts of whole rows would keep them in memory.
        embeddings = scatter_to_sequence_parallel_region(embeddings).clone()
        return embeddings, None if deepstack is None else scatter_to_sequence_parallel_region(deepstack).clone()

    def _word_embeddings(self, input_ids: Tensor) -> Tensor:
        """Return embeddings [s / cp (/ tp), b, h]; as in Transformers, that of the padding token, which may end every
        answer too, gets no gradient."""
        embeddings: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        if self.padding_token is not None and embeddings.requires_grad:
            is_padding = (input_ids == self.padding_token).t()[..., None]
            if len(embeddings) < len(is_padding):
                is_padding = scatter_to_sequence_parallel_region(is_padding)
            embeddings.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0))
        return embeddings if self.embedding_multiplier == 1 else embeddings * self.embedding_multiplier

    def _with_noise(self, embeddings: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        """Return word embeddings with noise of up to alpha / √(L · h), where L is the length of a token's document."""
        alpha = self.config.neftune_noise_alpha * self.noise_multiplier
        keys, largest = keys.t(), (alpha / lengths.clamp(min=1).sqrt()).expand_as(keys).t()
        if len(embeddings) < len(keys):
            keys, largest = map(scatter_to_sequence_parallel_region, (keys, largest))
        return with_noise(embeddings, keys, largest)

    def _first_layer_input(self, embeddings: Tensor | None) -> Tensor:
        """Return what goes into the first layer: embeddings, or what the stage before sent; with a gradient where one
        is needed, and only there."""
        hidden_states: Tensor = self.decoder.input_tensor if embeddings is None else embeddings
        if not torch.is_grad_enabled():
            return hidden_states
        if not self.propagates_gradient:
            hidden_states = detach_stage_input(hidden_states)
            self.decoder.set_input_tensor(hidden_states)
        return hidden_states.requires_grad_() if self.input_requires_grad else hidden_states

    def head(self, hidden_states: Tensor, labels: Tensor | None, trained: Tensor, head: Head = PLAIN) -> Tensor:
        """Compute from the last layer's [s (/ tp), b, h] what `forward` returns: scores, logits, or losses of labels.

        Args:
            trained: int64 [n], places of the trained tokens in the flattened labels.
            head: one that is not plain is computed fused with the output layer, whatever the settings say.
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
        """This rank's part of the output layer, [padded vocabulary / tp, h]; of the last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _rotary_embedding(self, sequences: Sequences) -> Tensor:
        """Compute cosine and sine once for all layers, [2, s / cp, 1, 1, channels]; of each row, with pictures or where
        long documents have other angles, [2, s / cp, b, 1, channels]. Where layers with a window have angles of their
        own, their channels come behind."""
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
        """Compute cross-entropy over the real vocabulary from all logits: what `cross_entropy_loss_fusion` replaces.

        From int64 [b, s], below 0 where a token is not trained, and [s, b, padded vocabulary / tp] to fp32 [b, s].
        """
        if self.num_vocabulary_rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.num_vocabulary_rows :] = torch.finfo(logits.dtype).min
        return super().compute_language_model_loss(labels.clamp(min=0), logits) * (labels >= 0)


def build_model(architecture: Architecture, settings: Settings, *, trained: bool = True) -> list[Chunk]:
    """Build this rank's pipeline chunks, in order, in Megatron-Core's DDP. Weights are uninitialized: load them next.

    `engine.groups.build` comes first. Each call has a configuration of its own, so that several models share the groups
    and nothing else.

    Args:
        trained: False freezes all parameters; they have no gradient buffers, and the model is in eval mode.
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
            # What a pipeline stage receives asks for a gradient.
            chunk.forward = torch.no_grad()(chunk.forward)
        if ddp_config.use_distributed_optimizer:
            _free_parameters(chunk)
        chunks.append(chunk)
    model = [
        # The first chunk's buckets overlap with the later chunks' backward passes; those go out as one.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    _set_overlaps(config, model)
    return model


def _free_parameters(chunk: torch.nn.Module) -> None:
    """Free the memory of parameters that DDP will map into its buffers; until then it would hold both.

    A parameter keeps its shape: each of its elements is one and the same.
    """
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.new_zeros(()).expand(parameter.shape)
    torch.cuda.empty_cache()


def gather_parameters(model: list[Chunk]) -> None:
    """Bring parameters up to date that the distributed optimizer has updated and not yet sent to the other ranks.

    With overlap_param_gather they are sent during the next forward pass of training; evaluation and saving, which read
    them before, call this first.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _set_overlaps(config: TransformerConfig, model: list[Chunk]) -> None:
    """Let the pipeline schedules start and hold back communication of gradients and parameters."""
    hooks: dict[str, list[Callable[..., Any]]] = {}
    if model[0].ddp_config.overlap_grad_reduce:
        hooks["no_sync_func"] = [chunk.no_sync for chunk in model]
        hooks["grad_sync_func"] = [chunk.start_grad_sync for chunk in model]
    if model[0].ddp_config.overlap_param_gather:
        hooks["param_sync_func"] = [chunk.start_param_sync for chunk in model]
    for name, by_chunk in hooks.items():
        setattr(config, name, by_chunk if len(model) > 1 else by_chunk[0])
