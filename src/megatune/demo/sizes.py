"""The numbers of a demo model, and the rules they must keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatune.demo.family import DemoFamily
from megatune.demo.tokenizer import smallest_vocab_size
from megatune.errors import ExitCode, Finding, MegatuneError

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")  # families where biases of attention are a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Every choice of a demo model, defaults filled in; see `make_checkpoint` for what each means.

    Numbers of experts are None where a family has none, and nobody asked for any.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    num_experts: int | None
    router_topk: int | None
    moe_ffn_hidden_size: int | None
    dtype: str

    @classmethod
    def resolve(
        cls,
        family: DemoFamily,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None,
        ffn_hidden_size: int | None,
        head_dim: int | None,
        tie_word_embeddings: bool | None,
        num_experts: int | None,
        router_topk: int | None,
        moe_ffn_hidden_size: int | None,
        **given: int | bool | str,
    ) -> ModelSizes:
        """Fills in what the family or the other numbers decide."""
        if ffn_hidden_size is None:
            ffn_hidden_size = 3 * hidden_size
        if head_dim is None:
            head_dim = hidden_size // max(1, num_attention_heads) * (2 if family.wide_heads else 1)
        if tie_word_embeddings is None:
            tie_word_embeddings = family.tie_word_embeddings
        if num_query_groups is None:
            num_query_groups = num_attention_heads if family.has_latent_attention else 2
        if family.has_experts:
            num_experts = 8 if num_experts is None else num_experts
            router_topk = 2 if router_topk is None else router_topk
            if moe_ffn_hidden_size is None:
                # Mixtral has no other feed-forward.
                moe_ffn_hidden_size = ffn_hidden_size if family.model_type == "mixtral" else hidden_size
        return cls(
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_query_groups=num_query_groups,
            ffn_hidden_size=ffn_hidden_size,
            head_dim=head_dim,
            tie_word_embeddings=tie_word_embeddings,
            num_experts=num_experts,
            router_topk=router_topk,
            moe_ffn_hidden_size=moe_ffn_hidden_size,
            **given,  # type: ignore[arg-type]
        )


def check_sizes(family: DemoFamily, sizes: ModelSizes, max_shard_size: str) -> None:
    """Refuses numbers that make no model.

    Raises:
        MegatuneError: (SETTINGS) with one finding for every problem.
    """
    findings = [
        *_below_minimum(family, sizes),
        *_not_divisible(family, sizes),
        *_expert_problems(family, sizes),
        *_not_in_family(family, sizes),
    ]
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", max_shard_size):
        findings.append(
            Finding(
                what=f"'{max_shard_size}' is no size",
                where="--max_shard_size",
                why="a size is a whole number with KB, MB, GB or TB",
                fix="--max_shard_size 5GB",
            )
        )
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _expert_problems(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    flags = {"--experts": sizes.num_experts, "--topk": sizes.router_topk, "--moe_ffn": sizes.moe_ffn_hidden_size}
    for flag, value in flags.items():
        if value is not None and not family.has_experts:
            yield Finding(
                what=f"{family.model_type} has no experts",
                where=flag,
                fix="leave it out, or use --family qwen3_moe",
            )
        elif value is not None and value < 1:
            yield Finding(what=f"{value} is too small", where=flag, fix=f"{flag} 1")
    if family.has_experts and (sizes.router_topk or 1) > (sizes.num_experts or 1) > 0:
        yield Finding(
            what=f"a token cannot go to {sizes.router_topk} of {sizes.num_experts} experts",
            where="--topk",
            fix=f"--topk {sizes.num_experts}",
        )


def _below_minimum(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    smallest_vocabulary = smallest_vocab_size(family)
    minima = {
        "--layers": (sizes.num_layers, 1, ""),
        "--hidden": (sizes.hidden_size, 1, ""),
        "--ffn": (sizes.ffn_hidden_size, 1, ""),
        "--heads": (sizes.num_attention_heads, 1, ""),
        "--kv_heads": (sizes.num_query_groups, 1, ""),
        "--head_dim": (sizes.head_dim, 2, "rotary embeddings turn pairs of channels"),
        "--vocab": (sizes.vocab_size, smallest_vocabulary, "every byte and every added token of the family has an id"),
        "--max_position_embeddings": (sizes.max_position_embeddings, 8, ""),
    }
    for flag, (value, minimum, why) in minima.items():
        if value < minimum:
            yield Finding(what=f"{value} is too small", where=flag, why=why, fix=f"{flag} {minimum}")


def _not_divisible(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    heads, groups, hidden = sizes.num_attention_heads, sizes.num_query_groups, sizes.hidden_size
    if heads < 1 or groups < 1 or hidden < 1:
        return
    if family.has_latent_attention and groups != heads:
        yield Finding(
            what=f"{groups} key/value heads are not {heads}",
            where="--kv_heads",
            why=f"in {family.model_type} every head has its own key and value",
            fix="leave it out",
        )
    elif heads % groups:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - groups))
        yield Finding(
            what=f"{groups} key/value heads do not divide {heads} heads",
            where="--kv_heads",
            why="every key/value head serves the same number of query heads",
            fix=f"--kv_heads {nearest}",
        )
    # Transformers refuses it for llama whatever head_dim is, and readers of qwen2 derive head_dim from it.
    if hidden % heads and not family.wide_heads:
        nearest = max(1, round(hidden / heads)) * heads
        yield Finding(
            what=f"hidden size {hidden} is not a multiple of {heads} heads",
            where="--hidden",
            fix=f"--hidden {nearest}",
        )
    if sizes.head_dim > 2 and sizes.head_dim % 2:
        yield Finding(
            what=f"head dimension {sizes.head_dim} is odd",
            where="--head_dim",
            why="rotary embeddings turn pairs of channels",
            fix=f"--head_dim {sizes.head_dim + 1}",
        )


def _not_in_family(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    if sizes.dtype not in DTYPES:
        nearest = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(sizes.dtype, "float32")
        yield Finding(
            what=f"unknown dtype '{sizes.dtype}'",
            where="--dtype",
            why=f"the dtypes are {', '.join(DTYPES)}",
            fix=f"--dtype {nearest}",
        )
    if sizes.attention_bias and family.model_type not in ATTENTION_BIAS:
        yield Finding(
            what=f"attention_bias is not an option of {family.model_type}",
            where="--attention_bias",
            why=f"only {', '.join(ATTENTION_BIAS)} have it",
            fix="leave it out",
        )
    if sizes.mlp_bias and family.model_type != "llama":
        yield Finding(
            what=f"mlp_bias is not an option of {family.model_type}",
            where="--mlp_bias",
            why="only llama has it",
            fix="leave it out, or use --family llama",
        )
