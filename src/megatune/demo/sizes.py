"""Sizes of a demo model, their validation, and the resulting config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from megatune.config.options import Flag
from megatune.config.setting import Group
from megatune.demo.family import DemoFamily
from megatune.demo.tokenizer import smallest_vocab_size
from megatune.demo.vision import mrope_parameters, vision_config
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DTYPES = ("float32", "bfloat16", "float16")
# For random models with gated delta nets. Their first outputs nearly cancel, and a norm with 1e-6 would amplify
# rounding: Transformers' own fp32 gradients would differ by 5e-5 from those in fp64, more than the tolerance of 1e-5.
DELTA_NORM_EPSILON = 1e-3


class ModelSizes(Group):
    """The sizes of a demo model; `resolved` fills in those that are None."""

    dtype: str = "float32"
    """float32, bfloat16 or float16"""
    tie_word_embeddings: Annotated[bool | None, Flag(name="tied")] = None
    """the output layer is the word embedding (as the family has it)"""
    num_layers: Annotated[int, Flag(name="layers")] = 4
    """decoder layers"""
    hidden_size: Annotated[int, Flag(name="hidden")] = 64
    """hidden size"""
    ffn_hidden_size: Annotated[int | None, Flag(name="ffn")] = None
    """hidden size of the MLP (3 × hidden)"""
    num_attention_heads: Annotated[int, Flag(name="heads")] = 4
    """attention heads"""
    num_query_groups: Annotated[int | None, Flag(name="kv_heads")] = None
    """key/value heads (2; in deepseek_v3 as many as heads)"""
    head_dim: int | None = None
    """channels of one head (hidden / heads; twice that for qwen3 and its kin)"""
    num_experts: Annotated[int | None, Flag(name="experts")] = None
    """experts of a layer, in families that have them (8)"""
    router_topk: Annotated[int | None, Flag(name="topk")] = None
    """experts that each token is routed to (2)"""
    moe_ffn_hidden_size: Annotated[int | None, Flag(name="moe_ffn")] = None
    """hidden size of one expert (hidden; in mixtral that of --ffn, in qwen3_vl_moe 3/4 of hidden)"""
    vision_num_layers: Annotated[int | None, Flag(name="vision_layers")] = None
    """layers of the vision encoder, in families that have one (4)"""
    vision_hidden_size: Annotated[int | None, Flag(name="vision_hidden")] = None
    """hidden size of the vision encoder (40)"""
    vision_num_heads: Annotated[int | None, Flag(name="vision_heads")] = None
    """attention heads of the vision encoder (2)"""
    vocab_size: Annotated[int, Flag(name="vocab")] = 2000
    """tokens in the vocabulary; the tokenizer is trained to fill it, and rows that it leaves are never used"""
    max_position_embeddings: int = 4096
    """tokens that the model can read; scaled rotary embeddings are stretched to it"""

    def resolved(self, family: DemoFamily) -> ModelSizes:
        """Return the sizes with defaults from the family and the other sizes."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        ffn = _first(self.ffn_hidden_size, 3 * hidden)
        found: dict[str, Any] = {
            "ffn_hidden_size": ffn,
            "num_query_groups": heads if family.has_latent_attention else 2,
            "head_dim": hidden // max(1, heads) * (2 if family.wide_heads else 1),
            "tie_word_embeddings": family.tie_word_embeddings,
        }
        if family.vision is not None:
            found |= {"vision_num_layers": 4, "vision_hidden_size": 40, "vision_num_heads": 2}
        if family.has_experts:
            of_one = hidden if family.vision is None else hidden * 3 // 4
            if family.model_type in ("mixtral", "minimax_m2", "gpt_oss", "olmoe"):  # they have no dense feed-forward
                of_one = ffn
            found |= {"num_experts": 8, "router_topk": 2, "moe_ffn_hidden_size": of_one}
        return self.model_copy(update={name: _first(getattr(self, name), value) for name, value in found.items()})


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def check_sizes(family: DemoFamily, sizes: ModelSizes, max_shard_size: str) -> None:
    """Check that resolved sizes are valid.

    Raises:
        MegatuneError: SETTINGS, with one finding for every problem.
    """
    checks = (_below_minimum, _not_divisible, _expert_problems, _vision_problems, _dtype_problems)
    findings = [finding for check in checks for finding in check(family, sizes)]
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", max_shard_size):
        why = "a size is a whole number with KB, MB, GB or TB"
        findings.append(
            Finding(f"'{max_shard_size}' is not a valid size", "--max_shard_size", why, "--max_shard_size 5GB")
        )
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _expert_problems(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    flags = {"--experts": sizes.num_experts, "--topk": sizes.router_topk, "--moe_ffn": sizes.moe_ffn_hidden_size}
    for flag, value in flags.items():
        if value is not None and not family.has_experts:
            yield Finding(f"{family.model_type} has no experts", flag, fix="leave it out, or use --family qwen3_moe")
        elif value is not None and value < 1:
            yield Finding(f"{value} is too small", flag, fix=f"{flag} 1")
    topk, experts = sizes.router_topk, sizes.num_experts
    if family.has_experts and (topk or 1) > (experts or 1) > 0:
        yield Finding(f"a token cannot go to {topk} of {experts} experts", "--topk", fix=f"--topk {experts}")


def _vision_problems(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    layers, hidden, heads = sizes.vision_num_layers, sizes.vision_hidden_size, sizes.vision_num_heads
    too_small = False
    for flag, value in {"--vision_layers": layers, "--vision_hidden": hidden, "--vision_heads": heads}.items():
        if value is not None and family.vision is None:
            fix = "leave it out, or use --family qwen3_vl"
            yield Finding(f"{family.model_type} has no vision encoder", flag, fix=fix)
        elif value is not None and value < 1:
            too_small = True
            yield Finding(f"{value} is too small", flag, fix=f"{flag} 1")
    if family.vision is None or too_small or hidden is None or heads is None:
        return
    if hidden % (4 * heads):
        nearest = max(1, round(hidden / (4 * heads))) * 4 * heads
        what = f"vision hidden size {hidden} is not a multiple of 4 × {heads} heads"
        why = "rotary embeddings rotate pairs of channels, for height and for width"
        yield Finding(what, "--vision_hidden", why, f"--vision_hidden {nearest}")
    if (
        family.vision.mrope_section
        and not family.wide_heads
        and sizes.head_dim != sizes.hidden_size // max(1, sizes.num_attention_heads)
    ):
        why = f"in {family.model_type} it is the hidden size divided by the heads"
        yield Finding(f"head dimension {sizes.head_dim} is not an option", "--head_dim", why, "leave it out")
    if family.has_experts and sizes.hidden_size in ((ffn := sizes.moe_ffn_hidden_size or 0), 2 * ffn):
        what = f"hidden sizes of experts {ffn} and of the model {sizes.hidden_size} are too similar"
        why = "Transformers infers from their shapes whether experts' matrices are transposed"
        yield Finding(what, "--moe_ffn", why, f"--moe_ffn {sizes.hidden_size * 3 // 4}")


def _below_minimum(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    head_dim = (2, "rotary embeddings rotate pairs of channels")
    if family.vision is not None:
        head_dim = (8, "time, height and width use separate channels")
    minima: dict[str, tuple[Any, int, str]] = {
        "--layers": (sizes.num_layers, 1, ""),
        "--hidden": (sizes.hidden_size, 1, ""),
        "--ffn": (sizes.ffn_hidden_size, 1, ""),
        "--heads": (sizes.num_attention_heads, 1, ""),
        "--kv_heads": (sizes.num_query_groups, 1, ""),
        "--head_dim": (sizes.head_dim, *head_dim),
        "--vocab": (
            sizes.vocab_size,
            smallest_vocab_size(family),
            "every byte and every added token of the family has an id",
        ),
        "--max_position_embeddings": (sizes.max_position_embeddings, 8, ""),
    }
    for flag, (value, minimum, why) in minima.items():
        if value < minimum:
            yield Finding(f"{value} is too small", flag, why, f"{flag} {minimum}")


def _not_divisible(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    heads, hidden = sizes.num_attention_heads, sizes.hidden_size
    groups, head_dim = sizes.num_query_groups or 0, sizes.head_dim or 0
    if heads < 1 or groups < 1 or hidden < 1:
        return
    if family.has_latent_attention and groups != heads:
        why = f"in {family.model_type} every head has its own key and value"
        yield Finding(f"{groups} key/value heads are not {heads}", "--kv_heads", why, "leave it out")
    elif heads % groups:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - groups))
        what = f"{groups} key/value heads do not divide {heads} heads"
        why = "every key/value head serves the same number of query heads"
        yield Finding(what, "--kv_heads", why, f"--kv_heads {nearest}")
    # Transformers refuses it for llama with any head_dim, and readers of qwen2 derive head_dim from it.
    if hidden % heads and not family.wide_heads:
        nearest = max(1, round(hidden / heads)) * heads
        yield Finding(f"hidden size {hidden} is not a multiple of {heads} heads", "--hidden", fix=f"--hidden {nearest}")
    if head_dim > 2 and head_dim % 2:
        why = "rotary embeddings rotate pairs of channels"
        yield Finding(f"head dimension {head_dim} is odd", "--head_dim", why, f"--head_dim {head_dim + 1}")


def _dtype_problems(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    if sizes.dtype not in DTYPES:
        nearest = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(sizes.dtype, "float32")
        why = f"the dtypes are {', '.join(DTYPES)}"
        yield Finding(f"unknown dtype '{sizes.dtype}'", "--dtype", why, f"--dtype {nearest}")


ROPE_STRETCH = 8.0  # context length relative to that of "pretraining", as in Llama 3.1


def config_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the arguments of Transformers' configuration class for resolved sizes."""
    text = _text_arguments(family, sizes, tokenizer)
    if family.vision is None:
        return text
    vision = family.vision
    if vision.decoder:
        text["model_type"] = vision.decoder
    return {
        "text_config": text,
        "vision_config": vision_config(vision, sizes),
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in vision.tokens.items()},
        **vision.root,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "dtype": text["dtype"],
    }


def _text_arguments(family: DemoFamily, sizes: ModelSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    arguments = {
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_query_groups,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "rope_parameters": _rope_parameters(family, sizes),
        "rms_norm_eps": DELTA_NORM_EPSILON if family.has_delta_nets else family.norm_epsilon,
        # Large enough that attention is far from uniform, so that a wrong rotary embedding changes the logits.
        "initializer_range": sizes.hidden_size**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": sizes.dtype,
    }
    if family.vision is None or not family.vision.mrope_section or family.wide_heads:
        arguments["head_dim"] = sizes.head_dim
    if family.has_latent_attention:
        # Latent widths that differ from all other sizes.
        arguments |= {"q_lora_rank": sizes.hidden_size // 2 + 4, "kv_lora_rank": sizes.hidden_size // 2}
        arguments |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), sizes.head_dim)
    if family.has_delta_nets:
        arguments |= {"linear_num_key_heads": sizes.num_attention_heads, "full_attention_interval": 2}
        arguments |= {"linear_num_value_heads": 2 * sizes.num_attention_heads}
        arguments |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), sizes.head_dim)
    if family.model_type in ("gemma4_text", "gemma4"):
        arguments["global_head_dim"] = 2 * (sizes.head_dim or 0)
    if family.has_experts:
        arguments |= _experts(family.model_type, sizes)
    return arguments | dict(family.own)


def _rope_parameters(family: DemoFamily, sizes: ModelSizes) -> dict[str, Any]:
    stretch = {
        "factor": ROPE_STRETCH,
        "original_max_position_embeddings": int(sizes.max_position_embeddings / ROPE_STRETCH),
    }
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": family.rope_theta}
    if family.llama3_rope_scaling:
        parameters |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **stretch}
    if family.has_latent_attention:
        parameters |= {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        parameters |= stretch
    if family.model_type == "gpt_oss":
        parameters |= {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "truncate": False, **stretch}
    if family.model_type in ("ministral3", "mistral3"):
        parameters |= {
            "rope_type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            **stretch,
        }
    if family.model_type in ("gemma4_text", "gemma4"):
        parameters |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    if family.model_type in ("gemma3_text", "gemma3", "gemma4_text", "gemma4", "olmo3"):
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        return {"full_attention": parameters, "sliding_attention": local}
    head_dim = sizes.head_dim or 0
    if family.has_delta_nets:
        head_dim //= 2
        parameters["partial_rotary_factor"] = 0.5
    if family.vision and family.vision.mrope_section:
        parameters |= mrope_parameters(family.vision, head_dim)
    return parameters


def _experts(model_type: str, sizes: ModelSizes) -> dict[str, Any]:
    # Families with experts have defaults.
    own: dict[str, Any]
    num_experts, topk, ffn = sizes.num_experts or 0, sizes.router_topk or 0, sizes.moe_ffn_hidden_size or 0
    match model_type:
        case "qwen2_moe" | "qwen3_next" | "qwen3_5_moe" | "qwen3_5_moe_text":
            own = {"num_experts": num_experts, "shared_expert_intermediate_size": 2 * ffn}
        case "qwen3_moe" | "qwen3_vl_moe":
            own = {"num_experts": num_experts, "norm_topk_prob": True}
        case "gemma4_text":
            moe = {"enable_moe_block": True, "num_experts": num_experts, "top_k_experts": topk}
            return {**moe, "moe_intermediate_size": ffn}
        case "hy_v3":
            own = {"num_experts": num_experts}
        case "ernie4_5_moe":
            return {"moe_num_experts": num_experts, "moe_k": topk, "moe_intermediate_size": ffn}
        case "olmoe":
            return {"num_experts": num_experts, "num_experts_per_tok": topk, "intermediate_size": ffn}
        case "mixtral" | "minimax_m2" | "gpt_oss":
            return {"num_local_experts": num_experts, "num_experts_per_tok": topk, "intermediate_size": ffn}
        case _:
            # Four groups of at least two experts, of which two are chosen, if these have enough experts.
            grouped = num_experts % 4 == 0 and num_experts >= max(8, 2 * topk)
            own = {
                "n_routed_experts": num_experts,
                "n_shared_experts": 1,
                "n_group": 4 if grouped else 1,
                "topk_group": 2 if grouped else 1,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 0,
            }
            if model_type == "deepseek_v2":
                own["topk_method"] = "group_limited_greedy"
    return {"num_experts_per_tok": topk, "moe_intermediate_size": ffn, **own}
