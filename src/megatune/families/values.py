"""Types and ranges of what a config.json says: a value that no published model has is named, not computed with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

# Parts that are objects where they are there.
_OBJECTS = ("text_config", "vision_config", "rope_parameters", "rope_scaling", "quantization_config")
_BOOLEANS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window")
_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Numbers with what they must be above, and what they must stay below.
_NUMBERS = {"rms_norm_eps": (0.0, 1.0), "rope_theta": (0.0, math.inf), "initializer_range": (-1e-9, math.inf)}


def value_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what no model can have, and why; of a part that is an object, what is in it, too. Null is left out."""
    yield from _problems(config, "")
    for name in _OBJECTS:
        if isinstance(part := config.get(name), Mapping):
            yield from _problems(part, f"{name}: ")


def _problems(config: Mapping[str, Any], of: str) -> Iterator[tuple[str, str]]:
    said = {key: value for key, value in config.items() if value is not None}
    for key in (key for key in _OBJECTS if key in said):
        if not isinstance(said[key], Mapping):
            yield f"{of}{key} = {_short(said[key])} is no object", "it holds settings by name"
    for key in (key for key in _BOOLEANS if key in said):
        # Some published files say 0 and 1.
        if said[key] not in (True, False):
            yield f"{of}{key} = {_short(said[key])} is neither true nor false", ""
    for key in (key for key in _COUNTS if key in said):
        if isinstance(said[key], bool) or not isinstance(said[key], int) or said[key] < 1:
            yield f"{of}{key} = {_short(said[key])} is no whole number above 0", ""
    for key, (low, high) in _NUMBERS.items():
        if key not in said:
            continue
        value = said[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{of}{key} = {_short(value)} is no number", ""
        elif not low < value < high:
            at_most = f" and below {high:g}" if math.isfinite(high) else ""
            yield f"{of}{key} = {value!r} is impossible", f"it is a finite number above {max(low, 0):g}{at_most}"
    kinds, layers = said.get("layer_types"), said.get("num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and (layers is None or len(kinds) == layers)):
        number = f"{len(kinds)} layers" if isinstance(kinds, list) else _short(kinds)
        yield f"{of}layer_types is of {number}, and num_hidden_layers is {_short(layers)}", "it has one for each layer"
    for key in (key for key in ("dtype", "torch_dtype") if key in said):
        if str(said[key]).removeprefix("torch.") not in _DTYPES:
            yield f"{of}{key} = {_short(said[key])} is no dtype of weights", f"one of {', '.join(_DTYPES)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
