"""What a vision-language family declares: its decoder's family, and the vision encoder's config and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from megatune.architecture import Architecture, Vision
from megatune.errors import Finding
from megatune.families.family import Config, Family
from megatune.families.weights import HFTensor

VISUAL = "model.visual"
LAYER = f"{VISUAL}.blocks.{{layer}}"
_SIZES = ("depth", "num_heads", "patch_size", "spatial_merge_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """A vision-language model family, declared.

    Attributes:
        decoder: the family whose decoder it has; its weight map counts the decoder's weights.
        encoder, mergers: Hugging Face tensors, as Transformers names its modules, with {layer} and {merger} (of
            deepstack_visual_indexes); shapes are names of Vision attributes or numbers.
        keys: keys of vision_config by the Vision attribute that they say, where the names differ.
        dimensions: keys of vision_config that are whole numbers above 0, beside those of every encoder.
        defaults: Transformers' defaults of Vision attributes that a vision_config may leave out.
        constants: Vision attributes that every member shares and vision_config does not say.
        read: Vision attributes that take more than a key.
        text: keys of the decoder's config.json that have this value in this family, whatever is written.
    """

    model_type: str
    decoder: Family
    encoder: tuple[HFTensor, ...]
    mergers: tuple[HFTensor, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    dimensions: tuple[str, ...] = ("hidden_size", "intermediate_size", "out_hidden_size")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Config], Mapping[str, Any]] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)

    def check(self, config: Config, where: str) -> list[Finding]:
        """Return everything in config.json that keeps the planner from counting the model, each named."""
        vision = config.get("vision_config")
        if isinstance(vision, Mapping):
            findings = [
                Finding(f"vision_config: {key} = {vision.get(key)!r} is no whole number above 0", where)
                for key in (*_SIZES, *self.dimensions)
                if not isinstance(vision.get(key), int) or vision[key] < 1
            ]
        else:
            fix = "use the config.json that was published with the weights"
            findings = [Finding("'vision_config' is missing", where, fix=fix)]
        return findings + self.decoder.check(self._text_config(config), where)

    def architecture(self, config: Config) -> Architecture:
        """Return the numbers of a config.json that `check` found nothing against."""
        written = {"in_channels": config["vision_config"].get("in_chans"), **config["vision_config"]}
        said = {each.name: written.get(self.keys.get(each.name, each.name)) for each in fields(Vision)}
        said |= self.read(written) if self.read else {}
        known: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        # JSON has lists; keys of caches have tuples.
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        vision = Vision(**{**self.defaults, **known, **self.constants})
        shapes = [vision_shapes(tensors, vision).values() for tensors in (self.encoder, self.mergers)]
        encoder, mergers = (sum(map(math.prod, each)) for each in shapes)
        vision = replace(vision, num_parameters=encoder, num_projector_parameters=mergers)
        return replace(self.decoder.architecture(self._text_config(config)), vision=vision)

    def _text_config(self, config: Config) -> dict[str, Any]:
        """Return the decoder's config.json, nested under text_config or beside vision_config.

        Its rotary embedding gives time, height and width channels of their own, which changes no sizes.
        """
        text = {**(config.get("text_config") or config), **self.text}
        text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
        text.setdefault("torch_dtype", config.get("dtype") or config.get("torch_dtype"))
        for key in ("rope_scaling", "rope_parameters"):
            rope = text.get(key)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
                text[key] = {**{name: value for name, value in rope.items() if name != "type"}, "rope_type": "default"}
        return text


def vision_shapes(tensors: Iterable[HFTensor], vision: Vision) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an encoder's or its mergers' tensors in the checkpoint, by name."""
    shapes = {}
    for tensor in tensors:
        shape = tuple(size if isinstance(size, int) else attrgetter(size)(vision) for size in tensor.shape)
        merger, layer = "{merger}" in tensor.name, "{layer}" in tensor.name
        for index in range(vision.num_mergers - 1 if merger else vision.depth if layer else 1):
            shapes[tensor.name.format(layer=index, merger=index)] = shape
    return shapes


def with_bias(name: str, *shape: str) -> tuple[HFTensor, HFTensor]:
    """Declare a linear layer, or a LayerNorm, by the shape of its weight."""
    return HFTensor(f"{name}.weight", shape), HFTensor(f"{name}.bias", shape[:1])


PATCHES = HFTensor(
    f"{VISUAL}.patch_embed.proj.weight",
    ("hidden_size", "in_channels", "temporal_patch_size", "patch_size", "patch_size"),
)
# The first one has rows of all queries, then of all keys, then of all values.
ATTENTION = (
    *with_bias(f"{LAYER}.attn.qkv", "qkv_size", "hidden_size"),
    *with_bias(f"{LAYER}.attn.proj", "hidden_size", "hidden_size"),
)
LAYER_NORMS = (*with_bias(f"{LAYER}.norm1", "hidden_size"), *with_bias(f"{LAYER}.norm2", "hidden_size"))
