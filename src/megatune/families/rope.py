"""Rotary settings of a config.json, with Transformers' defaults and derived values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean, with_article
from megatune.families.values import value_problems
from megatune.rope_scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
_NUMBERS = {
    "default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",),
    "linear": ("factor",), "dynamic": ("factor",), "longrope": (), "proportional": ("partial_rotary_factor",),
}  # fmt: skip
_LISTS = {"longrope": ("short_factor", "long_factor")}
# Supported unless a family declares otherwise. "dynamic" only scales texts beyond max_position_embeddings, which no run
# supports; below that it equals "default".
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_LENGTHS = ("factor", "original_max_position_embeddings")
# Kinds that a run can set, with their parameters in config.json.
SCALED = {
    "linear": _LENGTHS,
    "yarn": (*_LENGTHS, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "llama3": (*_LENGTHS, "low_freq_factor", "high_freq_factor"),
}
DYNAMIC = "it has no effect up to max_position_embeddings, which is the scaled length"


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary settings of a config.json, whether written by Transformers 5 (rope_parameters) or 4 (rope_theta
    and rope_scaling, with the kind as "rope_type" or "type"), with Transformers' defaults."""
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # By kind of layer, if layers with a window have their own.
    written = written.get(FULL_ATTENTION) or written
    parameters = {key: value for key, value in written.items() if value is not None}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if parameters["rope_type"] == "su":  # the name in early files of Phi-3
        parameters["rope_type"] = "longrope"
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    share = config.get("partial_rotary_factor")
    if share is None and config.get("rotary_dim") and config.get("head_dim"):  # as in published files of MiniMax
        share = config["rotary_dim"] / config["head_dim"]
    parameters.setdefault("partial_rotary_factor", share)
    # A value outside the rotary settings takes precedence; without any it is max_position_embeddings.
    if config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if parameters["rope_type"] == "longrope" and not parameters.get("factor"):
        positions, original = config.get("max_position_embeddings"), parameters["original_max_position_embeddings"]
        parameters["factor"] = positions / original if positions and original else 1.0
    return parameters


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that a config.json's rotary embeddings support; None if it has none.

    YaRN scales the original positions by its factor, and max_position_embeddings may still be the original number:
    Qwen's README only adds rope_scaling. With Llama 3.1's scaling max_position_embeddings is the scaled length.
    """
    positions, rope = config.get("max_position_embeddings"), rope_parameters(config)
    if rope["rope_type"] != "yarn" or not rope.get("factor") or not rope["original_max_position_embeddings"]:
        return positions
    return max(positions or 0, int(rope["factor"] * rope["original_max_position_embeddings"]))


def with_rope_scaling(config: Mapping[str, Any], requested: str | Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a config.json with another rotary scaling, in the format of the Transformers version that wrote it.

    Args:
        requested: the kind of scaling, or its parameters as in config.json; original_max_position_embeddings and the
            factor are optional.
        length: tokens of the longest row. A missing factor is set to this divided by the positions before any scaling,
            rounded up; if it fits into these, nothing is changed.

    Raises:
        MegatuneError: SETTINGS, if there is no such scaling, or the model does not support it.
    """
    stated: Mapping[str, Any] = {"rope_type": requested} if isinstance(requested, str) else requested
    given = {name: value for name, value in stated.items() if value is not None}
    given.setdefault("rope_type", given.pop("type", None))
    own = rope_parameters(config)
    original = given.get("original_max_position_embeddings") or own["original_max_position_embeddings"]
    if findings := [*_scaling_problems(config, given, original)]:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if "factor" not in given and length <= original:
        return dict(config)
    given.setdefault("factor", float(math.ceil(length / original)))
    if given["rope_type"] != "linear":
        given["original_max_position_embeddings"] = original
    if given["rope_type"] == "llama3":
        given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | given
    changed = {**config, "max_position_embeddings": int(original * given["factor"])}
    if config.get("original_max_position_embeddings"):
        changed["original_max_position_embeddings"] = original
    if config.get("rope_parameters") is None:
        return {**changed, "rope_scaling": given}
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if own[key] is not None}
    changed.pop("rope_scaling", None)
    return {**changed, "rope_parameters": {**kept, **given}}


def _scaling_problems(config: Mapping[str, Any], given: Mapping[str, Any], original: Any) -> Iterator[Finding]:
    """Yield why a config.json cannot get a scaling."""
    key, model_type = "rope_scaling", str(config.get("model_type"))
    kind, values = given["rope_type"], [Finding(what, key, why) for what, why in value_problems(given)]
    yield from values
    if not isinstance(kind, str) or kind not in SCALED:
        why = "" if kind != "dynamic" else DYNAMIC
        yield Finding(f"rope_type {kind!r} is not supported", key, why, f"write one of {', '.join(SCALED)}")
    else:
        for name in (name for name in given if name not in ("rope_type", *SCALED[kind])):
            fix = did_you_mean(str(name), SCALED[kind], f"{kind} has {', '.join(SCALED[kind])}")
            yield Finding(f"{kind} has no {name!r}", key, "", fix)
    if not values and given.get("factor", 1) < 1:
        yield Finding(f"factor = {given['factor']!r} is not a number of at least 1", key)
    if config.get("vision_config") or config.get("text_config"):
        why = "its config.json has separate rotary settings for the language model"
        fix = "remove it; the scaling that the model's README describes is written into its config.json"
        yield Finding(f"not supported with {with_article(model_type)}", key, why, fix)
    elif FULL_ATTENTION in (config.get(key) or config.get("rope_parameters") or {}):
        why = "its kinds of layers have different rotary embeddings"
        fix = "remove it, or write them into config.json"
        yield Finding(f"not supported with {with_article(model_type)}", key, why, fix)
    elif not values and not isinstance(original, int):
        yield Finding("config.json has no max_position_embeddings", key, "the factor is relative to them")


def rope_problems(rope: Mapping[str, Any], rope_types: tuple[str, ...], *, partial: bool) -> Iterator[tuple[str, str]]:
    """Yield what in `rope_parameters` is not supported, with reasons.

    Args:
        partial: whether the family may exclude channels of a head from rotation.
    """
    rope_type = rope["rope_type"]
    if rope_type not in rope_types:
        yield f"rotary scaling {rope_type!r} is not supported", f"the family is computed with {', '.join(rope_types)}"
        return
    for key in _NUMBERS[rope_type]:
        if not isinstance(rope.get(key), int | float):
            yield f"rotary scaling {rope_type!r} has no number {key!r}", f"it is {rope.get(key)!r}"
    for key in _LISTS.get(rope_type, ()):
        value = rope.get(key)
        if not isinstance(value, list) or not all(isinstance(each, int | float) and each > 0 for each in value):
            yield f"rotary scaling {rope_type!r} has no list {key!r} of numbers above 0", ""
    part, partial = rope["partial_rotary_factor"], partial or rope_type == "proportional"
    if part not in (None, 1) and not (partial and isinstance(part, int | float) and 0 < part < 1):
        why = "it must be a fraction of the channels" if partial else "rotary embedding rotates all channels here"
        yield f"partial_rotary_factor = {part!r} is not supported", why


def factor_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield lists of factors whose length is not the number of channel pairs."""
    scaling, pairs = architecture.rope_scaling, architecture.rotary_dim // 2
    if isinstance(scaling, LongRopeScaling):
        for key, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != pairs:
                why = f"rotary embedding rotates {pairs} pairs of channels, each with its own factor"
                yield f"{key} has {len(factors)} numbers", why


def rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling described by `rope_parameters`."""
    match rope["rope_type"]:
        case "proportional":
            return ProportionalRopeScaling(float(rope["partial_rotary_factor"]))
        case "linear":
            return LinearRopeScaling(float(rope["factor"]))
        case "llama3":
            numbers = {key: float(rope[key]) for key in _NUMBERS["llama3"]}
            return Llama3RopeScaling(
                **numbers, original_max_position_embeddings=int(rope["original_max_position_embeddings"])
            )
        case "yarn":
            return YarnRopeScaling(
                factor=float(rope["factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
                beta_fast=float(rope.get("beta_fast") or 32),
                beta_slow=float(rope.get("beta_slow") or 1),
                attention_factor=_attention_factor(rope),
                truncate=bool(rope.get("truncate", True)),
            )
        case "longrope":
            original, factor = int(rope["original_max_position_embeddings"]), float(rope["factor"])
            derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return LongRopeScaling(
                short_factors=tuple(map(float, rope["short_factor"])),
                long_factors=tuple(map(float, rope["long_factor"])),
                original_max_position_embeddings=original,
                attention_factor=float(rope.get("attention_factor") or derived),
            )
    return None


def softmax_scale(rope: Mapping[str, Any], head_dim: int) -> float:
    """Return the factor on the scores of latent attention, into which published models put part of YaRN's factor."""
    scale = head_dim**-0.5
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        scale *= _mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return float(scale)


def _attention_factor(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, mscale_all_dim = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which longer contexts sharpen attention (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
