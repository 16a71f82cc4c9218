"""What the adapters that a run begins with say of its settings: they are read before anything is planned or started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.load import Loaded
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG, adapter_weights
from megatune.families.peft_settings import settings_of
from megatune.families.peft_tensors import read_adapter
from megatune.families.weights import Weight, layers_of

_KEY = "adapter_name_or_path"


def with_adapters(loaded: Loaded, architecture: Architecture) -> Loaded:
    """Take the settings that the last of `adapter_name_or_path` was trained with, where it is trained further.

    What a user wrote otherwise is a finding. The others are read, so that a run does not fail on them later.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with any of the adapters.
    """
    finetuning = loaded.settings.finetuning
    if finetuning.finetuning_type != "lora" or not finetuning.adapter_name_or_path:
        return loaded
    folders, taken = [Path(path) for path in finetuning.adapter_name_or_path], {}
    findings: list[Finding] = []
    last = None if finetuning.create_new_adapter else folders.pop()
    for folder in [*folders, *([last] if last is not None else [])]:
        try:
            if folder is last:
                taken = settings_of(folder, architecture)
            else:
                read_adapter(folder, architecture)
        except MegatuneError as error:
            findings += error.findings
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return _taken(loaded, architecture, last, taken) if last is not None else loaded


def as_adapter(finetuning: FinetuningSettings, architecture: Architecture) -> FinetuningSettings:
    """Return what is trained, with the settings of the adapter that is trained further, where there is one.

    For processes that could not read the model's config.json before they were started: it changes nothing in others.

    Raises:
        MegatuneError: INPUT, see `settings_of`.
    """
    if finetuning.finetuning_type != "lora" or not finetuning.adapter_name_or_path or finetuning.create_new_adapter:
        return finetuning
    taken = settings_of(Path(finetuning.adapter_name_or_path[-1]), architecture)
    whole = dict.fromkeys((*taken["additional_target"], *finetuning.additional_target))
    return finetuning.model_copy(update={**taken, "additional_target": list(whole)})


def _taken(loaded: Loaded, architecture: Architecture, folder: Path, taken: Mapping[str, Any]) -> Loaded:
    """Return the settings with those of the adapter, as if a user had written them."""
    finetuning, written = loaded.settings.finetuning, loaded.written
    trained = finetuning.model_copy(update=dict(taken))
    kept = {name for name in taken if f"finetuning.{name}" in written}
    findings = [*_otherwise(finetuning, trained, kept, architecture, loaded, folder)]
    new = {f"finetuning.{name}": value for name, value in taken.items() if name not in kept}
    changed = loaded.taking(new, str(folder / ADAPTER_CONFIG), ADAPTER_CONFIG)
    return replace(changed, findings=[*loaded.findings, *map(loaded.phrased, findings)])


def _in_layers(architecture: Architecture, finetuning: FinetuningSettings) -> list[Weight]:
    """List the entries of adapters that a layer has: a model with experts everywhere has no dense feed-forward."""
    return [weight for weight in adapter_weights(architecture, finetuning) if layers_of(weight, architecture)]


def _otherwise(
    asked: FinetuningSettings,
    trained: FinetuningSettings,
    kept: set[str],
    architecture: Architecture,
    loaded: Loaded,
    folder: Path,
) -> Iterator[Finding]:
    """Compare what a user wrote with the adapter's."""
    for name in sorted(kept):
        mine, its = getattr(asked, name), getattr(trained, name)
        match name:
            case "lora_target":
                wanted = trained.model_copy(update={"lora_target": mine})
                is_same = _in_layers(architecture, wanted) == _in_layers(architecture, trained)
            case "additional_target":
                is_same = set(its) <= set(mine)  # what the adapter has not is the base's
            case _:
                is_same = mine == its
        if not is_same:
            what = f"`{name}` is {_shown(mine)}, that of {folder} is {_shown(its)}"
            why = f"training continues with the last adapter of `{_KEY}` as it is"
            fix = f"remove `{name}`, or write `create_new_adapter: true` to merge it and train a new one"
            yield Finding(what, loaded.written[f"finetuning.{name}"].where, why, fix)


def _shown(value: Any) -> str:
    if isinstance(value, list):  # paths of modules: what is inside of a layer
        value = [each.rpartition("{layer}.")[2].replace("{expert}.", "") for each in value]
    if isinstance(value, list) and len(value) > 3:
        return f"{', '.join(value[:3])} and {len(value) - 3} more"
    return ", ".join(value) or "none" if isinstance(value, list) else shown(value)
