"""`megatune export`: merges adapters into their model, and converts to and from Megatron-Core checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatune.cli.command import Command
from megatune.config.options import ParsedArguments
from megatune.errors import ExitCode
from megatune.training.export import ExportOptions, checked, convert, merge

_EPILOG = """Options are LLaMA-Factory's and Megatron-SWIFT's keys. From flags, or from a file with overrides:

    megatune export --model_name_or_path Qwen3-8B --adapter_name_or_path out/first --export_dir merged
    megatune export merge.yaml export_size=2
    megatune export --model Qwen3-8B --to_mcore true --output_dir Qwen3-8B-mcore --torch_dtype bfloat16
    megatune export --mcore_model out/megatron --to_hf true --output_dir out/hf"""

COMMAND = Command(
    name="export",
    usage="FILE.yaml | MODEL [key=value ...] [--OPTION ...]",
    about="Writes a model with merged adapters as a Hugging Face checkpoint, or converts a Hugging Face checkpoint to "
    "Megatron-Core's torch_dist format or back.",
    epilog=_EPILOG,
    options=ExportOptions,
    system="export",
    ignores_training=True,
    of_run=("output_dir", "overwrite_output_dir", "quantization_bit", "quant_bits", "push_to_hub"),
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Merge adapters into a model, or convert it."""
    return write(COMMAND.read(words))


def write(given: ParsedArguments[Any]) -> int:
    """Merge adapters into a model, or convert it.

    Raises:
        MegatuneError: (SETTINGS) every key that is unknown, invalid or unsupported; (INPUT) the model or an adapter
            is missing or cannot be used; (CANNOT_WRITE) the folder; the hub's reason to refuse the model.
    """
    export = checked(given)
    for line in given.lines:
        print(line, file=sys.stderr)
    from megatune.generation.inputs import adapted_model

    # If the model is the folder of an adapter, that adapter is merged first.
    named = export.model_name_or_path or export.mcore_model or adapted_model(export.adapters[0]).base
    model = adapted_model(named, adapters=export.adapters)
    if not export.converts:
        print(merge(export, model.base, model.adapters))
        return ExitCode.DONE
    source, target, line = convert(export, model.base, model.adapters)
    print(line, flush=True)
    return _compare(export, source, target) if export.test_convert_precision else ExitCode.DONE


def _compare(export: ExportOptions, source: Path, result: Path) -> int:
    """Compare our model, loaded from Megatron-Core's files, with Transformers, loaded from Hugging Face's."""
    from megatune.cli.verify import verify
    from megatune.hub.megatron import is_torch_dist

    computed, reference = (result, source) if export.to_mcore else (source, result)
    # Rounded weights are compared in the rounded dtype.
    dtypes = {export.torch_dtype, export.test_convert_dtype}
    dtype = [f"--{short}" for short, name in (("bf16", "bfloat16"), ("fp16", "float16")) if name in dtypes][:1]
    words = [str(computed), *dtype, "--samples", "4"]
    return verify(words, reference=None if is_torch_dist(reference) else reference)
