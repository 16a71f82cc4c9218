"""The model of a run with the rotary scaling that its settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, read_architecture, read_config
from megatune.families.rope import rope_parameters, rope_problems, with_rope_scaling
from megatune.hub.models import MAIN, ChangedModel, Model, open_model


def as_scaled(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return what config.json says of the model that a run trains.

    Raises:
        MegatuneError: SETTINGS, see `with_rope_scaling`; or the family is not computed with it.
    """
    asked, family = settings.model.rope_scaling, FAMILIES.get(str(config.get("model_type")))
    if asked is None:
        return dict(config)
    changed = with_rope_scaling(config, asked, settings.data.cutoff_len)
    if family is not None:
        problems = rope_problems(rope_parameters(changed), family.rope_types, partial=family.partial_rotary)
        if findings := [Finding(what, "rope_scaling", why, "remove it") for what, why in problems]:
            raise MegatuneError(findings, ExitCode.SETTINGS)
    return changed


def scaled(model: Model, settings: Settings) -> Model:
    """Return a model as a run trains it: with a config.json of its own where it is scaled."""
    if settings.model.rope_scaling is None:
        return model

    def changed(folder: Path) -> dict[str, Any]:
        config = as_scaled(read_config(folder), settings)
        read_architecture(config, str(folder / "config.json"))  # what is wrong with it is said of the user's own file
        return config

    return ChangedModel(model, changed)


def open_scaled(settings: Settings, name: str, revision: str = MAIN, weights: str | None = None) -> Model:
    """Open a model of a run; see `open_model`."""
    return scaled(open_model(name, revision, settings.model.cache_dir, weights), settings)


def scaling_line(config: Mapping[str, Any], settings: Settings) -> str:
    """Say what rope_scaling makes of a config.json."""
    changed = as_scaled(config, settings)
    if changed == config:
        original = rope_parameters(config)["original_max_position_embeddings"]
        longest = settings.data.cutoff_len
        return f"accepted   rope_scaling: no effect, cutoff_len {longest} is within the model's {original} positions"
    rope, key = rope_parameters(changed), "max_position_embeddings"
    kind, factor = rope["rope_type"], rope["factor"]
    return f"model      rope_scaling {kind}: factor {factor:g}, {changed[key]} positions instead of {config.get(key)}"
