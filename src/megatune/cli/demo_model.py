"""`megatune demo-model`: a tiny random checkpoint with a real tokenizer, for trying and testing."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatune.errors import ExitCode


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its flags."""
    parser = subparsers.add_parser(
        "demo-model",
        help="make a tiny random checkpoint with a real tokenizer",
        description="Writes a random checkpoint of a published family, as a Hugging Face folder. Its tokenizer is "
        "trained on our demo text and has the family's special tokens and chat template.",
    )
    # Refused by the demo room, with the nearest name: argparse's own choices would end without one.
    parser.add_argument("--family", required=True, metavar="F",
                        help="llama, qwen2, qwen3, qwen2_moe, qwen3_moe, mixtral, deepseek_v3, "
                        "deepseek_r1_distill_qwen or deepseek_r1_distill_llama")  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the folder to make")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--layers", type=int, default=4, metavar="N", help="decoder layers (4)")
    sizes.add_argument("--hidden", type=int, default=64, metavar="N", help="hidden size (64)")
    sizes.add_argument("--ffn", type=int, metavar="N", help="hidden size of the MLP (3 × hidden)")
    sizes.add_argument("--heads", type=int, default=4, metavar="N", help="attention heads (4)")
    sizes.add_argument("--kv_heads", "--kv-heads", type=int, metavar="N",
                       help="key/value heads (2; deepseek_v3 has as many as heads)")  # fmt: skip
    sizes.add_argument("--head_dim", "--head-dim", type=int, metavar="N",
                       help="channels of one head (hidden / heads; twice that for qwen3 and qwen3_moe)")  # fmt: skip
    sizes.add_argument("--experts", type=int, metavar="N", help="experts of a layer, in families that have them (8)")
    sizes.add_argument("--topk", type=int, metavar="N", help="experts that a token goes to (2)")
    sizes.add_argument("--moe_ffn", "--moe-ffn", type=int, metavar="N",
                       help="hidden size of one expert (hidden; in mixtral that of --ffn)")  # fmt: skip
    sizes.add_argument("--vocab", type=int, default=2000, metavar="N", help="tokens in the vocabulary (2000)")
    sizes.add_argument("--max_position_embeddings", "--max-position-embeddings", type=int, default=4096, metavar="N",
                       help="tokens the model can read (4096)")  # fmt: skip
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument("--tied", dest="tie_word_embeddings", action="store_true", default=None,
                      help="the output layer is the word embedding (the family's habit)")  # fmt: skip
    tied.add_argument("--untied", dest="tie_word_embeddings", action="store_false", default=None,
                      help="the output layer has weights of its own")  # fmt: skip
    parser.add_argument("--attention_bias", "--attention-bias", action="store_true",
                        help="biases on q, k, v and o (llama, qwen3, qwen3_moe)")  # fmt: skip
    parser.add_argument("--mlp_bias", "--mlp-bias", action="store_true", help="biases in the MLP (llama)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (float32)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    parser.add_argument("--max_shard_size", "--max-shard-size", default="5GB", metavar="SIZE",
                        help="split the weights into files of this size (5GB)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoint and prints what it is.

    Raises:
        MegatuneError: (SETTINGS) numbers that make no model; (CANNOT_WRITE) the folder.
    """
    from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint

    folder = make_checkpoint(
        args.family,
        args.output,
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=args.ffn,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab,
        max_position_embeddings=args.max_position_embeddings,
        tie_word_embeddings=args.tie_word_embeddings,
        attention_bias=args.attention_bias,
        mlp_bias=args.mlp_bias,
        num_experts=args.experts,
        router_topk=args.topk,
        moe_ffn_hidden_size=args.moe_ffn,
        dtype=args.dtype,
        seed=args.seed,
        max_shard_size=args.max_shard_size,
        overwrite=args.overwrite,
    )
    summary = summarize_checkpoint(folder)
    print(
        f"{folder}: {args.family}, {summary.num_parameters:,} parameters, vocabulary {summary.vocab_size:,}, "
        f"{summary.num_bytes / 2**20:.1f} MiB of {args.dtype} weights, random"
    )
    print(f'Try it: megatune infer {folder} --prompt "Who are you?" --max_new_tokens 20')
    return ExitCode.DONE
