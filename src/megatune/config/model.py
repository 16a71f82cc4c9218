"""The model of a run with the changes of its settings: rotary scaling and added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatune.config.settings import Settings
from megatune.config.values import construct, read_text
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, read_architecture, read_config
from megatune.families.rope import rope_parameters, rope_problems, with_rope_scaling
from megatune.hub.models import MAIN, ChangedModel, Model, open_model
from megatune.hub.vocabulary import TOKENIZER, ExtendedModel, NewTokens, padded_rows, rows_of, with_rows


def as_scaled(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return config.json with the rotary scaling of a run.

    Raises:
        MegatuneError: SETTINGS, see `with_rope_scaling`; or the family does not support it.
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


def new_tokens(settings: Settings) -> NewTokens | None:
    """Return the tokens that a run adds to its model; None if it adds none.

    Raises:
        MegatuneError: SETTINGS, if new_special_tokens_config is not a mapping of tokens to texts.
    """
    model = settings.model
    described = _descriptions(model.new_special_tokens_config) if model.new_special_tokens_config else {}
    plain, special = tuple(model.add_tokens), (*model.add_special_tokens, *described)
    if not (plain or special or model.resize_vocab):
        return None
    init, seed = model.init_special_tokens, settings.run.seed
    meant = tuple(described.items()) if init != "noise_init" else ()
    return NewTokens(plain, special, meant, init != "desc_init", seed)


def _descriptions(name: str) -> dict[str, str]:
    try:
        found = construct(read_text(Path(name)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _no_descriptions(name, str(error)) from error
    texts = [each for pair in found.items() for each in pair] if isinstance(found, dict) else [None]
    if not all(isinstance(each, str) and each for each in texts):
        raise _no_descriptions(name, "it is not a mapping of tokens to texts")
    return found


def _no_descriptions(name: str, why: str) -> MegatuneError:
    what = f"new_special_tokens_config: {name} cannot be read"
    fix = "write a YAML file with lines `<token>: what it means`"
    return MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)


def is_changed(settings: Settings) -> bool:
    """Return whether the settings change the model."""
    return settings.model.rope_scaling is not None or new_tokens(settings) is not None


def changed(model: Model, settings: Settings) -> Model:
    """Return a model with the changes of a run: added tokens, and a config.json with rotary scaling."""
    if (tokens := new_tokens(settings)) is not None:
        model = ExtendedModel(model, tokens)
    if settings.model.rope_scaling is None:
        return model

    def scaled(folder: Path) -> dict[str, Any]:
        config = as_scaled(read_config(folder), settings)
        read_architecture(config, str(folder / "config.json"))  # so that errors name the user's own file
        return config

    return ChangedModel(model, scaled)


def open_changed(settings: Settings, name: str, revision: str = MAIN, weights: str | None = None) -> Model:
    """Open a model with the changes of a run; see `open_model`."""
    return changed(open_model(name, revision, settings.model.cache_dir, weights), settings)


def as_changed(config: Mapping[str, Any], settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Return config.json with the changes of a run.

    Args:
        folder: of the model, whose tokenizer decides which rows new tokens get; without it each gets a new row.

    Raises:
        MegatuneError: see `as_scaled`, `new_tokens` and `ExtendedModel`.
    """
    tokens = new_tokens(settings)
    if tokens is not None and folder is not None and (folder / TOKENIZER).is_file():
        config = read_config(ExtendedModel(Model(folder), tokens).config_dir())
    elif tokens is not None and (number := len({*tokens.plain, *tokens.special})):
        config = with_rows(config, padded_rows(rows_of(config) + number))
    return as_scaled(config, settings)


def lines_of(model: Model, settings: Settings) -> list[str]:
    """Return log lines on the changes of a model by its settings."""
    tokens, lines = new_tokens(settings), list[str]()
    if tokens is not None:
        lines.append(ExtendedModel(model, tokens).line())
    if settings.model.rope_scaling is not None:
        lines.append(scaling_line(read_config(model.config_dir()), settings))
    return lines


def scaling_line(config: Mapping[str, Any], settings: Settings) -> str:
    """Return the log line on the effect of rope_scaling."""
    changed = as_scaled(config, settings)
    if changed == config:
        original = rope_parameters(config)["original_max_position_embeddings"]
        longest = settings.data.cutoff_len
        return f"accepted   rope_scaling: no effect, cutoff_len {longest} is within the model's {original} positions"
    rope, key = rope_parameters(changed), "max_position_embeddings"
    kind, factor = rope["rope_type"], rope["factor"]
    return f"model      rope_scaling {kind}: factor {factor:g}, {changed[key]} positions instead of {config.get(key)}"
