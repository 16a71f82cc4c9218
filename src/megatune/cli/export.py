"""`megatune export`: merge adapters into their model, and convert to and from Megatron-Core's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.cli.command import Command
from megatune.cli.model_options import say_ignored
from megatune.config.options import Flag, Given, foreign_keys
from megatune.config.setting import Group, Positive
from megatune.errors import ExitCode, Finding, MegatuneError

_EPILOG = """Options are LLaMA-Factory's and Megatron-SWIFT's keys. From flags, or from a file with changes to it:

    megatune export --model_name_or_path Qwen3-8B --adapter_name_or_path out/first --export_dir merged
    megatune export merge.yaml export_size=2
    megatune export --model Qwen3-8B --to_mcore true --output_dir Qwen3-8B-mcore --torch_dtype bfloat16
    megatune export --mcore_model out/megatron --to_hf true --output_dir out/hf"""
_DTYPES = Literal["bfloat16", "float16", "float32"]
_SIZES = {"MB": 1e-3, "GB": 1, "TB": 1e3}


def _gigabytes(text: str) -> float | None:
    """Read 5, 0.5 or 500MB."""
    unit = re.fullmatch(r"([\d.]+)\s*(MB|GB|TB)?", text.upper())
    try:
        return float(unit[1]) * _SIZES[unit[2] or "GB"] if unit else None
    except ValueError:
        return None


class ExportOptions(Group):
    """The options of `megatune export`."""

    model_name_or_path: Annotated[str | None, Flag("MODEL")] = None
    """the base: a folder, or an id on a hub (what the adapter's configuration names); also --model"""
    model_revision: Annotated[str, Flag("REVISION")] = "main"
    """branch, tag or commit of a model on a hub"""
    cache_dir: Annotated[str | None, Flag("DIR")] = None
    """where files of a hub are kept (the hub's own cache)"""
    adapters: Annotated[list[str], Flag("A ...", commas=True)] = Field(default=[])
    """folders of adapters, merged in their order: as peft saves them, a checkpoint-N, or a run's output_dir; also
    --adapter_name_or_path A,B"""
    merge_lora: bool = True
    """true: adapters are merged"""
    export_dir: Annotated[str | None, Flag("DIR")] = None
    """the folder to write (of a conversion SOURCE-mcore or SOURCE-hf); also --output_dir"""
    export_size: Annotated[
        Positive, Flag("GB", read=_gigabytes, expected="a number of GB above 0, or one with a unit, such as 500MB")
    ] = 5.0
    """largest file of weights; also --max_shard_size"""
    overwrite_output_dir: bool = False
    """replace an export_dir that is not empty; also --exist_ok"""
    to_mcore: bool = False
    """write Megatron-Core's torch_dist format, which loads in any of its layouts"""
    to_hf: bool = False
    """write a Hugging Face checkpoint, from mcore_model"""
    mcore_model: Annotated[str | None, Flag("DIR")] = None
    """a folder in torch_dist format; config.json and tokenizer come from model, else from the folder, else from the
    model that its args.json names"""
    torch_dtype: _DTYPES | None = None
    """dtype of the weights that are written (the source's own)"""
    test_convert_precision: bool = False
    """then compare both models as `megatune verify` does, and end with 1 where they differ"""
    test_convert_dtype: _DTYPES = "float32"
    """the dtype of that comparison"""

    @property
    def converts(self) -> bool:
        return self.to_mcore or self.to_hf


COMMAND = Command(
    name="export",
    usage="FILE.yaml | MODEL [key=value ...] [--OPTION ...]",
    about="Writes a model with adapters merged into it as a Hugging Face checkpoint, or a model in another format: a "
    "Hugging Face checkpoint as Megatron-Core's torch_dist, or the other way round.",
    epilog=_EPILOG,
    options=ExportOptions,
    foreign=foreign_keys("export"),
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Merge adapters into a model, or convert it."""
    return write(COMMAND, COMMAND.read(words))


def write(command: Command[Any], given: Given[Any]) -> int:
    """Merge adapters into a model, or convert it.

    Raises:
        MegatuneError: (SETTINGS) every key that is unknown, wrong or refused; (INPUT) the model or an adapter is
            missing or cannot be used; (CANNOT_WRITE) the folder; what a hub refuses the model with.
    """
    export = checked(given)
    say_ignored(command, given)
    return _convert(export) if export.converts else _merge(export)


def checked(given: Given[Any]) -> ExportOptions:
    """Return the options, with the model that is named by itself.

    Raises:
        MegatuneError: SETTINGS, with everything that is wrong.
    """
    export: ExportOptions = given.options
    if given.words and export.model_name_or_path is None:
        export = export.model_copy(update={"model_name_or_path": given.words[0]})
    given.stop(_missing(export, given))
    return export


def _missing(export: ExportOptions, given: Given[Any]) -> Iterator[Finding]:
    """Yield what has to be said, or contradicts."""
    if export.to_mcore and export.to_hf:
        yield Finding("to_mcore: true and to_hf: true", fix="keep the one that is to be written")
        return
    if not export.merge_lora and (export.adapters or not export.converts):
        where = next(entry.where for entry in reversed(given.entries) if entry.key == "merge_lora")
        why, fix = "merging adapters is what export does", "write merge_lora: true, or remove it"
        yield Finding("merge_lora: false is not supported", where, why, fix)
    only = [key for key in ("mcore_model", "torch_dtype", "test_convert_precision") if getattr(export, key)]
    if not export.converts and only:
        fix = "write to_hf: true or to_mcore: true" if "mcore_model" in only else "write to_mcore: true, or remove it"
        yield Finding(f"{only[0]} without a conversion", "", "it says how a model is converted", fix)
    if not export.converts and export.export_dir is None and given.origin("export_dir") is None:
        why = "it is the folder that the model is written into"
        yield Finding("export_dir is missing", "", why, "--export_dir FOLDER")
    if export.to_hf and not (export.mcore_model or export.model_name_or_path):
        yield Finding("mcore_model is missing", fix="--mcore_model FOLDER, the checkpoint of Megatron-Core")
    elif export.to_mcore and not (export.mcore_model or export.model_name_or_path):
        yield Finding("model is missing", fix="--model FOLDER, or the id of a model on a hub")
    elif not export.converts and not only and not (export.model_name_or_path or export.adapters):
        yield Finding("adapter_name_or_path is missing", fix="--adapter_name_or_path FOLDER")
    if export.test_convert_precision and export.adapters:
        why = "the model that adapters are merged into is nowhere else to be compared with"
        fix = "merge them first, with `megatune export`, and convert the merged model"
        yield Finding("test_convert_precision: true with adapters", "", why, fix)


def _merge(export: ExportOptions) -> int:
    assert export.export_dir is not None
    from megatune.generation.adapters import adapted_model
    from megatune.hub.models import open_model

    names = export.adapters
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


def _convert(export: ExportOptions) -> int:
    from megatune.generation.adapters import adapted_model
    from megatune.hub.megatron import is_hugging_face, is_torch_dist
    from megatune.hub.models import open_model

    source = export.mcore_model or export.model_name_or_path
    assert source is not None
    found = adapted_model(export.model_name_or_path or source, adapters=export.adapters)
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


def _default_target(source: str, export: ExportOptions) -> str:
    """Name the folder beside the source; of an id on a hub, here."""
    end = "-hf" if export.to_hf else "-mcore"
    return f"{source.rstrip('/')}{end}" if Path(source).exists() else f"{source.rpartition('/')[2]}{end}"


def _compare(export: ExportOptions, source: Path, result: Path) -> int:
    """Compare a layout that reads Megatron-Core's files with Transformers that reads those of Hugging Face."""
    from megatune.cli.verify import verify
    from megatune.hub.megatron import is_torch_dist

    computed, reference = (result, source) if export.to_mcore else (source, result)
    # What was rounded is compared as rounded.
    dtypes = {export.torch_dtype, export.test_convert_dtype}
    dtype = [f"--{short}" for short, name in (("bf16", "bfloat16"), ("fp16", "float16")) if name in dtypes][:1]
    words = [str(computed), *dtype, "--samples", "4"]
    return verify(words, reference=None if is_torch_dist(reference) else reference)
