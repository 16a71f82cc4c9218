"""`megatune export`: merge adapters into their model, from LLaMA-Factory's export files or from flags."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.entry import SettingEntry
    from megatune.config.values import Value

_EPILOG = """Keys are LLaMA-Factory's. From flags, or from a file with changes to it:

    megatune export --model_name_or_path Qwen3-8B --adapter_name_or_path out/first --export_dir merged
    megatune export merge.yaml export_size=2

model_name_or_path         the base: a folder, or an id on a hub; what the adapter's configuration names if left out
model_revision             branch, tag or commit of a model on a hub (main)
cache_dir                  where files of a hub are kept (the hub's own cache)
adapter_name_or_path       folders of adapters, separated by commas, merged in their order: as peft saves them, a
                           checkpoint-N, or a run's output_dir
merge_lora                 true: merging is what there is to do (true)
export_dir                 the folder to write
export_size                largest file of weights, in GB (5)
overwrite_output_dir       replace an export_dir that is not empty (false)

template, trust_remote_code, finetuning_type: lora, export_device and export_legacy_format: false may stand in a file:
the model's own chat template is kept, no code of a model is run, and merging goes tensor by tensor on the CPU."""

_QUANTIZED = "quantizing (GPTQ) is not built", "merge the adapter, and quantize the model with a tool for that"
_UPLOAD = "nothing is uploaded", "export to a folder, and upload that"
_LEGACY = "pickles are not written: weights are safetensors", "remove it"
_CONVERT = "every checkpoint here is a Hugging Face model as it is, and conversion to Megatron-Core's is not built"
# Keys, or values of them, that are known and not done: the values that pass, why, and what to do.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    **dict.fromkeys(
        ("export_quantization_bit", "export_quantization_dataset", "quantization_bit"), ((None,), *_QUANTIZED)
    ),
    "export_hub_model_id": ((None,), *_UPLOAD),
    "export_legacy_format": ((None, False), *_LEGACY),
    "merge_lora": ((None, True), "merging adapters is what export does", "write merge_lora: true, or remove it"),
    "finetuning_type": ((None, "lora"), "adapters are merged; other models are whole as they are", "remove it"),
    "export_device": ((None, "cpu", "auto"), "it is cpu or auto", "remove it"),
    "to_mcore": ((None, False), _CONVERT, "train from the Hugging Face checkpoint"),
    "to_hf": ((None, False), _CONVERT, "use the checkpoint folder"),
}
# Keys of LLaMA-Factory's files that ask for nothing here.
_PASSED = (
    "template", "trust_remote_code", "export_quantization_nsamples", "export_quantization_maxlen", "infer_dtype"
)  # fmt: skip


@dataclass(slots=True)
class _Export:
    """What is to be done.

    Attributes:
        export_size: GB.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    cache_dir: str | None = None
    adapter_name_or_path: list[str] = field(default_factory=list)
    export_dir: str | None = None
    export_size: float = 5
    overwrite_output_dir: bool = False


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "export",
        help="merge adapters into their model",
        description="Writes a model with adapters merged into it, as a Hugging Face checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE.yaml | MODEL key=value --key value")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge adapters into a model.

    Raises:
        MegatuneError: (SETTINGS) every key that is unknown, wrong or refused; (INPUT) the model or an adapter is
            missing or cannot be used; (CANNOT_WRITE) the folder; what a hub refuses the model with.
    """
    export = _read(args.words)
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


def _read(words: Sequence[str]) -> _Export:
    """Read file, overrides and flags; flags win over overrides, overrides over the file."""
    from megatune.config.entry import read_file, read_flags, read_overrides, split_arguments

    parts = split_arguments(words)
    export = _Export()
    findings: list[Finding] = []
    written: dict[str, SettingEntry] = {}
    if parts.source is not None and parts.source.endswith((".yaml", ".yml")):
        entries, findings = read_file(parts.source)
        written = {entry.key: entry for entry in entries}
    elif parts.source is not None:
        export.model_name_or_path = parts.source
    for entries, wrong in (read_overrides(parts.overrides), read_flags(parts.flags)):
        findings += wrong
        written |= {entry.key: entry for entry in entries}
    for entry in written.values():
        findings += _set(export, entry)
    if export.export_dir is None and "export_dir" not in written:
        fix = "--export_dir FOLDER"
        findings.append(
            Finding("export_dir is missing", fix=fix, why="it is the folder that the model is written into")
        )
    if not export.model_name_or_path and not export.adapter_name_or_path:
        findings.append(Finding("adapter_name_or_path is missing", fix="--adapter_name_or_path FOLDER"))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return export


def _set(export: _Export, entry: SettingEntry) -> list[Finding]:
    """Set what an entry says; return what is wrong with it."""
    key, value = entry.key, entry.value
    if key in _REFUSED:
        passing, why, fix = _REFUSED[key]
        if any(type(value.data) is type(each) and value.data == each for each in passing):
            return []
        return [Finding(f"{key}: {_shown(value)} is not supported", entry.where, why, fix)]
    if key in _PASSED or (value.data is None and key in _READERS):
        return []
    if key not in _READERS:
        near = difflib.get_close_matches(key, [*_READERS, *_REFUSED, *_PASSED], n=1)
        fix = f"did you mean {near[0]}?" if near else "remove it; `megatune export --help` lists what it takes"
        return [Finding(f"unknown setting {key!r}", entry.where, "", fix)]
    read, expected = _READERS[key]
    found = read(value)
    if found is None:
        return [Finding(f"{key} is {_shown(value)}", entry.where, f"expected {expected}")]
    setattr(export, key, found)
    return []


def _shown(value: Value) -> str:
    from megatune.config.values import shown

    return repr(value.data) if isinstance(value.data, str) else shown(value.data)


def _text(value: Value) -> str | None:
    return value.text or None


def _names(value: Value) -> list[str] | None:
    if isinstance(value.data, list):
        names = [item.text or "" for item in value.items]
    else:
        names = [part.strip() for part in (value.text or "").split(",")]
    return names if names and all(names) else None


def _size(value: Value) -> float | None:
    number = value.data
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) and number > 0 else None


def _switch(value: Value) -> bool | None:
    return value.data if isinstance(value.data, bool) else None


_READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "model_name_or_path": (_text, "a folder, or an id on a hub"),
    "model_revision": (_text, "a branch, tag or commit"),
    "cache_dir": (_text, "a folder"),
    "adapter_name_or_path": (_names, "folders, separated by commas"),
    "export_dir": (_text, "a folder"),
    "export_size": (_size, "a number of GB above 0"),
    "overwrite_output_dir": (_switch, "true or false"),
}
