"""`megatune demo-model`: writes a tiny random checkpoint with a real tokenizer, for experiments and tests."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from megatune.cli.command import Command
from megatune.config.options import Flag
from megatune.config.values import has_undecoded_bytes
from megatune.demo.sizes import ModelSizes
from megatune.errors import ExitCode, Finding


class DemoOptions(ModelSizes):
    """The options of `megatune demo-model`."""

    family: Annotated[str | None, Flag("F")] = None
    """llama, qwen2, qwen3, qwen2_moe, qwen3_moe, mixtral, deepseek_v3, deepseek_r1_distill_qwen,
    deepseek_r1_distill_llama, qwen3_next, mistral3, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5,
    qwen3_5_moe, qwen3_5_text, qwen3_5_moe_text, mistral, ministral3, seed_oss, granite, smollm3, phi3, glm4_moe,
    glm4_moe_lite, hy_v3, ernie4_5_moe, deepseek_v2, gemma3_text, gemma3, gemma4_text, gemma4_text_moe, gemma4,
    internvl, olmo2, olmo3, olmoe, minimax_m2, gpt_oss, kimi_k2, glm, glm4, dots1, ernie4_5 or exaone4"""
    output: Annotated[str | None, Flag("DIR")] = None
    """the folder to create"""
    seed: int = 0
    """seed of the random weights"""
    max_shard_size: Annotated[str, Flag("SIZE")] = "5GB"
    """split the weights into files of this size"""
    overwrite: bool = False
    """replace an existing checkpoint"""
    untied: bool = False
    """the output layer has its own weights"""


_REQUIRED = (("family", "--family qwen3"), ("output", "--output DIR"))
COMMAND = Command(
    name="demo-model",
    usage="--family F --output DIR [--OPTION ...]",
    about="Writes a random checkpoint of a published family as a Hugging Face folder. The tokenizer is trained on "
    "demo text and has the family's special tokens and chat template.",
    options=DemoOptions,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Create the checkpoint and print a summary.

    Raises:
        MegatuneError: (SETTINGS) invalid sizes; (CANNOT_WRITE) the folder.
    """
    given = COMMAND.read(words)
    options = given.options
    missing = [(name, fix) for name, fix in _REQUIRED if getattr(options, name) is None]
    wrong = [Finding(f"{name} is missing", COMMAND.program, fix=fix) for name, fix in missing]
    if has_undecoded_bytes(options.output):
        why = "the library of tokenizers reads no other names"
        wrong.append(Finding(f"{options.output} is not UTF-8", "--output", why, "choose another name"))
    if options.tie_word_embeddings and options.untied:
        wrong.append(Finding("--tied and --untied contradict each other", COMMAND.program, fix="remove one of them"))
    given.stop(wrong)
    from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint
    from megatune.demo.family import demo_family

    sizes = options.model_dump(exclude={"family", "output", "untied"})
    if options.untied:
        sizes["tie_word_embeddings"] = False
    assert options.family is not None
    assert options.output is not None
    folder = make_checkpoint(options.family, Path(options.output), **sizes)
    summary = summarize_checkpoint(folder)
    print(
        f"{folder}: {options.family}, {summary.num_parameters:,} parameters, vocabulary {summary.vocab_size:,}, "
        f"{summary.num_bytes / 2**20:.1f} MiB of {options.dtype} weights, random"
    )
    prompt = "Who are you?" if demo_family(options.family).vision is None else "What is this?"
    image = "" if demo_family(options.family).vision is None else "--image FILE "
    print(f'Try it: megatune infer {shlex.quote(str(folder))} {image}--prompt "{prompt}" --max_new_tokens 20')
    return ExitCode.DONE
