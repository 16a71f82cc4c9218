"""What is checked of a folder before its model is loaded to write text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError, closest
from megatune.families import read_config
from megatune.families.peft_config import has_score
from megatune.families.scores import num_labels
from megatune.families.weight_index import no_weights, read_whole_index

CONFIG = "config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def find_model(path: Path) -> Path:
    """Find the folder to load: `path`, or its newest checkpoint-N where `path` is a run's output without a model.

    Raises:
        MegatuneError: (INPUT) no such folder, or a folder that lacks what a model needs; one finding for each lack.
    """
    if not path.is_dir():
        raise MegatuneError(_no_folder(path), ExitCode.INPUT)
    folder = path if (path / CONFIG).is_file() else newest_checkpoint(path, CONFIG)
    if folder is None:
        why = "it has neither a config.json nor a checkpoint-N folder with one"
        fix = "name a Hugging Face model, a checkpoint-N folder or a run's output_dir"
        raise MegatuneError(Finding(f"{path} holds no model", "", why, fix), ExitCode.INPUT)
    findings = list(_missing_weights(folder))
    if not has_tokenizer(folder):
        why = f"none of {', '.join(_TOKENIZER_FILES)} is there"
        fix = "copy the tokenizer files of the base model into the folder"
        findings.append(Finding("there is no tokenizer", str(folder), why, fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return folder


def check_writes(folder: Path, adapters: Sequence[Path] = ()) -> None:
    """Refuse a reward model, or an adapter that makes one.

    Raises:
        MegatuneError: (INPUT) naming it.
    """
    scoring = [str(folder)] if num_labels(read_config(folder)) else []
    scoring += [str(path) for path in adapters if has_score(path)]
    if scoring:
        what, why = "it is a reward model", "it has a score in place of the output layer, and writes no text"
        fix = "load it with Transformers' AutoModelForSequenceClassification, whose logits are scores of whole texts"
        raise MegatuneError(Finding(what, scoring[-1], why, fix), ExitCode.INPUT)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def newest_checkpoint(path: Path, *files: str) -> Path | None:
    """Return the checkpoint-N of a run with the largest N that has one of these files; None where there is none."""
    steps = {
        int(match[1]): child
        for child in path.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(child.name)) and any((child / name).is_file() for name in files)
    }
    return steps[max(steps)] if steps else None


def _no_folder(path: Path) -> Finding:
    if path.exists():
        return Finding(f"{path} is a file", fix=f"name the folder: {path.parent}")
    near = nearest_folder(path)
    anything = "name the folder of a Hugging Face model or of a run, or the id of a model on a hub"
    return Finding(f"there is no folder {path}", fix=f"did you mean {near}?" if near else anything)


def nearest_folder(path: Path) -> Path | None:
    """Find the folder beside `path` whose name is most like its name."""
    siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
    nearest = closest(path.name, siblings)
    return path.parent / nearest if nearest else None


def _missing_weights(folder: Path) -> Iterator[Finding]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            read_whole_index(index)
        except MegatuneError as error:
            yield from error.findings
    elif not (folder / "model.safetensors").is_file():
        yield no_weights(folder)
