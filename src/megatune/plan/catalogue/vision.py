"""Vision-language models, read from their config.json: the encoder's numbers, and the decoder as a family's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import read_architecture
from megatune.plan.case import PlannedModel, VisionTower

Config = Mapping[str, Any]


def is_vision_language(config: Config) -> bool:
    """Whether this is the config.json of a model that `read_vision_language` reads."""
    return config.get("model_type") in _TOWERS


def read_vision_language(name: str, config: Config, where: str) -> PlannedModel:
    """The model of a config.json, its text settings nested under text_config or beside vision_config.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with either part.
    """
    decoder, read_tower, keys = _TOWERS[str(config["model_type"])]
    findings: list[Finding] = []
    vision = config.get("vision_config")
    tower = None
    if isinstance(vision, Mapping):
        findings += _problems(vision, keys, where)
        tower = None if findings else read_tower(vision)
    else:
        fix = "use the config.json that was published with the weights"
        findings.append(Finding("'vision_config' is missing", where, fix=fix))
    try:
        architecture = read_architecture(_text_config(config, decoder), where)
    except MegatuneError as error:
        raise MegatuneError([*findings, *error.findings], ExitCode.INPUT) from None
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return PlannedModel(name=name, architecture=architecture, vision=tower)


def _text_config(config: Config, decoder: str) -> dict[str, Any]:
    """The decoder's config.json. Its rotary embedding gives time, height and width channels of their own, which
    changes neither sizes nor speed."""
    text = dict(config.get("text_config") or config)
    text["model_type"] = decoder
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    text.setdefault("torch_dtype", config.get("dtype") or config.get("torch_dtype"))
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
            text[key] = {**{name: value for name, value in rope.items() if name != "type"}, "rope_type": "default"}
    return text


def _problems(vision: Config, keys: tuple[str, ...], where: str) -> list[Finding]:
    return [
        Finding(f"vision_config: {key} = {vision.get(key)!r} is no whole number above 0", where)
        for key in keys
        if not isinstance(vision.get(key), int) or vision[key] < 1
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Encoders. A linear layer from n to m channels has n · m weights and m biases, a LayerNorm 2 · n, an RMSNorm n.


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _patches(vision: Config, width: int) -> int:
    """Weights of the convolution that makes a vector of each patch."""
    channels = vision.get("in_channels") or vision.get("in_chans") or 3
    return int(channels * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2 * width)


def _projector(width: int, merge: int, outputs: int, norm: int) -> int:
    merged = width * merge**2
    return norm + _linear(merged, merged) + _linear(merged, outputs)


def _tower(vision: Config, width: int, ffn: int, **numbers: Any) -> VisionTower:
    return VisionTower(
        num_layers=vision["depth"],
        hidden_size=width,
        ffn_hidden_size=ffn,
        num_attention_heads=vision["num_heads"],
        patch_size=vision["patch_size"],
        spatial_merge_size=vision["spatial_merge_size"],
        **numbers,
    )


def _plain_layer(width: int, ffn: int) -> int:
    """Parameters of a layer with LayerNorms and a feed-forward without gate."""
    attention = _linear(width, 3 * width) + _linear(width, width)
    return 4 * width + attention + _linear(width, ffn) + _linear(ffn, width)


def _qwen2_vl(vision: Config) -> VisionTower:
    width = vision["embed_dim"]
    ffn = width * vision["mlp_ratio"]
    return _tower(
        vision,
        width,
        ffn,
        num_mergers=1,
        gated=False,
        num_parameters=_patches(vision, width) + vision["depth"] * _plain_layer(width, ffn),
        num_projector_parameters=_projector(width, vision["spatial_merge_size"], vision["hidden_size"], 2 * width),
    )


def _qwen2_5_vl(vision: Config) -> VisionTower:
    width, ffn = vision["hidden_size"], vision["intermediate_size"]
    attention = _linear(width, 3 * width) + _linear(width, width)
    layer = 2 * width + attention + 2 * _linear(width, ffn) + _linear(ffn, width)
    return _tower(
        vision,
        width,
        ffn,
        num_mergers=1,
        gated=True,
        num_parameters=_patches(vision, width) + vision["depth"] * layer,
        num_projector_parameters=_projector(width, vision["spatial_merge_size"], vision["out_hidden_size"], width),
    )


def _qwen3_vl(vision: Config) -> VisionTower:
    width, ffn, merge = vision["hidden_size"], vision["intermediate_size"], vision["spatial_merge_size"]
    positions = vision["num_position_embeddings"] * width
    deepstack = len(vision.get("deepstack_visual_indexes") or ())
    # The projector of the last layer normalizes patches, those of earlier layers what patches are merged to.
    last = _projector(width, merge, vision["out_hidden_size"], 2 * width)
    earlier = _projector(width, merge, vision["out_hidden_size"], 2 * width * merge**2)
    return _tower(
        vision,
        width,
        ffn,
        num_mergers=1 + deepstack,
        gated=False,
        num_parameters=_patches(vision, width) + width + positions + vision["depth"] * _plain_layer(width, ffn),
        num_projector_parameters=last + deepstack * earlier,
    )


_SIZES = ("depth", "num_heads", "patch_size", "spatial_merge_size")
_NEW_SIZES = (*_SIZES, "hidden_size", "intermediate_size", "out_hidden_size")
# The decoder's family, the encoder's reader, and what it needs, by model_type.
_TOWERS: dict[str, tuple[str, Callable[[Config], VisionTower], tuple[str, ...]]] = {
    "qwen2_vl": ("qwen2", _qwen2_vl, (*_SIZES, "embed_dim", "hidden_size", "mlp_ratio")),
    "qwen2_5_vl": ("qwen2", _qwen2_5_vl, _NEW_SIZES),
    "qwen3_vl": ("qwen3", _qwen3_vl, (*_NEW_SIZES, "num_position_embeddings")),
    "qwen3_vl_moe": ("qwen3_moe", _qwen3_vl, (*_NEW_SIZES, "num_position_embeddings")),
}
