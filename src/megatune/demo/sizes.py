"""The numbers of a demo model, and the rules they must keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatune.demo.family import DemoFamily
from megatune.demo.tokenizer import smallest_vocab_size
from megatune.errors import ExitCode, Finding, MegatuneError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Every choice of a demo model, defaults filled in; see `make_checkpoint` for what each means."""

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
    dtype: str

    @classmethod
    def resolve(
        cls,
        family: DemoFamily,
        *,
        hidden_size: int,
        num_attention_heads: int,
        ffn_hidden_size: int | None,
        head_dim: int | None,
        tie_word_embeddings: bool | None,
        **given: int | bool | str,
    ) -> ModelSizes:
        """Fills in what the family or the other numbers decide."""
        if ffn_hidden_size is None:
            ffn_hidden_size = 3 * hidden_size
        if head_dim is None:
            head_dim = hidden_size // max(1, num_attention_heads) * (2 if family.wide_heads else 1)
        if tie_word_embeddings is None:
            tie_word_embeddings = family.tie_word_embeddings
        return cls(
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            ffn_hidden_size=ffn_hidden_size,
            head_dim=head_dim,
            tie_word_embeddings=tie_word_embeddings,
            **given,  # type: ignore[arg-type]
        )


def check_sizes(family: DemoFamily, sizes: ModelSizes, max_shard_size: str) -> None:
    """Refuses numbers that make no model.

    Raises:
        MegatuneError: (SETTINGS) with one finding for every problem.
    """
    findings = [*_below_minimum(family, sizes), *_not_divisible(family, sizes), *_not_in_family(family, sizes)]
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", max_shard_size):
        findings.append(
            Finding(
                what=f"'{max_shard_size}' is no size",
                where="--max_shard_size",
                why="a size is a whole number with KB, MB, GB or TB",
                mend="--max_shard_size 5GB",
            )
        )
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


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
            yield Finding(what=f"{value} is too small", where=flag, why=why, mend=f"{flag} {minimum}")


def _not_divisible(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    heads, groups, hidden = sizes.num_attention_heads, sizes.num_query_groups, sizes.hidden_size
    if heads < 1 or groups < 1 or hidden < 1:
        return
    if heads % groups:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - groups))
        yield Finding(
            what=f"{groups} key/value heads do not divide {heads} heads",
            where="--kv_heads",
            why="every key/value head serves the same number of query heads",
            mend=f"--kv_heads {nearest}",
        )
    # Transformers refuses it for llama whatever head_dim is, and readers of qwen2 derive head_dim from it.
    if hidden % heads and family.model_type != "qwen3":
        nearest = max(1, round(hidden / heads)) * heads
        yield Finding(
            what=f"hidden size {hidden} is not a multiple of {heads} heads",
            where="--hidden",
            mend=f"--hidden {nearest}",
        )
    if sizes.head_dim > 2 and sizes.head_dim % 2:
        yield Finding(
            what=f"head dimension {sizes.head_dim} is odd",
            where="--head_dim",
            why="rotary embeddings turn pairs of channels",
            mend=f"--head_dim {sizes.head_dim + 1}",
        )


def _not_in_family(family: DemoFamily, sizes: ModelSizes) -> Iterator[Finding]:
    if sizes.dtype not in DTYPES:
        nearest = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(sizes.dtype, "float32")
        yield Finding(
            what=f"unknown dtype '{sizes.dtype}'",
            where="--dtype",
            why=f"the dtypes are {', '.join(DTYPES)}",
            mend=f"--dtype {nearest}",
        )
    if sizes.attention_bias and family.model_type == "qwen2":
        yield Finding(
            what="attention_bias is not an option of qwen2",
            where="--attention_bias",
            why="its q, k and v projections always have a bias, its output projection never",
            mend="leave it out",
        )
    if sizes.mlp_bias and family.model_type != "llama":
        yield Finding(
            what=f"mlp_bias is not an option of {family.model_type}",
            where="--mlp_bias",
            why="only llama has it",
            mend="leave it out, or use --family llama",
        )
