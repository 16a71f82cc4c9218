"""Which adapters a model is loaded with, found before anything is loaded: folders as peft writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.families.peft_config import is_adapter, read_peft_config
from megatune.generation.inputs import CONFIG, nearest_folder, newest_checkpoint
from megatune.hub.models import is_hub_id


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
            why = f"{model} is not an adapter, so it has no base"
            finding = Finding("has no effect", "--model_name_or_path", why, f"leave it out, or MODEL, {model}")
            raise MegatuneError(finding, ExitCode.SETTINGS)
        return AdaptedModel(model, tuple(_folders(adapters)))
    if adapters:
        why = f"{model} is an adapter, too, and adapters are applied in the order in which they are named"
        fix = f"name the base as MODEL, and --adapter_name_or_path {','.join([model, *adapters])}"
        raise MegatuneError(Finding("whose base is MODEL?", "--adapter_name_or_path", why, fix), ExitCode.SETTINGS)
    named = read_peft_config(own).base_model_name_or_path
    return AdaptedModel(base or _base_of(own, named), (own,))


def find_adapter(path: Path) -> Path | None:
    """Return the folder of the adapter that a path means: itself, or its newest checkpoint-N where it is a run's
    output_dir with neither a model nor an adapter; None where that is none."""
    if is_adapter(path):
        return path
    if (path / CONFIG).is_file() or not path.is_dir():
        return None
    newest = newest_checkpoint(path, CONFIG, ADAPTER_CONFIG)
    return newest if newest is not None and is_adapter(newest) else None


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
            read_peft_config(folder)
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


def _base_of(folder: Path, name: str | None) -> str:
    where, why = str(folder / ADAPTER_CONFIG), "an adapter needs the model that it was trained on"
    if name is None:
        fix = "name that model: --model_name_or_path BASE"
        raise MegatuneError(Finding("base_model_name_or_path is empty", where, why, fix), ExitCode.INPUT)
    if not Path(name).is_dir() and not is_hub_id(name):
        fix = "name the folder that it is in now: --model_name_or_path BASE"
        raise MegatuneError(Finding(f"there is no folder {name}, the base", where, why, fix), ExitCode.INPUT)
    return name
