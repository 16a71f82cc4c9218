"""Which adapters a model is loaded with, found before anything is loaded: folders as peft writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.inputs import ADAPTER_CONFIG, CONFIG, nearest_folder, newest_checkpoint
from megatune.hub.models import is_hub_id

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


class AdaptedModel(NamedTuple):
    """A model and the adapters that it is loaded with.

    Attributes:
        base: a folder, or an id on a hub.
        adapters: folders, in the order in which they are applied.
    """

    base: str
    adapters: tuple[Path, ...]


def adapted_model(model: str, base: str | None = None, adapters: Sequence[str] = ()) -> AdaptedModel:
    """Find out what a user means by a model's name and by adapters'.

    Args:
        model: a folder or an id on a hub; where it is the folder of an adapter, or of a run whose newest checkpoint is
            one, its base is meant together with it.
        base: of that adapter, in place of what its adapter_config.json says; "" and None say nothing.
        adapters: folders of more adapters, or of runs, on a model that is none itself.

    Raises:
        MegatuneError: (SETTINGS) names that contradict each other; (INPUT) an adapter that is missing or unfit, or that
            doesn't say what its base is; one finding for each.
    """
    own = find_adapter(Path(model))
    if own is None:
        if base:
            why = f"{model} is no adapter, whose base it could be"
            finding = Finding("has no effect", "--model_name_or_path", why, f"leave it out, or MODEL, {model}")
            raise MegatuneError(finding, ExitCode.SETTINGS)
        return AdaptedModel(model, tuple(_folders(adapters)))
    if adapters:
        why = f"{model} is an adapter, too, and adapters are applied in the order in which they are named"
        fix = f"name the base as MODEL, and --adapter_name_or_path {','.join([model, *adapters])}"
        raise MegatuneError(Finding("whose base is MODEL?", "--adapter_name_or_path", why, fix), ExitCode.SETTINGS)
    config = read_adapter_config(own)
    return AdaptedModel(base or _base_of(own, config), (own,))


def find_adapter(path: Path) -> Path | None:
    """Return the folder of the adapter that a path means: itself, or its newest checkpoint-N where it is a run's
    output_dir with neither a model nor an adapter; None where that is none."""
    if (path / ADAPTER_CONFIG).is_file():
        return path
    if (path / CONFIG).is_file() or not path.is_dir():
        return None
    newest = newest_checkpoint(path, CONFIG, ADAPTER_CONFIG)
    return newest if newest is not None and (newest / ADAPTER_CONFIG).is_file() else None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json of a folder.

    Raises:
        MegatuneError: (INPUT) it is no JSON object, or not of LoRA; or the folder has no weights.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MegatuneError(Finding(f"cannot be read: {error}", str(path)), ExitCode.INPUT) from error
    findings = []
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        what = f"peft_type {kind} is no adapter that is read here"
        findings.append(Finding(what, str(path), fix="name an adapter of LoRA: peft_type LORA"))
    if not any((folder / name).is_file() for name in _WEIGHTS):
        what, fix = f"there is no {_WEIGHTS[0]}", "copy or save the adapter again"
        findings.append(Finding(what, str(folder), f"{ADAPTER_CONFIG} is there, and the weights are missing", fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return config


def _folders(names: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of adapters; all that are missing or unfit are named at once."""
    findings: list[Finding] = []
    for name in names:
        path = Path(name)
        folder = find_adapter(path)
        if folder is None:
            findings.append(_no_adapter(path))
            continue
        try:
            read_adapter_config(folder)
        except MegatuneError as error:
            findings += error.findings
        yield folder
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)


def _no_adapter(path: Path) -> Finding:
    where, fix = "--adapter_name_or_path", "name a folder that peft or a run with finetuning_type: lora has written"
    if path.is_dir():
        return Finding(f"{path} holds no adapter", where, f"it has no {ADAPTER_CONFIG}", fix)
    near = nearest_folder(path)
    return Finding(f"there is no folder {path}", where, fix=f"did you mean {near}?" if near else fix)


def _base_of(folder: Path, config: dict[str, Any]) -> str:
    name, where = config.get("base_model_name_or_path"), str(folder / ADAPTER_CONFIG)
    if not isinstance(name, str) or not name:
        why = "an adapter is nothing without the model that it was trained on"
        fix = "name that model: --model_name_or_path BASE"
        raise MegatuneError(Finding("base_model_name_or_path is empty", where, why, fix), ExitCode.INPUT)
    if not Path(name).is_dir() and not is_hub_id(name):
        fix = "name the folder that it is in now: --model_name_or_path BASE"
        raise MegatuneError(Finding(f"the base, {name}, is no folder here", where, "", fix), ExitCode.INPUT)
    return name
