"""Finds and checks the folders of a model and its peft adapters before they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError, closest
from megatune.families import read_config
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.families.peft_config import has_score, is_adapter, read_peft_config
from megatune.families.scores import num_labels
from megatune.families.weight_index import no_weights, read_whole_index
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import is_hub_id
from megatune.references import ref

CONFIG = "config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FLAG = f"--{ref('adapter_name_or_path')}"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def find_model(path: Path) -> Path:
    """Find the folder to load: `path`, or its newest checkpoint-N if `path` is a run's output without a model.

    Raises:
        MegatuneError: (INPUT) the folder does not exist, or lacks files of a model; one finding for each.
    """
    if not path.is_dir():
        raise MegatuneError(_no_folder(path), ExitCode.INPUT)
    folder = path if (path / CONFIG).is_file() else newest_checkpoint(path, CONFIG)
    if folder is None:
        why = "it has neither a config.json nor a checkpoint-N folder with one"
        fix = "name a Hugging Face model, a checkpoint-N folder or a run's output_dir"
        raise MegatuneError(Finding(f"{path} has no model", "", why, fix), ExitCode.INPUT)
    findings = list(_missing_weights(folder))
    if not has_tokenizer(folder):
        why = f"none of {', '.join(_TOKENIZER_FILES)} is there"
        fix = "copy the tokenizer files of the base model into the folder"
        findings.append(Finding("there is no tokenizer", str(folder), why, fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return folder


_SCORES = "load it with Transformers' AutoModelForSequenceClassification, whose logits are scores of whole texts"


def check_writes(folder: Path, adapters: Sequence[Path] = (), fix: str | None = None) -> None:
    """Raise if the model, or an adapter, is a reward model or a classifier, which cannot generate text.

    Args:
        fix: how to fix it; None to name the class that loads it.

    Raises:
        MegatuneError: (INPUT) naming it.
    """
    scoring = [str(folder)] if num_labels(read_config(folder)) else []
    scoring += [str(path) for path in adapters if has_score(path)]
    if scoring:
        what = "it is a reward model or a classifier"
        why = "it has a score layer in place of the output layer, and cannot generate text"
        raise MegatuneError(Finding(what, scoring[-1], why, fix or _SCORES), ExitCode.INPUT)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def newest_checkpoint(path: Path, *files: str) -> Path | None:
    """Return the checkpoint-N of a run with the largest N and one of these files; None if there is none."""
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
    """Find the folder next to `path` with the most similar name."""
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


class AdaptedModel(NamedTuple):
    """A model and the adapters that it is loaded with.

    Attributes:
        base: a folder, or an id on a hub.
        adapters: folders, in the order in which they are applied.
    """

    base: str
    adapters: tuple[Path, ...]


def adapted_model(model: str, base: str | None = None, adapters: Sequence[str] = ()) -> AdaptedModel:
    """Resolve the names of a model and adapters.

    Args:
        model: a folder or an id on a hub; if it is an adapter, or a run whose newest checkpoint is one, its base is
            loaded with it.
        base: the base of that adapter, in place of the one in its adapter_config.json; "" and None have no effect.
        adapters: folders of adapters, or of runs with adapters, for a model that is not an adapter.

    Raises:
        MegatuneError: (SETTINGS) contradictory names; (INPUT) an adapter that is missing or unsuitable, or does not
            name its base; one finding for each.
    """
    own = find_adapter(Path(model))
    if own is None:
        if base:
            why = f"{model} is not an adapter, so it has no base"
            place = f"--{ref('model_name_or_path')}"
            finding = Finding("has no effect", place, why, f"leave it out, or MODEL, {model}")
            raise MegatuneError(finding, ExitCode.SETTINGS)
        return AdaptedModel(model, tuple(_folders(adapters)))
    if adapters:
        why = f"{model} is an adapter, too, and adapters are applied in the order in which they are named"
        fix = f"name the base as MODEL, and {_FLAG} {','.join([model, *adapters])}"
        raise MegatuneError(Finding("MODEL must be the base model", _FLAG, why, fix), ExitCode.SETTINGS)
    named = read_peft_config(own).base_model_name_or_path
    return AdaptedModel(base or _base_of(own, named), (own,))


def find_adapter(path: Path) -> Path | None:
    """Return the folder of an adapter: `path`, or its newest checkpoint-N if it is a run's output_dir with neither a
    model nor an adapter; None if there is no adapter."""
    if is_adapter(path):
        return path
    if (path / CONFIG).is_file() or not path.is_dir():
        return None
    newest = newest_checkpoint(path, CONFIG, ADAPTER_CONFIG)
    return newest if newest is not None and is_adapter(newest) else None


def _folders(names: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of adapters; raise one error for all that are missing or unsuitable."""
    findings: list[Finding] = []
    for name in names:
        path = Path(name)
        folder = find_adapter(path)
        if folder is None:
            findings.append(_no_adapter(path))
            continue
        try:
            read_peft_config(folder)
        except MegatuneError as error:
            findings += error.findings
        yield folder
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)


def _no_adapter(path: Path) -> Finding:
    where, fix = _FLAG, "name a folder that peft or a run with finetuning_type: lora has written"
    if is_torch_dist(path):
        why = "it is in Megatron-Core's format, which has no common form of adapters"
        return Finding(f"the adapter in {path} cannot be read", where, why, "merge it with the tool that trained it")
    if path.is_dir():
        return Finding(f"{path} has no adapter", where, f"it has no {ADAPTER_CONFIG}", fix)
    near = nearest_folder(path)
    return Finding(f"there is no folder {path}", where, fix=f"did you mean {near}?" if near else fix)


def _base_of(folder: Path, name: str | None) -> str:
    where, why = str(folder / ADAPTER_CONFIG), "an adapter needs the model that it was trained on"
    if name is None:
        fix = f"name that model: --{ref('model_name_or_path')} BASE"
        raise MegatuneError(Finding("base_model_name_or_path is empty", where, why, fix), ExitCode.INPUT)
    if not Path(name).is_dir() and not is_hub_id(name):
        fix = f"name the folder that it is in now: --{ref('model_name_or_path')} BASE"
        raise MegatuneError(Finding(f"there is no folder {name}, the base", where, why, fix), ExitCode.INPUT)
    return name
