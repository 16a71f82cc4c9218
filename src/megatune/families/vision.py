"""The declaration of a vision-language family besides its decoder: how vision_config is read, and the encoder's
tensors.

An encoder is Transformers' module, with its names, or the engine's own. The tensors of the latter are declared by their
names in Transformers' modules, `vision_tower` and, for its projector, `multi_modal_projector`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from megatune.encoders import Vision
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.weights import HFTensor, Stack, TensorLayout, Weight
from megatune.rope_scaling import MultimodalRope

if TYPE_CHECKING:
    from megatune.families.family import Family


LAYER = "blocks.{layer}"
SIZES = ("depth", "num_heads", "patch_size", "spatial_merge_size")  # keys of vision_config in the Qwen families
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MODULES = "model.language_model."

# Checkpoints of Qwen2-VL and Qwen2.5-VL on the hub, and as Transformers saves them.
BEFORE_MODULES = CheckpointForm(prefixes=((_MODULES, "model."), ("model.visual.", "visual.")))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionDeclaration:
    """How a family reads config.json besides its decoder's part, and which encoder it has.

    Attributes:
        encoder: Transformers' class, as "module:class"; its configuration class is taken from its annotation `config`.
            "" for the engine's own encoder.
        required: keys of config.json, or "part.key" within a part of it, with the only supported value.
        wrong: yields further problems of config.json, with reasons.
        decoders: families by the model_type of text_config, whose defaults apply, the first one without a model_type;
            empty if all have the same defaults.
        keys: keys of vision_config by Vision attribute, where the names differ.
        dimensions: keys of vision_config that must be whole numbers above 0.
        defaults: Transformers' defaults of Vision attributes that a vision_config may omit.
        constants: Vision attributes that are fixed for the family.
        read: computes further Vision attributes from config.json.
        text: fixed values of keys of the decoder's part, which override config.json.
        text_ties: whether tied embeddings in the decoder's part override the root.
        mrope: default of the decoder's multimodal rotary settings; None if rotary embedding uses one position.
    """

    encoder: str = ""
    required: Mapping[str, Any] = field(default_factory=dict)
    wrong: Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]] | None = None
    decoders: Mapping[str, Family] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    dimensions: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    text_ties: bool = False
    mrope: MultimodalRope | None = None

    def problems(self, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield problems of vision_config, or of the decoder's multimodal rotary embedding, with reasons."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            yield "'vision_config' is missing", "the model has a vision encoder"
            return
        for key in self.dimensions:
            if not isinstance(vision.get(key), int) or vision[key] < 1:
                yield f"vision_config: {key} = {vision.get(key)!r} is not a whole number above 0", ""
        for key, value in self.required.items():
            part, _, name = key.rpartition(".")
            written = (config.get(part) or {} if part else config).get(name)
            if written is not None and written != value:
                yield f"{key} = {written!r} is not supported", f"the encoder is computed with {key} = {value!r}"
        kind = (config.get("text_config") or config).get("model_type")
        if len(self.decoders) > 1 and kind and str(kind) not in self.decoders:
            what = f"text_config: model_type = {kind!r} is not supported"
            yield what, f"the decoder is a {' or a '.join(self.decoders)}"
        if self.wrong is not None:
            yield from self.wrong(config)
        if self.mrope is None:
            return
        section = self._rope(config).get("mrope_section", self.mrope.section)
        sizes = section if isinstance(section, Sequence) else ()
        if len(sizes) != 3 or not all(isinstance(size, int) and size >= 0 for size in sizes):
            yield f"mrope_section = {section!r} is impossible", "it must be three numbers of frequencies"

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's part of config.json: text_config, or the keys next to vision_config."""
        text = {**(config.get("text_config") or config), **self.text}
        # Transformers uses the root's value; without one the decoder's family decides.
        root, own = config.get("tie_word_embeddings"), text.get("tie_word_embeddings")
        text["tie_word_embeddings"] = own if root is None or (own and self.text_ties) else root
        if self.decoders:
            own = self.decoders.get(str(text.get("model_type")), next(iter(self.decoders.values())))
            defaults = {"head_dim": own.head_dim_default, **own.defaults}
            text |= {
                key: value
                for key, value in defaults.items()
                if text.get(key) is None and not (key in own.nulls and key in text)
            }
        text.setdefault("torch_dtype", config.get("dtype") or config.get("torch_dtype"))
        for key in ("rope_scaling", "rope_parameters"):
            rope = text.get(key)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
                text[key] = {**{name: value for name, value in rope.items() if name != "type"}, "rope_type": "default"}
        return text

    def architecture(self, config: Mapping[str, Any]) -> tuple[Vision, MultimodalRope | None]:
        """Read a config.json for which `problems` found nothing."""
        written = {"in_channels": config["vision_config"].get("in_chans"), **config["vision_config"]}
        values = {each.name: written.get(self.keys.get(each.name, each.name)) for each in fields(Vision)}
        values |= {name: config.get(name) for name in _TOKENS}
        values |= self.read(config) if self.read else {}
        known: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        # Tuples instead of JSON's lists, to be hashable.
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        known["config"] = json.dumps(config["vision_config"], sort_keys=True)
        vision = Vision(**{**self.defaults, **known, **self.constants})
        if self.mrope is None:
            return replace(vision, one_position=True), None
        rope = self._rope(config)
        section = tuple(rope.get("mrope_section", self.mrope.section))
        interleaved = bool(rope.get("mrope_interleaved", self.mrope.interleaved))
        return vision, replace(self.mrope, section=section, interleaved=interleaved)

    def _rope(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = config.get("text_config") or config
        return text.get("rope_scaling") or text.get("rope_parameters") or {}


def as_decoder(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Rename a language model's tensors to those in Transformers' modules of a vision-language model."""
    return tuple(replace(weight, hf=tuple(map(_as_decoder, weight.hf))) for weight in weights)


def _as_decoder(tensor: HFTensor) -> HFTensor:
    if not tensor.name.startswith("model."):  # the output layer
        return tensor
    return replace(tensor, name=_MODULES + tensor.name.removeprefix("model."))


def part(stack: Stack, name: str, *shape: str, linear: bool = True) -> Weight:
    """Declare a tensor of the encoder or of a merger by its name in Transformers, with Vision attributes as sizes."""
    num_layers = "vision.num_deepstack_mergers" if stack is Stack.DEEPSTACK else "vision.depth"
    tensor = HFTensor(f"model.visual.{name}", tuple(f"vision.{size}" for size in shape))
    return Weight(
        f"vision_model.{name}", TensorLayout.REPLICATED, (tensor,), stack=stack, num_layers=num_layers, linear=linear
    )


def part_with_bias(stack: Stack, name: str, *shape: str) -> tuple[Weight, Weight]:
    """Declare a linear layer or LayerNorm with bias, by the shape of its weight."""
    return part(stack, f"{name}.weight", *shape), part(stack, f"{name}.bias", *shape[:1])


PATCHES = part(
    Stack.VISION,
    "patch_embed.proj.weight",
    "hidden_size", "in_channels", "temporal_patch_size", "patch_size", "patch_size",
)  # fmt: skip
# The first weight has the rows of all queries, then of all keys, then of all values.
ATTENTION = (
    *part_with_bias(Stack.VISION, f"{LAYER}.attn.qkv", "qkv_size", "hidden_size"),
    *part_with_bias(Stack.VISION, f"{LAYER}.attn.proj", "hidden_size", "hidden_size"),
)
LAYER_NORMS = tuple(
    weight for norm in ("norm1", "norm2") for weight in part_with_bias(Stack.VISION, f"{LAYER}.{norm}", "hidden_size")
)
# The merger of Qwen2-VL and Qwen2.5-VL, without its norm.
MERGER = (
    *part_with_bias(Stack.PROJECTOR, "merger.mlp.0", "merged_size", "merged_size"),
    *part_with_bias(Stack.PROJECTOR, "merger.mlp.2", "out_hidden_size", "merged_size"),
)


V, F, H = "vision.hidden_size", "vision.intermediate_size", "vision.out_hidden_size"
PATCH_SHAPE = (V, "vision.in_channels", "vision.patch_size", "vision.patch_size")
_TOWER, _PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."
_SHAPES = {
    **dict.fromkeys(("norm1", "norm2"), (V,)),
    **dict.fromkeys((f"attention.{each}_proj" for each in "qkvo"), (V, V)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (F, V)),
    "mlp.down_proj": (V, F),
}
_DECODER = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    (_PROJECTOR, "multi_modal_projector."),
)
# As Transformers saves checkpoints, and as most are published.
SAVED = CheckpointForm(prefixes=(*_DECODER, (_TOWER, "vision_tower.")))
FORMS = (SAVED, AS_MAPPED)
# As Google publishes them.
WITH_VISION_MODEL = CheckpointForm(prefixes=(*_DECODER, (_TOWER, "vision_tower.vision_model.")))


def tower(engine: str, name: str, *shape: str | int, stack: Stack = Stack.VISION, **declared: Any) -> Weight:
    """Declare a tensor of the encoder by its names in the engine and in Transformers' module."""
    tensor = HFTensor((_TOWER if stack is Stack.VISION else _PROJECTOR) + name, shape)
    return Weight(
        f"vision_model.{engine}", TensorLayout.REPLICATED, (tensor,), stack=stack, num_layers="vision.depth", **declared
    )


def projector(engine: str, name: str, *shape: str | int, **declared: Any) -> Weight:
    """Declare a tensor of the projector."""
    return tower(f"projector.{engine}", name, *shape, stack=Stack.PROJECTOR, **declared)


def with_bias(declare: Any, engine: str, name: str, *shape: str | int, **declared: Any) -> tuple[Weight, ...]:
    """Declare weight and bias of a module by `tower` or `projector`, from the weight's shape."""
    return (
        declare(f"{engine}.weight", f"{name}.weight", *shape, **declared),
        declare(f"{engine}.bias", f"{name}.bias", *shape[:1], **declared),
    )


def layers(path: str, names: Mapping[str, str], *, bias: bool = False) -> tuple[Weight, ...]:
    """Declare the modules of a layer.

    Args:
        path: of a layer in Transformers' module, with {layer}.
        names: of its modules in Transformers, by their names in the engine's layer.
    """
    return tuple(
        tower(
            f"layers.{{layer}}.{engine}.{end}",
            f"{path}.{name}.{end}",
            *_SHAPES[engine][: None if end == "weight" else 1],
        )
        for engine, name in names.items()
        for end in (("weight", "bias") if bias else ("weight",))
    )
