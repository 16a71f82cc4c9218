"""`megatune export`: merges adapters into a model, or converts it to the other checkpoint format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Group, Positive
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.references import assign, ref, write

_DTYPES = Literal["bfloat16", "float16", "float32"]
_ADAPTER = f"--{ref('adapter_name_or_path')} FOLDER: of a run, its output_dir"
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
    """the base: a folder, or an id on a hub (the one that the adapter's configuration names); also --model"""
    model_revision: Annotated[str, Flag("REVISION")] = "main"
    """branch, tag or commit of a model on a hub"""
    cache_dir: Annotated[str | None, Flag("DIR")] = None
    """cache for files of a hub (the hub's own)"""
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
    """write a Hugging Face checkpoint, from mcore_model, or of a model and its adapters"""
    mcore_model: Annotated[str | None, Flag("DIR")] = None
    """a folder in torch_dist format; config.json and tokenizer come from model, else from the folder, else from the
    model that its args.json names"""
    torch_dtype: _DTYPES | None = None
    """dtype of the weights that are written (the source's own)"""
    test_convert_precision: bool = False
    """then compare both models as `megatune verify` does, and end with 1 if they differ"""
    test_convert_dtype: _DTYPES = "float32"
    """the dtype of that comparison"""

    @property
    def converts(self) -> bool:
        return self.to_mcore or self.to_hf


def checked(given: ParsedArguments[Any]) -> ExportOptions:
    """Return the valid options, with the model of a positional argument.

    Raises:
        MegatuneError: SETTINGS, with all findings.
    """
    export: ExportOptions = given.options
    if given.words and export.model_name_or_path is None:
        export = export.model_copy(update={"model_name_or_path": given.words[0]})
    given.stop(_missing(export, given))
    return export


def _missing(export: ExportOptions, given: ParsedArguments[Any]) -> Iterator[Finding]:
    """Yield options that are missing or contradict each other."""
    if given.words and given.options.model_name_or_path is not None:
        where = next(entry.where for entry in reversed(given.entries) if entry.key == "model_name_or_path")
        fix = f"leave one of them out; an adapter is named by --{ref('adapter_name_or_path')}"
        yield Finding("names the model a second time", where, f"MODEL is {given.words[0]} already", fix)
    if export.to_mcore and export.to_hf:
        yield Finding(
            f"{assign('to_mcore', True)} and {assign('to_hf', True)}", fix="keep the one that is to be written"
        )
        return
    if not export.merge_lora and (export.adapters or not export.converts):
        entry = next(entry for entry in reversed(given.entries) if entry.key == "merge_lora")
        why, fix = "merging adapters is what export does", f"write {entry.written(True)}, or remove it"
        yield Finding("merge_lora: false is not supported", entry.where, why, fix)
    only = [key for key in ("mcore_model", "torch_dtype", "test_convert_precision") if getattr(export, key)]
    if not export.converts and only:
        fix = f"{write('to_mcore', True)}, or " + (write("to_hf", True) if "mcore_model" in only else "remove it")
        yield Finding(f"{only[0]} without a conversion", "", "it says how a model is converted", fix)
    if not export.converts and export.export_dir is None and given.origin("export_dir") is None:
        why = "it is the folder that the model is written into"
        yield Finding(f"{ref('export_dir')} is missing", "", why, f"--{ref('export_dir')} FOLDER")
    if export.to_hf and not (export.mcore_model or export.model_name_or_path or export.adapters):
        yield Finding("mcore_model is missing", fix="--mcore_model FOLDER, the checkpoint of Megatron-Core")
    elif export.to_mcore and not (export.mcore_model or export.model_name_or_path):
        fix = f"--{ref('model_name_or_path')} FOLDER, or the id of a model on a hub"
        yield Finding(f"{ref('model_name_or_path')} is missing", fix=fix)
    elif not export.converts and not only and not (export.model_name_or_path or export.adapters):
        yield Finding(f"{ref('adapter_name_or_path')} is missing", fix=_ADAPTER)
    if export.test_convert_precision and export.adapters:
        why = "there is no other copy of the merged model to compare with"
        fix = "merge them first, with `megatune export`, and convert the merged model"
        yield Finding(f"{assign('test_convert_precision', True)} with adapters", "", why, fix)


def merge(export: ExportOptions, base: str, adapters: Sequence[Path]) -> str:
    """Merge adapters into their model; return a one-line summary.

    Raises:
        MegatuneError: as `megatune export`.
    """
    from megatune.hub.models import open_model
    from megatune.hub.vocabulary import as_adapted

    assert export.export_dir is not None
    if not adapters:
        why, fix = f"{base} holds no adapter, and is a Hugging Face model as it is", f"add {_ADAPTER}"
        raise MegatuneError(Finding("there is nothing to merge", "", why, fix), ExitCode.SETTINGS)
    folder = as_adapted(open_model(base, export.model_revision, export.cache_dir), adapters).fetch()

    from megatune.training.conversion import merge_adapters

    size, overwrite = int(export.export_size * 10**9), export.overwrite_output_dir
    return merge_adapters(folder, adapters, Path(export.export_dir), max_file_bytes=size, overwrite=overwrite)


def convert(export: ExportOptions, base: str, adapters: Sequence[Path]) -> tuple[Path, Path, str]:
    """Convert a model; return the name of the source for messages, the target, and a one-line summary.

    Raises:
        MegatuneError: as `megatune export`.
    """
    from megatune.hub.megatron import is_hugging_face, is_torch_dist
    from megatune.hub.models import open_model
    from megatune.hub.vocabulary import as_adapted

    source = export.mcore_model or export.model_name_or_path or export.adapters[0]
    weights = export.mcore_model or base
    in_megatron_form = None if is_hugging_face(weights) else export.mcore_model  # a run's checkpoint may be either
    model = as_adapted(open_model(base, export.model_revision, export.cache_dir, in_megatron_form), adapters)
    is_plain = export.mcore_model is None and not is_torch_dist(weights)
    if export.to_hf and is_plain and not adapters:
        fix = "name the folder of Megatron-Core: --mcore_model FOLDER"
        finding = Finding("there is nothing to convert", "", f"{weights} is a Hugging Face model as it is", fix)
        raise MegatuneError(finding, ExitCode.SETTINGS)

    import torch

    from megatune.training.conversion import to_hf, to_mcore

    folder, target = model.fetch(), Path(export.export_dir or _default_target(source, export))
    options: dict[str, Any] = {
        "dtype": None if export.torch_dtype is None else getattr(torch, export.torch_dtype),
        "max_file_bytes": int(export.export_size * 10**9),
        "overwrite": export.overwrite_output_dir,
    }
    if export.to_hf:
        line = to_hf(folder, folder if is_plain else Path(weights), adapters, target, **options)
    else:
        line = to_mcore(folder, adapters, target, name=source, **options)
    return folder if export.model_name_or_path else Path(source), target, line


def _default_target(source: str, export: ExportOptions) -> str:
    """Return a folder next to the source; for an id on a hub, in the current folder."""
    end = "-hf" if export.to_hf else "-mcore"
    return f"{source.rstrip('/')}{end}" if Path(source).exists() else f"{source.rpartition('/')[2]}{end}"
