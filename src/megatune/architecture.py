"""The hyperparameters of a decoder, under Megatron-Core's names, for all families."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from megatune.encoders import Vision
from megatune.rope_scaling import MultimodalRope, QueryScaling, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Mixture-of-experts layers: a router sends each token to its top-k experts.

    Attributes:
        layers: for each layer, whether it is sparse; the others have a dense feed-forward.
        moe_ffn_hidden_size: of one routed expert.
        shared_expert_intermediate_size: of all shared experts together; 0 without them.
        shared_expert_gate: a sigmoid gate multiplies the shared experts' output (Qwen2-MoE).
        score_function: of the router's logits.
        pre_softmax: the softmax is over all experts, and the probabilities of the chosen ones are used unchanged;
            otherwise the weights of the chosen experts are normalized to sum 1. Always False for "sigmoid".
        num_groups, group_topk: experts are chosen from the best groups only (DeepSeek-V3); 0 if not.
        topk_scaling_factor: multiplies the weights of the chosen experts.
        group_best: the score of a group is the sum of this many of its best experts.
        expert_bias: a bias affects the choice of experts, but not their weights (DeepSeek-V3).
        router_dtype: the dtype of the router's logits in the family; None for the dtype of the model.
        aux_loss_coeff: weight of the balancing loss in config.json; 0 if there is none.
        swiglu_limit: gates are clamped to at most this and ups to plus and minus this, an expert computes (up + 1) ·
            gate · sigmoid(1.702 · gate), and rows of gates and ups alternate (gpt-oss); None for SwiGLU.
        scaled_router: the router normalizes its input and multiplies it by a learned vector / √h, and each expert's
            output is multiplied by a learned scalar (Gemma 4).
        separate_norms: the shared expert and the routed experts have separate norms, before and after them, and the
            router reads the residual stream (Gemma 4).
    """

    layers: tuple[bool, ...]
    num_experts: int
    router_topk: int
    moe_ffn_hidden_size: int
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    group_best: int = 2
    topk_scaling_factor: float = 1.0
    expert_bias: bool = False
    router_dtype: Literal["fp32"] | None = None
    aux_loss_coeff: float = field(default=0.0, compare=False)  # models that differ only in it compute the same
    swiglu_limit: float | None = None
    scaled_router: bool = False
    separate_norms: bool = False

    @property
    def gate_up_size(self) -> int:
        """Rows of an expert's fused projection to gates and ups."""
        return 2 * self.moe_ffn_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLatentAttention:
    """Multi-head latent attention: keys and values come from one low-rank latent per token (DeepSeek-V2,
    arXiv:2405.04434).

    Attributes:
        q_lora_rank: width of the queries' latent; None if queries are projected directly.
        kv_lora_rank: width of the latent of keys and values.
        qk_head_dim: channels of a head's query and key without rotary embedding.
        qk_pos_emb_head_dim: channels of a head's query, and of the one key that all heads share, with it.
        v_head_dim: channels of a head's value.
        softmax_scale: multiplies the scores.
        rope_interleaved: rotary embedding pairs adjacent channels, not those half the dimension apart.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_interleaved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalHeads:
    """Heads of layers without a window, if they differ from those of layers with one (Gemma 4).

    Attributes:
        kv_channels: dimension of one head.
        num_query_groups: number of key/value heads.
        keys_are_values: there is no value projection: a head's value is its key before the key's norm.
    """

    kv_channels: int
    num_query_groups: int
    keys_are_values: bool = False


class LayerKind(NamedTuple):
    """The kind of a decoder layer.

    Attributes:
        delta: it has a gated delta net instead of attention.
        sparse: it has experts.
        has_global_heads: its attention has the heads of layers without a window.
        window: the number of tokens that a query attends to, including its own; None for all.
        mtp: it is a multi-token prediction layer after the decoder.
    """

    delta: bool = False
    sparse: bool = False
    has_global_heads: bool = False
    window: int | None = None
    mtp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated delta nets (arXiv:2412.06464), instead of attention in some layers (Qwen3-Next).

    Attributes:
        layers: for each layer, whether it has one; the others have attention.
        num_key_heads: heads of queries and of keys.
        num_value_heads: a multiple of num_key_heads; consecutive ones share a key head.
        conv_kernel_size: of the convolution before the delta rule, in tokens.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int

    @property
    def values_per_key(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all values, and of their gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def qkvz_size(self) -> int:
        """Rows of the projection to queries, keys, values and gates."""
        return self.conv_size + self.value_size

    @property
    def ba_size(self) -> int:
        """Rows of the projection to beta and alpha, which correct and decay the state."""
        return 2 * self.num_value_heads

    @property
    def rows_of_key_head(self) -> int:
        """Rows of both projections that belong to a key head."""
        return (self.qkvz_size + self.ba_size) // self.num_key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with rotary embeddings, RMSNorm and SwiGLU.

    Attributes:
        model_type: the Hugging Face model_type, which names the family.
        kv_channels: dimension of an attention head; not always hidden_size / num_attention_heads.
        num_query_groups: number of key/value heads.
        add_qkv_bias: biases on the q, k and v projections.
        add_bias_linear: biases on the output projection of attention, on the router and on both projections of experts;
            no layer has a dense feed-forward.
        attention_sinks: each head has one learned score without a value, for all its queries (arXiv:2309.17453, section
            3.3).
        rotary_channels: how many of a head's first channels have rotary embedding; None for all.
        rope_interleaved: rotary embedding pairs adjacent channels, not those half the dimension apart.
        no_rope_layers: layers, counted from 0, whose attention has no rotary embedding.
        windows: for each layer, the number of tokens that a query attends to, including its own; None for all. ()
            without windows.
        local_rotary_base: of layers with a window, whose rotary embedding is not scaled; None for that of all layers.
        activation: of the gates of the feed-forward.
        wide_qk_norms: with qk_layernorm, the norm is over the channels of all heads together.
        pre_norms: inputs of attention and feed-forward are normalized.
        post_norms: outputs of attention and feed-forward are normalized before they are added.
        query_scaling: None if queries are not scaled by their positions.
        global_heads: heads of layers without a window, if they differ; the other attributes then describe layers with a
            window.
        value_norms: each head's value is normalized, without a weight.
        layer_scalars: the output of a layer is multiplied by a loaded, untrained scalar.
        softmax_scale: multiplies attention scores; None for kv_channels^-0.5. `mla` has its own.
        embedding_multiplier, residual_multiplier: of word embeddings, and of the outputs of attention and feed-forward.
        noise_multiplier: of noise on word embeddings, which Transformers adds before or after multiplying them.
        padding_token: the token whose word embedding gets no gradient as an input; None if there is none.
        logits_scaling: divides the logits.
        logits_softcap: logits x become softcap · tanh(x / softcap); None for no soft cap.
        zero_centered_norms: a norm multiplies by 1 + its weight.
        attention_output_gate: each head's output is multiplied by the sigmoid of a gate, which follows the head's query
            in the query projection.
        qk_layernorm: an RMSNorm over each head's query and key, before rotary embedding.
        tie_word_embeddings: the output layer is the word embedding, transposed.
        torch_dtype: the dtype of the published checkpoint ("bfloat16", "float16", "float32").
        delta: None if every layer has attention.
        moe: None for a dense model.
        mla: None for grouped-query attention. With it, kv_channels is the number of channels with rotary embedding.
        vision: None for a language model.
        max_position_embeddings: positions that the rotary embeddings support, with any scaling.
        mrope: None if rotary embeddings use one position.
        has_classifier: Transformers has a sequence-classification model of this family, which reward models are saved
            as.
        num_labels: outputs of the score layer that replaces the output layer, 1 for a reward model; 0 for a language
            model.
        mtp_num_layers: trained multi-token prediction layers after the decoder, numbered after its layers; 0 if those
            of the checkpoint are not used.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | None = None
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    attention_sinks: bool = False
    rotary_channels: int | None = None
    rope_interleaved: bool = False
    no_rope_layers: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    local_rotary_base: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    wide_qk_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    query_scaling: QueryScaling | None = None
    global_heads: GlobalHeads | None = None
    value_norms: bool = False
    layer_scalars: bool = False
    softmax_scale: float | None = None
    embedding_multiplier: float = 1.0
    noise_multiplier: float = 1.0
    padding_token: int | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logits_softcap: float | None = None
    zero_centered_norms: bool = False
    attention_output_gate: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    torch_dtype: str = "bfloat16"
    delta: DeltaNet | None = None
    moe: MixtureOfExperts | None = None
    mla: MultiLatentAttention | None = None
    vision: Vision | None = None
    mrope: MultimodalRope | None = None
    has_classifier: bool = True
    num_labels: int = 0
    mtp_num_layers: int = 0

    def __hash__(self) -> int:
        """Hash some of the values only, as it is a key of many caches."""
        return hash((self.model_type, self.num_layers, self.hidden_size, self.ffn_hidden_size, self.vocab_size))

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, is sparse."""
        return self.moe is not None and self.moe.layers[layer]

    def is_delta_layer(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has a gated delta net instead of attention."""
        return self.delta is not None and self.delta.layers[layer]

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of this layer, counted from 0."""
        if layer >= self.num_layers:
            return LayerKind(sparse=self.moe is not None, mtp=True)
        window = self.windows[layer] if self.windows else None
        has_global_heads = self.global_heads is not None and window is None
        return LayerKind(self.is_delta_layer(layer), self.is_moe_layer(layer), has_global_heads, window)

    def of_heads(self, has_global_heads: bool) -> Architecture:
        """Return the architecture whose main heads are those of layers without a window, or with one."""
        heads = self.global_heads
        if heads is None or not has_global_heads:
            return self
        return replace(self, kv_channels=heads.kv_channels, num_query_groups=heads.num_query_groups)

    @property
    def global_query_size(self) -> int:
        """Rows of the query projection of layers without a window, with `global_heads`."""
        return self.of_heads(True).query_size

    @property
    def global_key_value_size(self) -> int:
        """Rows of their key projection, and of their value projection if they have one."""
        return self.of_heads(True).key_value_size

    @property
    def bidirectional_images(self) -> bool:
        """Whether image tokens also attend to later tokens of the same image."""
        return self.vision is not None and self.vision.whole

    @property
    def merges_attention(self) -> bool:
        """Whether attention needs a kernel that returns the log-sum-exp, in any layout."""
        return self.attention_sinks or self.bidirectional_images

    @property
    def concatenated_size(self) -> int:
        """Columns of the projection of an MTP layer: an embedding and a hidden state."""
        return 2 * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Channels of a head with rotary embedding."""
        return self.rotary_channels or self.kv_channels

    @property
    def gated_query_size(self) -> int:
        """Rows of the query projection with the gates of its output."""
        return self.query_size * (1 + self.attention_output_gate)

    @property
    def query_size(self) -> int:
        """Rows of the query projection; with `mla`, of the up-projection."""
        if self.mla is None:
            return self.num_attention_heads * self.kv_channels
        return self.num_attention_heads * (self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim)

    @property
    def attention_size(self) -> int:
        """Columns of the output projection: the channels of all heads' values."""
        return self.query_size if self.mla is None else self.num_attention_heads * self.mla.v_head_dim

    @property
    def key_value_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_query_groups * self.kv_channels

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection to queries, keys and values."""
        return self.query_size + 2 * self.key_value_size

    @property
    def gate_up_size(self) -> int:
        """Rows of the fused projection to gates and ups of the dense feed-forward."""
        return 2 * self.ffn_hidden_size

    @property
    def latent_size(self) -> int:
        """Rows of the projection to the latent of keys and values and the shared rotary key; with `mla` only."""
        assert self.mla is not None
        return self.mla.kv_lora_rank + self.mla.qk_pos_emb_head_dim

    @property
    def latent_key_value_size(self) -> int:
        """Rows of the projection from the latent to all heads' keys and values; with `mla` only."""
        assert self.mla is not None
        return self.num_attention_heads * (self.mla.qk_head_dim + self.mla.v_head_dim)
