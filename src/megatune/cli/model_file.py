"""A settings file in place of MODEL, as `llamafactory-cli chat` and `api` take one: its keys as flags."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.entry import SettingEntry

# A key and the flag that it is, where flags have other names.
_FLAGS = {"model_name_or_path": "model", "adapter_name_or_path": "adapters", "default_system": "system"}
_SAME = (
    "model_revision", "cache_dir", "enable_thinking", "infer_backend", "max_new_tokens", "temperature", "top_p",
    "top_k", "repetition_penalty", "seed", "image_max_pixels", "image_min_pixels", "video_max_pixels",
    "video_min_pixels", "video_fps", "video_maxlen",
)  # fmt: skip
_NAMES = ("model_name", "model_author")  # one text, or two
_TEXTS = ("model_revision", "cache_dir", "infer_backend")
_BACKENDS = {"huggingface": "transformers"}
# Keys that change no answer, and why.
_PASSED = {
    "template": "a checkpoint's tokenizer has its chat template",
    "trust_remote_code": "no code of a repository is ever run",
    "infer_dtype": "a model is loaded in the dtype of its config.json",
    "finetuning_type": "the files of an adapter say what it is",
}


def read_model_file(args: argparse.Namespace) -> None:
    """Put the keys of a file that is named in place of MODEL into the flags; flags that are given win.

    Args:
        args: with `given`, the words of the command line.

    Raises:
        MegatuneError: SETTINGS, with every key that says nothing here; INPUT, where there is no such file.
    """
    if args.model is None or not args.model.endswith((".yaml", ".yml")):
        return
    from megatune.config.entry import read_file

    file, args.model = args.model, None
    entries, findings = read_file(file)
    for entry in entries:
        findings += _read(args, entry)
    if args.model is None and not args.adapters and not findings:
        fix = "write model_name_or_path: FOLDER, or the id of a model on a hub"
        findings.append(Finding("model_name_or_path is missing", file, fix=fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _read(args: argparse.Namespace, entry: SettingEntry) -> list[Finding]:
    from megatune.config.values import shown

    key, value = entry.key, entry.value.data
    if value is None:
        return []
    if key in _PASSED:
        print(f"accepted   {key}: {_PASSED[key]}", file=sys.stderr)
        return []
    name = _FLAGS.get(key, key)
    if name not in (*_FLAGS.values(), *_SAME, *_NAMES) or not hasattr(args, name):
        why = "the file says how a model answers, and this is no part of that"
        return [Finding(f"{key} is not known here", entry.where, why, "remove it; `megatune infer --help` lists flags")]
    text, is_text = entry.value.text, name in (*_FLAGS.values(), *_TEXTS, *_NAMES)
    if name in _NAMES and isinstance(value, list) and all(isinstance(each, str) for each in value):
        text = ", ".join(value)
    if (is_text and text is None) or not (is_text or isinstance(value, bool | int | float)):
        said = "text" if is_text else "a number" if name != "enable_thinking" else "true or false"
        return [Finding(f"{key} is {shown(value)}", entry.where, f"expected {said}", f"give it {said}")]
    given: Any = _BACKENDS.get(text or "", text) if is_text else value
    if name in _NAMES:
        given = value if isinstance(value, list) else [text]
    if name == "adapters":
        given = [each.strip() for each in (text or "").split(",") if each.strip()]
    if type(given) is int and isinstance(getattr(args, name), float):
        given = float(given)
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in args.given if word.startswith("--")}
    if not flags & {key, name, f"no_{name}"}:
        setattr(args, name, given)
    return []
