"""`megatune demo-model`: a tiny random checkpoint with a real tokenizer, for trying and testing."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatune.errors import ExitCode

# Flag, attribute of `ModelSizes`, default, help.
_SIZES = (
    ("layers", "num_layers", 4, "decoder layers (4)"),
    ("hidden", "hidden_size", 64, "hidden size (64)"),
    ("ffn", "ffn_hidden_size", None, "hidden size of the MLP (3 × hidden)"),
    ("heads", "num_attention_heads", 4, "attention heads (4)"),
    ("kv_heads", "num_query_groups", None, "key/value heads (2; deepseek_v3 has as many as heads)"),
    ("head_dim", "head_dim", None, "channels of one head (hidden / heads; twice that for qwen3 and its kin)"),
    ("experts", "num_experts", None, "experts of a layer, in families that have them (8)"),
    ("topk", "router_topk", None, "experts that a token goes to (2)"),
    ("moe_ffn", "moe_ffn_hidden_size", None,
     "hidden size of one expert (hidden; in mixtral that of --ffn, in qwen3_vl_moe 3/4 of hidden)"),
    ("vision_layers", "vision_num_layers", None, "layers of the vision encoder, in families that have one (4)"),
    ("vision_hidden", "vision_hidden_size", None, "hidden size of the vision encoder (40)"),
    ("vision_heads", "vision_num_heads", None, "attention heads of the vision encoder (2)"),
    ("vocab", "vocab_size", 2000, "tokens in the vocabulary (2000)"),
    ("max_position_embeddings", "max_position_embeddings", 4096, "tokens the model can read (4096)"),
)  # fmt: skip


def _spellings(flag: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{flag}", f"--{flag.replace('_', '-')}")))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "demo-model",
        help="make a tiny random checkpoint with a real tokenizer",
        description="Writes a random checkpoint of a published family, as a Hugging Face folder. Its tokenizer is "
        "trained on our demo text and has the family's special tokens and chat template.",
    )
    # Refused by the demo room, with the nearest name: argparse's own choices would end without one.
    parser.add_argument("--family", required=True, metavar="F",
                        help="llama, qwen2, qwen3, qwen2_moe, qwen3_moe, mixtral, deepseek_v3, "
                        "deepseek_r1_distill_qwen, deepseek_r1_distill_llama, qwen3_next, qwen2_vl, qwen2_5_vl, "
                        "qwen3_vl, qwen3_vl_moe, qwen3_5 or qwen3_5_moe")  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the folder to make")
    sizes = parser.add_argument_group("sizes")
    for flag, name, default, text in _SIZES:
        sizes.add_argument(*_spellings(flag), dest=name, type=int, default=default, metavar="N", help=text)
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
    """Make the checkpoint and print what it is.

    Raises:
        MegatuneError: (SETTINGS) numbers that make no model; (CANNOT_WRITE) the folder.
    """
    from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint
    from megatune.demo.family import demo_family

    own = ("verb", "run", "family", "output")
    rest = {name: value for name, value in vars(args).items() if name not in own}
    folder = make_checkpoint(args.family, args.output, **rest)
    summary = summarize_checkpoint(folder)
    print(
        f"{folder}: {args.family}, {summary.num_parameters:,} parameters, vocabulary {summary.vocab_size:,}, "
        f"{summary.num_bytes / 2**20:.1f} MiB of {args.dtype} weights, random"
    )
    ask = (
        '--prompt "Who are you?"'
        if demo_family(args.family).vision is None
        else '--image FILE --prompt "What is this?"'
    )
    print(f"Try it: megatune infer {folder} {ask} --max_new_tokens 20")
    return ExitCode.DONE
