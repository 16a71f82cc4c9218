"""Declarations of the demo families: model type, special tokens, pre-tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatune.demo.vision import GEMMA4, INTERN_VIT, PIXTRAL, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, SIGLIP, DemoVision
from megatune.errors import ExitCode, Finding, MegatuneError, closest


class SpecialToken(NamedTuple):
    """A token added to the byte-pair vocabulary. `skip_special_tokens` drops special ones, but not <think>, for
    example."""

    text: str
    special: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFamily:
    """A small version of a published model family.

    Attributes:
        model_type: Transformers' model_type.
        tokenizer_class: the class named in tokenizer_config.json.
        chat_template: name of the file in templates/.
        digits_per_token: the maximum number of digits per token.
        nfc: whether text is first normalized to NFC.
        added_tokens: in the order of their ids, after the byte-pair vocabulary.
        bos_token: first token of every encoded text; None without one.
        stop_tokens: tokens that end generation, eos_token first.
        tie_word_embeddings: as in the family's best-known small models.
        llama3_rope_scaling: rotary embeddings are scaled as in Llama 3.1.
        wide_heads: head_dim is twice hidden_size / num_attention_heads, so that code that assumes equality fails.
        has_experts: feed-forwards are mixtures of experts.
        has_latent_attention: it has multi-head latent attention, and YaRN scaling.
        has_delta_nets: every second layer has a gated delta net, and half of a head's channels have rotary embedding.
        vision: None for a language model.
        own: arguments of its configuration class that other families do not have, or have with another default.
    """

    model_type: str
    tokenizer_class: str
    chat_template: str
    digits_per_token: int
    nfc: bool
    added_tokens: tuple[SpecialToken, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str | None
    stop_tokens: tuple[str, ...]
    tie_word_embeddings: bool
    rope_theta: float
    norm_epsilon: float
    llama3_rope_scaling: bool = False
    wide_heads: bool = False
    has_experts: bool = False
    has_latent_attention: bool = False
    has_delta_nets: bool = False
    vision: DemoVision | None = None
    own: Mapping[str, Any] = field(default_factory=dict)


def _special(*texts: str) -> tuple[SpecialToken, ...]:
    return tuple(SpecialToken(text) for text in texts)


def _visible(*texts: str) -> tuple[SpecialToken, ...]:
    return tuple(SpecialToken(text, special=False) for text in texts)


_VISION_MARKS = _special(
    "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_CODE_AND_TOOL_MARKS = _visible(
    "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
_QWEN2_VL_TOKENS = (
    *_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *_special("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *_VISION_MARKS,
)
_QWEN2_TOKENS = (*_QWEN2_VL_TOKENS, *_CODE_AND_TOOL_MARKS)
# The published list continues with reserved tokens up to 256, which have no meaning and would fill a tiny vocabulary.
_LLAMA3_RESERVED_AND_HEADERS = _special(
    "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip

_DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"
_DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"

_QWEN2 = DemoFamily(
    model_type="qwen2", tokenizer_class="Qwen2Tokenizer", chat_template="qwen2.jinja", digits_per_token=1, nfc=True,
    added_tokens=_QWEN2_TOKENS, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
    stop_tokens=("<|im_end|>", "<|endoftext|>"), tie_word_embeddings=True, rope_theta=1_000_000.0, norm_epsilon=1e-6,
)  # fmt: skip
_QWEN3 = replace(
    _QWEN2, model_type="qwen3", chat_template="qwen3.jinja",
    added_tokens=(*_QWEN2_TOKENS, *_visible("<tool_response>", "</tool_response>", "<think>", "</think>")),
    wide_heads=True,
)  # fmt: skip
_QWEN2_VL = replace(
    _QWEN2, model_type="qwen2_vl", chat_template="qwen2_vl.jinja", added_tokens=_QWEN2_VL_TOKENS, vision=QWEN2_VL
)
_QWEN3_VL = replace(
    _QWEN3, model_type="qwen3_vl", chat_template="qwen3_vl.jinja", rope_theta=5_000_000.0, vision=QWEN3_VL
)
_QWEN3_5 = replace(
    _QWEN3_VL, model_type="qwen3_5", rope_theta=10_000_000.0, has_delta_nets=True,
    vision=replace(QWEN3_VL, deepstack=False),
)  # fmt: skip
_LLAMA = DemoFamily(
    model_type="llama",
    tokenizer_class="PreTrainedTokenizerFast",
    chat_template="llama3.jinja",
    digits_per_token=3,
    nfc=False,
    added_tokens=(*_special("<|begin_of_text|>", "<|end_of_text|>"), *_LLAMA3_RESERVED_AND_HEADERS),
    bos_token="<|begin_of_text|>",
    eos_token="<|eot_id|>",
    pad_token=None,  # the published tokenizer has none
    stop_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    tie_word_embeddings=False,
    rope_theta=500_000.0,
    norm_epsilon=1e-5,
    llama3_rope_scaling=True,
)
_DEEPSEEK_V3 = DemoFamily(
    model_type="deepseek_v3",
    tokenizer_class="PreTrainedTokenizerFast",
    chat_template="deepseek_v3.jinja",
    digits_per_token=3,
    nfc=False,
    # Without the published list's 800 placeholders.
    added_tokens=(
        *_special(_DEEPSEEK_BOS, _DEEPSEEK_EOS, "<｜▁pad▁｜>"),
        *_visible("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>"),
        *_special("<|EOT|>"),
        *_visible(*(f"<｜tool▁{part}▁{end}｜>" for part in ("calls", "call", "outputs", "output")
                    for end in ("begin", "end"))),
        *_visible("<｜tool▁sep｜>"),
    ),
    bos_token=_DEEPSEEK_BOS,
    eos_token=_DEEPSEEK_EOS,
    pad_token=_DEEPSEEK_EOS,
    stop_tokens=(_DEEPSEEK_EOS,),
    tie_word_embeddings=False,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    has_experts=True,
    has_latent_attention=True,
)  # fmt: skip
_DEEPSEEK_R1 = replace(_DEEPSEEK_V3, chat_template="deepseek_r1.jinja", has_experts=False, has_latent_attention=False)

_MISTRAL = replace(
    _LLAMA, model_type="mistral", chat_template="mixtral.jinja", digits_per_token=1,
    added_tokens=_special("<s>", "</s>"), bos_token="<s>", eos_token="</s>", stop_tokens=("</s>",),
    rope_theta=1_000_000.0, llama3_rope_scaling=False,
)  # fmt: skip
_MINISTRAL3 = replace(
    _MISTRAL,
    model_type="ministral3",
    chat_template="ministral3.jinja",
    digits_per_token=3,
    added_tokens=_special(
        "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]", "[ARGS]",
    ),
    pad_token="<pad>",
)  # fmt: skip
_GLM4_MOE = replace(
    _QWEN3,
    model_type="glm4_moe",
    tokenizer_class="PreTrainedTokenizerFast",
    chat_template="glm4_moe.jinja",
    nfc=False,
    added_tokens=(
        *_special("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *_visible("<think>", "</think>"),
    ),
    eos_token="<|endoftext|>",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    tie_word_embeddings=False,
    norm_epsilon=1e-5,
    has_experts=True,
    own={"use_qk_norm": True, "partial_rotary_factor": 0.5},
)
_GLM = replace(
    _GLM4_MOE, model_type="glm", has_experts=False, norm_epsilon=1.5625e-7, wide_heads=False,
    own={"partial_rotary_factor": 0.5, "attention_bias": True},
)  # fmt: skip
_SEED_OSS = replace(
    _LLAMA, model_type="seed_oss", chat_template="seed_oss.jinja", digits_per_token=1,
    added_tokens=_special("<seed:bos>", "<seed:pad>", "<seed:eos>"), bos_token=None, eos_token="<seed:eos>",
    pad_token="<seed:pad>", stop_tokens=("<seed:eos>",), rope_theta=10_000_000.0, norm_epsilon=1e-6,
    llama3_rope_scaling=False, wide_heads=True, own={"attention_dropout": 0.0, "residual_dropout": 0.0},
)  # fmt: skip
_GEMMA3 = replace(
    _SEED_OSS, model_type="gemma3_text", chat_template="gemma3.jinja",
    added_tokens=_special("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), bos_token="<bos>",
    eos_token="<eos>", pad_token="<pad>", stop_tokens=("<eos>", "<end_of_turn>"), tie_word_embeddings=True,
    own={"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
)  # fmt: skip
_GEMMA4 = replace(
    _GEMMA3,
    model_type="gemma4_text",
    chat_template="gemma4.jinja",
    added_tokens=_special("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"),
    stop_tokens=("<eos>", "<turn|>"),
    own={
        "sliding_window": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
)
_OLMO3 = replace(
    _SEED_OSS, model_type="olmo3", chat_template="smollm3.jinja", digits_per_token=3,
    added_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"), eos_token="<|im_end|>",
    pad_token="<|pad|>", stop_tokens=("<|im_end|>", "<|endoftext|>"), rope_theta=500_000.0, wide_heads=False,
    own={"sliding_window": 16},
)  # fmt: skip
_ERNIE4_5 = replace(
    _MISTRAL, model_type="ernie4_5", chat_template="ernie4_5.jinja",
    added_tokens=_special("<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>"),
    stop_tokens=("</s>", "<|end_of_sentence|>"), tie_word_embeddings=True, rope_theta=500_000.0,
)  # fmt: skip

_MIXTURE: dict[str, Any] = {"tie_word_embeddings": False, "has_experts": True}

# fmt: off
FAMILIES: dict[str, DemoFamily] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "deepseek_r1_distill_qwen": replace(
        _DEEPSEEK_R1, model_type="qwen2", digits_per_token=1, nfc=True,
        added_tokens=(
            *_special(_DEEPSEEK_EOS),
            *_visible("<｜User｜>", "<｜Assistant｜>"),
            *_special(_DEEPSEEK_BOS),
            *_visible("<|EOT|>", "<think>", "</think>"),
            *_VISION_MARKS,
            *_CODE_AND_TOOL_MARKS,
        ),
    ),
    "deepseek_r1_distill_llama": replace(
        _DEEPSEEK_R1, model_type="llama",
        added_tokens=(
            *_special(_DEEPSEEK_BOS, _DEEPSEEK_EOS),
            *_LLAMA3_RESERVED_AND_HEADERS,
            *_visible("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
            *_special("<｜▁pad▁｜>"),
        ),
        rope_theta=500_000.0, norm_epsilon=1e-5, llama3_rope_scaling=True,
    ),
    "qwen2_moe": replace(
        _QWEN2, model_type="qwen2_moe", chat_template="qwen2_moe.jinja",
        added_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **_MIXTURE,
    ),
    "qwen3_moe": replace(_QWEN3, model_type="qwen3_moe", **_MIXTURE),
    "mistral": replace(_MISTRAL, own={"sliding_window": None}),
    "ministral3": _MINISTRAL3,
    "mixtral": replace(_MISTRAL, model_type="mixtral", has_experts=True),
    "seed_oss": _SEED_OSS,
    "granite": replace(
        _SEED_OSS, model_type="granite", chat_template="granite.jinja",
        added_tokens=_special("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>", stop_tokens=("<|end_of_text|>",), tie_word_embeddings=True, wide_heads=False,
        own={
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": replace(
        _SEED_OSS, model_type="smollm3", chat_template="smollm3.jinja", digits_per_token=3,
        added_tokens=(*_special("<|im_start|>", "<|im_end|>"), *_visible("<think>", "</think>")),
        eos_token="<|im_end|>", pad_token="<|im_end|>", stop_tokens=("<|im_end|>",), tie_word_embeddings=True,
        rope_theta=5_000_000.0, wide_heads=False, own={"no_rope_layer_interval": 2},
    ),
    "phi3": replace(
        _SEED_OSS, model_type="phi3", chat_template="phi4.jinja", digits_per_token=3,
        added_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"), eos_token="<|im_end|>",
        pad_token="<|endoftext|>", stop_tokens=("<|im_end|>", "<|endoftext|>"), rope_theta=250_000.0, norm_epsilon=1e-5,
        wide_heads=False, own={},
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, model_type="glm4"),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": replace(
        _GLM4_MOE, model_type="glm4_moe_lite", wide_heads=False, has_latent_attention=True, own={}
    ),
    "hy_v3": replace(_QWEN3, model_type="hy_v3", **_MIXTURE, rope_theta=11_158_840.0, norm_epsilon=1e-5),
    "ernie4_5": _ERNIE4_5,
    "ernie4_5_moe": replace(_ERNIE4_5, model_type="ernie4_5_moe", has_experts=True),
    "dots1": replace(_QWEN3, model_type="dots1", own={"norm_topk_prob": True, "sliding_window": None}, **_MIXTURE),
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_text_moe": replace(_GEMMA4, has_experts=True),
    "gemma4": replace(
        _GEMMA4, model_type="gemma4", added_tokens=_GEMMA4.added_tokens
        + _special("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
        own={**_GEMMA4.own, "use_bidirectional_attention": "vision"}, vision=GEMMA4,
    ),
    "gemma3": replace(
        _GEMMA3, model_type="gemma3",
        added_tokens=_GEMMA3.added_tokens + _special("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        vision=SIGLIP,
    ),
    "olmo2": replace(_OLMO3, model_type="olmo2", own={}),
    "olmo3": _OLMO3,
    "olmoe": replace(_OLMO3, model_type="olmoe", has_experts=True, own={}),
    "exaone4": replace(_OLMO3, model_type="exaone4", own={"sliding_window": 16, "sliding_window_pattern": 2}),
    "minimax_m2": replace(
        _GLM4_MOE, model_type="minimax_m2", chat_template="minimax_m2.jinja",
        added_tokens=(*_special("]~!b[", "]~b]", "[e~["), *_visible("<think>", "</think>")), bos_token="]~!b[",
        eos_token="[e~[", pad_token="[e~[", stop_tokens=("[e~[",), rope_theta=5_000_000.0,
        own={"partial_rotary_factor": 0.5},
    ),
    "gpt_oss": replace(
        _SEED_OSS, model_type="gpt_oss", chat_template="gpt_oss.jinja", digits_per_token=3,
        added_tokens=(
            *_special("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *_special("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        eos_token="<|return|>", pad_token="<|endoftext|>", stop_tokens=("<|return|>", "<|endoftext|>", "<|call|>"),
        rope_theta=150_000.0, norm_epsilon=1e-5, has_experts=True, own={"sliding_window": 16},
    ),
    "deepseek_v2": replace(_DEEPSEEK_V3, model_type="deepseek_v2", chat_template="deepseek_v2.jinja"),
    "qwen3_5_text": replace(_QWEN3_5, model_type="qwen3_5_text", chat_template="qwen3.jinja", vision=None),
    "qwen3_5_moe_text": replace(
        _QWEN3_5, model_type="qwen3_5_moe_text", chat_template="qwen3.jinja", vision=None, **_MIXTURE
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(
        _DEEPSEEK_V3, model_type="kimi_k2", chat_template="kimi_k2.jinja",
        added_tokens=_special(
            "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[PAD]"
        ),
        bos_token=None, eos_token="<|im_end|>", pad_token="[PAD]", stop_tokens=("<|im_end|>",), rope_theta=50_000.0,
        own={"n_group": 1, "topk_group": 1},
    ),
    "qwen3_next": replace(_QWEN3, model_type="qwen3_next", **_MIXTURE, rope_theta=10_000_000.0, has_delta_nets=True),
    "mistral3": replace(_MINISTRAL3, model_type="mistral3", vision=PIXTRAL),
    "internvl": replace(
        _QWEN3, model_type="internvl", chat_template="internvl.jinja",
        added_tokens=(*_QWEN3.added_tokens, *_special("<img>", "</img>", "<IMG_CONTEXT>", "<video>")),
        tie_word_embeddings=False, vision=INTERN_VIT,
    ),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": replace(_QWEN2_VL, model_type="qwen2_5_vl", added_tokens=_QWEN2_TOKENS, vision=QWEN2_5_VL),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, model_type="qwen3_vl_moe", **_MIXTURE),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, model_type="qwen3_5_moe", **_MIXTURE),
}
# fmt: on


def demo_family(name: str) -> DemoFamily:
    """Return the declaration of a family.

    Raises:
        MegatuneError: SETTINGS, if there is no demo family of this name.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    what, why = f"unknown demo family '{name}'", f"the demo families are {', '.join(FAMILIES)}"
    finding = Finding(what, "--family", why, f"--family {closest(name.lower(), FAMILIES, cutoff=0.4) or 'qwen3'}")
    raise MegatuneError(finding, ExitCode.SETTINGS)
