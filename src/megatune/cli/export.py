"""`megatune export`: merge adapters into their model, and convert to and from Megatron-Core's checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.cli.export_words import Export

_EPILOG = """Keys are LLaMA-Factory's and Megatron-SWIFT's. From flags, or from a file with changes to it:

    megatune export --model_name_or_path Qwen3-8B --adapter_name_or_path out/first --export_dir merged
    megatune export merge.yaml export_size=2
    megatune export --model Qwen3-8B --to_mcore true --output_dir Qwen3-8B-mcore --torch_dtype bfloat16
    megatune export --mcore_model out/megatron --to_hf true --output_dir out/hf

model_name_or_path, model  the base: a folder, or an id on a hub; what the adapter's configuration names if left out
model_revision             branch, tag or commit of a model on a hub (main)
cache_dir                  where files of a hub are kept (the hub's own cache)
adapter_name_or_path, adapters
                           folders of adapters, separated by commas, merged in their order: as peft saves them, a
                           checkpoint-N, or a run's output_dir
merge_lora                 true: adapters are merged (true)
export_dir, output_dir     the folder to write; of a conversion SOURCE-mcore or SOURCE-hf if left out
export_size, max_shard_size
                           largest file of weights, in GB (5)
overwrite_output_dir, exist_ok
                           replace an export_dir that is not empty (false)
to_mcore                   true: write Megatron-Core's torch_dist format, which any layout of it loads
to_hf                      true: write a Hugging Face checkpoint, from mcore_model
mcore_model                a folder in torch_dist format; config.json and tokenizer come from model, else from the
                           folder, else from the model that its args.json names
torch_dtype                dtype of the weights that are written (the source's own)
test_convert_precision     true: compare both models afterwards as `megatune verify` does, and end with 1 where they
                           differ
test_convert_dtype         what that computes in (float32)

template, trust_remote_code, finetuning_type: lora, export_device and export_legacy_format: false may stand in a file:
the model's own chat template is kept, no code of a model is run, and tensors go one by one on the CPU."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "export",
        help="merge adapters into their model, or convert from and to Megatron-Core's checkpoints",
        description="Writes a model with adapters merged into it as a Hugging Face checkpoint, or a model in another "
        "format: a Hugging Face checkpoint as Megatron-Core's torch_dist, or the other way round.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE.yaml | MODEL key=value --key value")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge adapters into a model, or convert it.

    Raises:
        MegatuneError: (SETTINGS) every key that is unknown, wrong or refused; (INPUT) the model or an adapter is
            missing or cannot be used; (CANNOT_WRITE) the folder; what a hub refuses the model with.
    """
    from megatune.cli.export_words import read_words

    export = read_words(args.words)
    if export.layout:
        print(f"{', '.join(export.layout)}: the file is the same for every layout", flush=True)
    return _convert(export) if export.converts else _merge(export)


def _merge(export: Export) -> int:
    assert export.export_dir is not None
    from megatune.generation.adapters import adapted_model
    from megatune.hub.models import open_model

    names = export.adapter_name_or_path
    model = export.model_name_or_path or adapted_model(names[0]).base
    # A folder of an adapter given as the model is merged before the others.
    found = adapted_model(model, adapters=names)
    if not found.adapters:
        why = f"{model} holds no adapter, and is a Hugging Face model as it is"
        finding = Finding("there is nothing to merge", "", why, "add --adapter_name_or_path FOLDER")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    folder = open_model(found.base, export.model_revision, export.cache_dir).fetch()

    from megatune.training.merge import merge_adapters

    size, overwrite = int(export.export_size * 10**9), export.overwrite_output_dir
    print(merge_adapters(folder, found.adapters, Path(export.export_dir), max_file_bytes=size, overwrite=overwrite))
    return ExitCode.DONE


def _convert(export: Export) -> int:
    from megatune.generation.adapters import adapted_model
    from megatune.hub.megatron import is_hugging_face, is_torch_dist
    from megatune.hub.models import open_model

    source = export.mcore_model or export.model_name_or_path
    assert source is not None
    found = adapted_model(export.model_name_or_path or source, adapters=export.adapter_name_or_path)
    weights = export.mcore_model or found.base
    in_megatron_form = None if is_hugging_face(weights) else export.mcore_model  # a run's checkpoint may be either
    model = open_model(found.base, export.model_revision, export.cache_dir, in_megatron_form)
    if export.to_hf and export.mcore_model is None and not is_torch_dist(weights):
        why, fix = (
            f"{weights} is a Hugging Face model as it is",
            "name the folder of Megatron-Core: --mcore_model FOLDER",
        )
        raise MegatuneError(Finding("there is nothing to convert", "", why, fix), ExitCode.SETTINGS)

    import torch

    from megatune.training.megatron import to_hf, to_mcore

    folder, target = model.fetch(), Path(export.export_dir or _default_target(source, export))
    options: dict[str, Any] = {
        "dtype": None if export.torch_dtype is None else getattr(torch, export.torch_dtype),
        "max_file_bytes": int(export.export_size * 10**9),
        "overwrite": export.overwrite_output_dir,
    }
    if export.to_hf:
        print(to_hf(folder, Path(weights), found.adapters, target, **options), flush=True)
    else:
        print(to_mcore(folder, found.adapters, target, name=source, **options), flush=True)
    if not export.test_convert_precision:
        return ExitCode.DONE
    # What says itself what it is goes by its name in what is printed.
    return _compare(export, folder if export.model_name_or_path else Path(source), target)


def _default_target(source: str, export: Export) -> str:
    """Name the folder beside the source; of an id on a hub, here."""
    end = "-hf" if export.to_hf else "-mcore"
    return f"{source.rstrip('/')}{end}" if Path(source).exists() else f"{source.rpartition('/')[2]}{end}"


def _compare(export: Export, source: Path, result: Path) -> int:
    """Compare a layout that reads Megatron-Core's files with Transformers that reads those of Hugging Face."""
    from megatune.cli.verify import run as verify
    from megatune.hub.megatron import is_torch_dist

    computed, reference = (result, source) if export.to_mcore else (source, result)
    # What was rounded is compared as rounded.
    dtypes = {export.torch_dtype, export.test_convert_dtype}
    words = [f"--{short}" for short, name in (("bf16", "bfloat16"), ("fp16", "float16")) if name in dtypes][:1]
    asked = argparse.Namespace(
        words=[str(computed), *words], samples=4, length=64, verbose=False, against=None,
        reference=None if is_torch_dist(reference) else reference,
    )  # fmt: skip
    return verify(asked)
