"""Self-attention: grouped-query, and multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), where keys and values
of all heads come from one narrow latent.

Legend: s tokens of a context-parallel rank, s' its part s / tp under sequence parallelism and s without; b rows; h
hidden size; n heads of this rank. A query and a key of latent attention have d_nope channels without rotary embedding
and then d_rope with it, a value has d_v.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatune.architecture import GlobalHeads
from megatune.engine.layers.norm import RMSNorm, UnweightedNorm, upcast
from megatune.engine.layers.rotary import fused_rotate, rotate, rotate_first
from megatune.engine.sequences import Sequences


class GroupedQueryAttention(SelfAttention):
    """Megatron-Core's self-attention with our rotary embedding: `engine.layers.rotary` supports YaRN and positions that
    restart within a row, and avoids copies and repeated computation of angles in each layer.

    Queries, keys and values are views of one projection, which is gathered if there are more tensor-parallel ranks than
    key/value heads. The tensors stored for the backward pass are copies, so the projection is freed before attention
    begins."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.value_layernorm = UnweightedNorm(config, config.layernorm_epsilon) if config.value_norms else None

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Sequences, **unused: Any
    ) -> tuple[Tensor, None]:
        """Project, rotate by `engine.layers.rotary.cos_sin`, attend, project: [s', b, h] to [s', b, h], and no bias."""
        query, key, value, *gate = self._project(hidden_states)
        if (channels := self.config.global_rotary_channels) is not None:  # windowed layers use other frequencies
            has_window = self.core_attention.window is not None
            rotary_pos_emb = rotary_pos_emb[..., channels:] if has_window else rotary_pos_emb[..., :channels]
        if not self._has_no_rope():
            turn = fused_rotate if self.config.apply_rope_fusion else rotate
            turn = functools.partial(turn, interleaved=self.config.rotary_interleaved)
            query, key = (rotate_first(turn, each, rotary_pos_emb) for each in (query, key))
        query = self._scaled(query, packed_seq_params)
        value = value.contiguous() if self.value_layernorm is None else self.value_layernorm(value.contiguous())
        recompute = self.checkpoint_core_attention and self.training
        context = attend(self.core_attention, (query, key, value), packed_seq_params, recompute=recompute)
        if gate:
            context = context * gate[0].flatten(2)
        output, bias = self.linear_proj(context)
        return output if bias is None else output + bias, None

    def _scaled(self, query: Tensor, sequences: Sequences) -> Tensor:
        """Scale queries [s, b, n, d] by their position-dependent factor; see `QueryScaling`."""
        scaling = self.config.query_scaling
        if scaling is None or sequences.longest <= scaling.length:
            return query
        growth = 1 + scaling.beta * torch.log1p((sequences.position_ids // scaling.length).float())
        return query * growth.to(query.dtype)[:, None, None, None]

    def _has_no_rope(self) -> bool:
        """Return whether the layer has no rotary embedding."""
        without_rope = self.config.no_rope_freq
        return bool(without_rope and without_rope[self.layer_number - 1])

    def _project(self, hidden_states: Tensor) -> Sequence[Tensor]:
        """Return query [s, b, n, d], key and value [s, b, g, d], and with an output gate its sigmoid [s, b, n, d].

        Checkpoints store a head's gate after its query; Megatron-Core expects all gates of a group after its queries.
        """
        config = self.config
        if config.keys_are_values:
            heads, sharing, turn = self._project_to_groups(hidden_states)
            query, key = heads[..., :-1, :].flatten(2, 3).chunk(sharing, 2)[turn], heads[..., -1, :]
            return self.q_layernorm(query), self.k_layernorm(key), key
        if not config.attention_output_gate:
            found: Sequence[Tensor] = self.get_query_key_value_tensors(hidden_states, None)
            return found
        heads, sharing, turn = self._project_to_groups(hidden_states)
        queries, key, value = heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]
        query, gate = queries.flatten(2, 3).unflatten(2, (-1, 2)).chunk(sharing, 2)[turn].unbind(3)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate.sigmoid()

    def _project_to_groups(self, hidden_states: Tensor) -> tuple[Tensor, int, int]:
        """Project to the rows of each key/value head and its queries, [s, b, g, heads of a group, d].

        Returns:
            The rows, the number of ranks that share a group's queries, and the index of this rank's part.
        """
        config, tp_size = self.config, self.world_size
        rows, groups = self.linear_qkv(hidden_states)[0], config.num_query_groups
        sharing = max(tp_size // groups, 1)  # ranks that share the rows of one group
        group, turn = divmod(self.pg_collection.tp.rank(), sharing)
        if sharing > 1:
            rows = tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(rows, group=self.pg_collection.tp)
            rows = rows.chunk(groups, -1)[group]
        size = self.hidden_size_per_attention_head
        return rows.unflatten(-1, (max(groups // tp_size, 1), -1, size)), sharing, turn


class GlobalAttention(torch.nn.Module):
    """Attention of layers without a window, if their heads differ from those of windowed layers.

    Args:
        heads: their sizes.
        submodules: of the attention; the QKV projection has no values if keys are values.
        options: of `GroupedQueryAttention`.
    """

    def __init__(self, config: Any, submodules: SelfAttentionSubmodules, heads: GlobalHeads, **options: Any) -> None:
        super().__init__()
        own = copy.copy(config)
        own.kv_channels, own.num_query_groups = heads.kv_channels, heads.num_query_groups
        own.keys_are_values = heads.keys_are_values
        if heads.keys_are_values:
            without = functools.partial(_narrower, submodules.linear_qkv, heads.kv_channels * heads.num_query_groups)
            submodules = dataclasses.replace(submodules, linear_qkv=without)
        self.global_heads = GroupedQueryAttention(own, submodules=submodules, **options)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """See `GroupedQueryAttention`."""
        found: tuple[Tensor, None] = self.global_heads(hidden_states, **kwargs)
        return found


def _narrower(build: Callable[..., torch.nn.Module], rows: int, inputs: int, outputs: int, **kwargs: Any) -> Any:
    """Build a linear layer with `rows` outputs fewer than requested."""
    return build(inputs, outputs - rows, **kwargs)


class HeadNorm(RMSNorm):
    """Norm of each head's query or key. The input is copied, since storing a view would keep the whole projection."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [s, b, n, channels of a head]."""
        return super().forward(hidden_states.contiguous())


class AllHeadsNorm(RMSNorm):
    """Norm over the channels of all heads' queries or keys, of which this rank has its own heads.

    Every rank holds the whole weight, and computes the gradient of its heads' part: Megatron-Core sums the gradients of
    query and key norms.

    Args:
        hidden_size: of a head.
        num_heads: of all ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__(config, num_heads * hidden_size, eps)
        self.num_heads = num_heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [s, b, n, channels of a head]."""
        group = get_tensor_model_parallel_group()
        n, channels = hidden_states.shape[-2:]
        wide = upcast(hidden_states)
        total = wide.square().sum((-2, -1), keepdim=True)
        if group.size() > 1:
            total = tensor_parallel.reduce_from_tensor_model_parallel_region(total, group=group)
            # Every rank normalizes by the sum, so its gradient is the sum over ranks.
            total = tensor_parallel.copy_to_tensor_model_parallel_region(total, group=group)
            total = total * (self.num_heads / (n * group.size()))  # several ranks may have the same key
        first = group.rank() * self.num_heads // group.size()
        weight = upcast(self.weight).view(self.num_heads, channels)[first : first + n]
        scale = torch.rsqrt(total / (self.num_heads * channels) + self.eps)
        return (wide * scale * weight).to(hidden_states.dtype)


class AllQueriesNorm(AllHeadsNorm):
    """AllHeadsNorm of queries."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_attention_heads)


class AllKeysNorm(AllHeadsNorm):
    """AllHeadsNorm of keys."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps, config.num_query_groups)


def attend(
    core_attention: torch.nn.Module, qkv: tuple[Tensor, Tensor, Tensor], sequences: Sequences, *, recompute: bool
) -> Tensor:
    """Apply core attention, optionally with recomputation in the backward pass.

    From query, key and value, [s, b, n, channels of a head], to [s, b, n · channels of a value].
    """
    compute = functools.partial(core_attention, packed_seq_params=sequences)
    context: Tensor = tensor_parallel.checkpoint(compute, False, *qkv) if recompute else compute(*qkv)
    return context


# Transformers' DeepseekV3Attention uses it for the latents, regardless of the checkpoint's rms_norm_eps.
LATENT_NORM_EPSILON = 1e-6


class ReplicatedLinear(torch.nn.Module):
    """A linear layer whose weight is replicated on every tensor-parallel rank.

    Without sequence parallelism all ranks have the same tokens and compute the same gradient. With it each has its own
    part, and Megatron-Core sums the gradients of weights with the attribute `sequence_parallel`.
    """

    def __init__(self, input_size: int, output_size: int, *, config: MLATransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project [..., input_size] to [..., output_size]."""
        return torch.nn.functional.linear(hidden_states, self.weight)


class MLASelfAttention(torch.nn.Module):
    """Multi-head latent self-attention, with the parameter names of Megatron-Core's.

    Megatron-Core's own rotary embeddings do not support the micro-batch's positions, and it shards the narrow down
    projections only to gather their outputs again.

    Args:
        layer_number: of this layer in the whole model, from 1.
        rope_interleaved: rotary embedding rotates adjacent channels.
        cp_comm_type: for the core attention.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        rope_interleaved: bool,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp_group = config, pg_collection.tp
        turn = fused_rotate if config.apply_rope_fusion else rotate
        self.rotate = functools.partial(turn, interleaved=rope_interleaved)
        recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_up_proj, self.recompute_core_attention = "mla_up_proj" in recomputed, "core_attn" in recomputed
        heads = config.num_attention_heads
        linear = {"config": config, "bias": False, "tp_group": self.tp_group}
        to_heads = {**linear, "init_method": config.init_method, "gather_output": False}

        def down(spec: Any, size: int) -> torch.nn.Module:
            return build_module(spec, config.hidden_size, size, config=config)

        def norm(spec: Any, size: int) -> torch.nn.Module:
            return build_module(spec, config=config, hidden_size=size, eps=LATENT_NORM_EPSILON)

        def up(spec: Any, size: int, channels: int) -> torch.nn.Module:
            return build_module(spec, size, heads * channels, **to_heads)

        q_rank, kv_rank, d_rope = config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim
        if q_rank is None:
            self.linear_q_proj = up(submodules.linear_q_proj, config.hidden_size, config.qk_head_dim + d_rope)
        else:
            self.linear_q_down_proj = down(submodules.linear_q_down_proj, q_rank)
            self.q_layernorm = norm(submodules.q_layernorm, q_rank)
            self.linear_q_up_proj = up(submodules.linear_q_up_proj, q_rank, config.qk_head_dim + d_rope)
        self.linear_kv_down_proj = down(submodules.linear_kv_down_proj, kv_rank + d_rope)
        self.kv_layernorm = norm(submodules.kv_layernorm, kv_rank)
        self.linear_kv_up_proj = up(submodules.linear_kv_up_proj, kv_rank, config.qk_head_dim + config.v_head_dim)
        out = {**linear, "init_method": config.output_layer_init_method, "input_is_parallel": True}
        self.linear_proj = build_module(
            submodules.linear_proj, heads * config.v_head_dim, config.hidden_size, **out, skip_bias_add=True
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            cp_comm_type=cp_comm_type,
        )

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Sequences, **unused: Any
    ) -> tuple[Tensor, None]:
        """Project down and up, attend, project; see GroupedQueryAttention."""
        latents = self._project_down(hidden_states)
        up = functools.partial(self._project_up, cos_sin=rotary_pos_emb)
        recompute_up = self.recompute_up_proj and self.training
        # None, since any other value, even False, requires Transformer Engine.
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None) if recompute_up else None
        qkv = checkpoint.checkpoint(up, *latents) if checkpoint else up(*latents)
        recompute = self.recompute_core_attention and self.training
        context = attend(self.core_attention, qkv, packed_seq_params, recompute=recompute)
        if checkpoint:
            checkpoint.discard_output_and_register_recompute(context)
        output, _ = self.linear_proj(context)
        return output, None

    def _project_down(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the query projection, [s', b, q_lora_rank] or `hidden_states`; the latent of keys and
        values, [s', b, kv_lora_rank]; and the part of the key that all heads share, [s, b, 1, d_rope]."""
        config = self.config
        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        sizes = config.kv_lora_rank, config.qk_pos_emb_head_dim
        latent, shared_key = self.linear_kv_down_proj(hidden_states).split(sizes, -1)
        # Its gradient comes from the heads of all tensor-parallel ranks, over which both functions sum it.
        whole = (
            tensor_parallel.gather_from_sequence_parallel_region
            if config.sequence_parallel
            else tensor_parallel.copy_to_tensor_model_parallel_region
        )
        return query_latent, self.kv_layernorm(latent), whole(shared_key, group=self.tp_group).unsqueeze(2)

    def _project_up(
        self, query_latent: Tensor, latent: Tensor, shared_key: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [s, b, n, d_nope + d_rope] and value [s, b, n, d_v], each contiguous."""
        config = self.config
        d_nope, d_rope, d_v = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        linear_q = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = self.rotate(linear_q(query_latent)[0].unflatten(-1, (-1, d_nope + d_rope)), cos_sin)
        key, value = self.linear_kv_up_proj(latent)[0].unflatten(-1, (-1, d_nope + d_v)).split([d_nope, d_v], -1)
        shared_key = self.rotate(shared_key, cos_sin).expand(*key.shape[:-1], d_rope)
        return query, torch.cat((key, shared_key), -1), value.contiguous()
