"""The words of `megatune export`: LLaMA-Factory's keys and Megatron-SWIFT's, from a file or from flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.entry import SettingEntry
    from megatune.config.values import Value

_QUANTIZED = "quantizing (GPTQ) is not built", "merge the adapter, and quantize the model with a tool for that"
_UPLOAD = "nothing is uploaded", "export to a folder, and upload that"
_LEGACY = "pickles are not written: weights are safetensors", "remove it"
# Keys, or values of them, that are known and not done: the values that pass, why, and what to do.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    **dict.fromkeys(
        ("export_quantization_bit", "export_quantization_dataset", "quantization_bit"), ((None,), *_QUANTIZED)
    ),
    "export_hub_model_id": ((None,), *_UPLOAD),
    "export_legacy_format": ((None, False), *_LEGACY),
    "finetuning_type": ((None, "lora"), "adapters are merged; other models are whole as they are", "remove it"),
    "export_device": ((None, "cpu", "auto"), "it is cpu or auto", "remove it"),
    "mcore_adapter": ((None,), "adapters in Megatron's format are not read", "merge it where it was trained"),
}
# Megatron-SWIFT's names of keys.
_SAME = {
    "model": "model_name_or_path", "adapters": "adapter_name_or_path", "output_dir": "export_dir",
    "max_shard_size": "export_size", "exist_ok": "overwrite_output_dir", "load": "mcore_model",
}  # fmt: skip
# What makes no difference to a file that every layout reads.
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel",
)  # fmt: skip
# Keys of LLaMA-Factory's files that ask for nothing here.
_PASSED = (
    "template", "trust_remote_code", "export_quantization_nsamples", "export_quantization_maxlen", "infer_dtype",
    "thread_count",
)  # fmt: skip


@dataclass(slots=True)
class Export:
    """What is to be done.

    Attributes:
        export_size: GB.
        layout: keys that say one, which changes nothing.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    cache_dir: str | None = None
    adapter_name_or_path: list[str] = field(default_factory=list)
    export_dir: str | None = None
    export_size: float = 5
    overwrite_output_dir: bool = False
    merge_lora: bool = True
    to_mcore: bool = False
    to_hf: bool = False
    mcore_model: str | None = None
    torch_dtype: str | None = None
    test_convert_precision: bool = False
    test_convert_dtype: str = "float32"
    layout: list[str] = field(default_factory=list)

    @property
    def converts(self) -> bool:
        return self.to_mcore or self.to_hf


def read_words(words: Sequence[str]) -> Export:
    """Read file, overrides and flags; flags win over overrides, overrides over the file."""
    from megatune.config.entry import read_file, read_flags, read_overrides, split_arguments

    parts = split_arguments(words)
    export = Export()
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
    findings += _missing(export, written)
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return export


def _missing(export: Export, written: Mapping[str, SettingEntry]) -> list[Finding]:
    """Find what has to be said, or contradicts."""
    if export.to_mcore and export.to_hf:
        return [Finding("to_mcore: true and to_hf: true", fix="keep the one that is to be written")]
    found = []
    if not export.merge_lora and (export.adapter_name_or_path or not export.converts):
        where, fix = written["merge_lora"].where, "write merge_lora: true, or remove it"
        why = "merging adapters is what export does"
        found.append(Finding("merge_lora: false is not supported", where, why, fix))
    only = [key for key in ("mcore_model", "torch_dtype", "test_convert_precision") if getattr(export, key)]
    if not export.converts and only:
        fix = "write to_hf: true or to_mcore: true" if "mcore_model" in only else "write to_mcore: true, or remove it"
        found.append(Finding(f"{only[0]} without a conversion", "", "it says how a model is converted", fix))
    if not export.converts and export.export_dir is None and "export_dir" not in written:
        fix = "--export_dir FOLDER"
        found.append(Finding("export_dir is missing", fix=fix, why="it is the folder that the model is written into"))
    if export.to_hf and not (export.mcore_model or export.model_name_or_path):
        found.append(Finding("mcore_model is missing", fix="--mcore_model FOLDER, the checkpoint of Megatron-Core"))
    elif export.to_mcore and not (export.mcore_model or export.model_name_or_path):
        found.append(Finding("model is missing", fix="--model FOLDER, or the id of a model on a hub"))
    elif not export.converts and not only and not (export.model_name_or_path or export.adapter_name_or_path):
        found.append(Finding("adapter_name_or_path is missing", fix="--adapter_name_or_path FOLDER"))
    if export.test_convert_precision and export.adapter_name_or_path:
        why = "the model that adapters are merged into is nowhere else to be compared with"
        fix = "merge them first, with `megatune export`, and convert the merged model"
        found.append(Finding("test_convert_precision: true with adapters", "", why, fix))
    return found


def _set(export: Export, entry: SettingEntry) -> list[Finding]:
    """Set what an entry says; return what is wrong with it."""
    key, value = _SAME.get(entry.key, entry.key), entry.value
    if key in _REFUSED:
        passing, why, fix = _REFUSED[key]
        if any(type(value.data) is type(each) and value.data == each for each in passing):
            return []
        return [Finding(f"{key}: {_shown(value)} is not supported", entry.where, why, fix)]
    if key in LAYOUT:
        export.layout.append(key)
        return []
    if key in _PASSED or (value.data is None and key in _READERS):
        return []
    if key not in _READERS:
        near = difflib.get_close_matches(key, [*_READERS, *_SAME, *LAYOUT, *_REFUSED, *_PASSED], n=1)
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
    if isinstance(number, str) and (unit := re.fullmatch(r"([\d.]+)\s*(MB|GB|TB)", number.upper())):
        number = float(unit[1]) * {"MB": 1e-3, "GB": 1, "TB": 1e3}[unit[2]]
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) and number > 0 else None


def _dtype(value: Value) -> str | None:
    return value.text if value.text in ("bfloat16", "float16", "float32") else None


def _switch(value: Value) -> bool | None:
    return value.data if isinstance(value.data, bool) else None


_READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "model_name_or_path": (_text, "a folder, or an id on a hub"),
    "model_revision": (_text, "a branch, tag or commit"),
    "cache_dir": (_text, "a folder"),
    "adapter_name_or_path": (_names, "folders, separated by commas"),
    "export_dir": (_text, "a folder"),
    "export_size": (_size, "a number of GB above 0, or such as 5GB"),
    "overwrite_output_dir": (_switch, "true or false"),
    "merge_lora": (_switch, "true or false"),
    "to_mcore": (_switch, "true or false"),
    "to_hf": (_switch, "true or false"),
    "mcore_model": (_text, "a folder"),
    "torch_dtype": (_dtype, "one of: bfloat16, float16, float32"),
    "test_convert_precision": (_switch, "true or false"),
    "test_convert_dtype": (_dtype, "one of: bfloat16, float16, float32"),
}
