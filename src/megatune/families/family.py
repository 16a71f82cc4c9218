"""What a family declares, and how a config.json becomes an Architecture through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from megatune.architecture import Architecture, DeltaNet, MixtureOfExperts, MultiLatentAttention
from megatune.encoders import Vision
from megatune.errors import Finding
from megatune.families.dense import LINEAR_ATTENTION, delta_problems
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.mtp import MTPDeclaration
from megatune.families.rope import (
    FULL_ATTENTION,
    ROPE_TYPES,
    SLIDING_ATTENTION,
    context_length,
    factor_problems,
    rope_parameters,
    rope_problems,
    rope_scaling,
)
from megatune.families.scores import num_labels, score_problems
from megatune.families.sparse import expert_problems
from megatune.families.values import value_problems
from megatune.families.vision import VisionDeclaration
from megatune.families.weights import Stack, Weight, hf_shapes, layers_of

Config = Mapping[str, Any]

# Transformers' defaults for keys that a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "max_position_embeddings": 2048,
}  # fmt: skip
_FP8_BLOCK = (128, 128)
_DIMENSIONS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, declared.

    Attributes:
        model_type: the Hugging Face model_type.
        weights: its weight map.
        constants: Architecture attributes that every member shares and config.json does not say.
        read: Architecture attributes that config.json says in this family only, by its key.
        required: config.json keys and the one value this engine computes; an absent key has that value.
        dimensions: config.json keys that are whole numbers above 0, beside those of every decoder.
        derive: Architecture attributes that take more than a key.
        defaults: Transformers' defaults of this family for keys that a config.json may leave out.
        nulls: keys where null is a value of its own, not one left out.
        aliases: config.json keys that may go by another name: the one used here, by the other.
        rope_types: the kinds of rotary scaling it may ask for.
        ignored_keys: regular expressions of checkpoint keys that this model does not use, as Transformers does not;
            {num_layers} is replaced by the number of layers.
        carried_keys: regular expressions of checkpoint keys that this model does not use, and that are written back as
            they were read; as those above.
        mtp: the layer that predicts a further token, where a run may train it; otherwise its weights are among those
            keys.
        partial_rotary: config.json's partial_rotary_factor may leave channels of a head unturned.
        head_dim_key: config.json key of the head dimension, of its rotary part in latent attention.
        head_dim_default: head dimension where config.json has none; None means hidden_size / num_attention_heads.
        experts: reads the mixture of experts; None from it where no layer is sparse.
        latent_attention: reads multi-head latent attention.
        delta_nets: reads gated delta nets; None from it where every layer has attention.
        windows: reads the window of each layer; () from it where none has one.
        problems: what else is wrong with a config.json, and why.
        vision: how a vision-language model's config.json is read beside its decoder's part; None for a language model.
        dequantized: methods of quantization whose files are read in 16 bits (`bridge.block_formats`).
        computed_as: the model_type whose classes of Transformers compute it, if it has none.
        forms: how checkpoints name and arrange tensors; the first where several fit.
        renamed: parts of tensors' names that Transformers' modules have by another name.
    """

    model_type: str
    weights: tuple[Weight, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    dimensions: tuple[str, ...] = ()
    derive: Callable[[Config], Mapping[str, Any]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nulls: tuple[str, ...] = ("pad_token_id",)
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ROPE_TYPES
    ignored_keys: tuple[str, ...] = ()
    carried_keys: tuple[str, ...] = ()
    mtp: MTPDeclaration | None = None
    partial_rotary: bool = False
    head_dim_key: str = "head_dim"
    head_dim_default: int | None = None
    experts: Callable[[Config], MixtureOfExperts | None] | None = None
    latent_attention: Callable[[Config], MultiLatentAttention] | None = None
    delta_nets: Callable[[Config], DeltaNet | None] | None = None
    windows: Callable[[Config], tuple[int | None, ...]] | None = None
    problems: Callable[[Config], Iterator[tuple[str, str]]] | None = None
    vision: VisionDeclaration | None = None
    dequantized: tuple[str, ...] = ()
    computed_as: str = ""
    forms: tuple[CheckpointForm, ...] = (AS_MAPPED,)
    renamed: tuple[tuple[str, str], ...] = ()

    def weight_map(self, architecture: Architecture) -> tuple[Weight, ...]:
        """List the weights of this member of the family."""
        behind = self.mtp.weights(self.weights) if self.mtp is not None and architecture.mtp_num_layers else ()
        return tuple(weight for weight in (*self.weights, *behind) if weight.exists(architecture))

    def vocabulary_tensors(self) -> list[str]:
        """List the tensors with a row for each token by their names in files, of every form."""
        names = [tensor.name for weight in self.weights for tensor in weight.hf if tensor.shape[:1] == ("vocab_size",)]
        return list(dict.fromkeys(form.file_name(name) for name in names for form in self.forms))

    def ignored(self, architecture: Architecture) -> list[str]:
        """List regular expressions of checkpoint keys that are left out, as Transformers leaves them out."""
        # Published checkpoints with tied embeddings may carry an output layer all the same.
        # A reward model has none, and may be made from a language model.
        without = architecture.tie_word_embeddings or architecture.num_labels
        patterns = _of_layers((*self.ignored_keys, *self.carried_keys), architecture)
        return [*patterns, *([r"(language_model\.)?lm_head\.weight"] if without else [])]

    def in_modules(self, name: str) -> str:
        """Return what Transformers' modules call a tensor, by its name in files."""
        for part, other in self.renamed:
            name = name.replace(part, other)
        return name

    def carried(self, architecture: Architecture) -> list[str]:
        """List regular expressions of checkpoint keys that are written back as they were read."""
        return [] if architecture.mtp_num_layers else _of_layers(self.carried_keys, architecture)

    def copies(self, architecture: Architecture) -> dict[str, str]:
        """Return under which names files may repeat weights for a layer that predicts a further token, by the names
        that they have anyway."""
        if self.mtp is None or not self.mtp.copies or not architecture.mtp_num_layers:
            return {}
        names = {weight.engine: weight.hf[0].name for weight in self.weight_map(architecture)}
        repeated = {names[engine]: copy for engine, copy in self.mtp.copies.items() if engine in names}
        return dict(zip(repeated, _of_layers(tuple(repeated.values()), architecture), strict=True))

    def check(self, config: Config, where: str) -> list[Finding]:
        """Find everything in config.json that keeps this engine from computing the model."""
        published = "use the config.json that was published with the weights"
        # What follows takes their types as given.
        if findings := _findings(value_problems(config), where, published):
            return findings
        findings = _findings(self.vision.problems(config), where, published) if self.vision is not None else []
        findings += _findings(score_problems(config, has_vision=self.vision is not None), where, published)
        written, config = config, self._filled(config)
        findings += [
            Finding(f"{key!r} is missing", where, fix=published)
            if config.get(key) is None
            else Finding(f"{key} = {config[key]!r} is not a whole number above 0", where)
            for key in (*_DIMENSIONS, *self.dimensions)
            if not isinstance(config.get(key), int) or config[key] < 1
        ]
        for key, value in self.required.items():
            # 0 and 0.0 and False are one value here, and null means "not used".
            if (config.get(key, value) or 0) != (value or 0):
                what = f"{key} = {config[key]!r} is not supported"
                why = f"{self.model_type} is computed with {key} = {value!r}; another value would change the numbers"
                findings.append(Finding(what, where, why, "train a checkpoint without it"))
        findings += _findings(self._computation_problems(config), where, "train a checkpoint without it")
        fix = "remove rope_scaling to train at the published context length"
        findings += _findings(
            rope_problems(rope_parameters(config), self.rope_types, partial=self.partial_rotary), where, fix
        )
        if not findings and self.problems is not None:
            findings += _findings(self.problems(config), where, published)
        if not findings:
            architecture = self.architecture(written)
            findings += _findings(expert_problems(architecture), where, published)
            findings += _findings(delta_problems(architecture), where, published)
            findings += _findings(factor_problems(architecture), where, published)
            findings += _findings(_vision_problems(architecture), where, published)
        return findings

    def architecture(self, config: Config) -> Architecture:
        """Read the numbers of a config.json that `check` found nothing against."""
        written, config = config, self._filled(config)
        heads = config["num_attention_heads"]
        rope = rope_parameters(config)
        kv_channels = config.get(self.head_dim_key) or self.head_dim_default or config["hidden_size"] // heads
        part = rope["partial_rotary_factor"]
        vision, mrope = (None, None) if self.vision is None else self.vision.architecture(written)
        architecture = Architecture(
            model_type=self.model_type,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            kv_channels=kv_channels,
            rotary_channels=int(kv_channels * part) if self.partial_rotary and part not in (None, 1) else None,
            vocab_size=config["vocab_size"],
            max_position_embeddings=context_length(config) or 0,
            norm_epsilon=config["rms_norm_eps"],
            rotary_base=float(rope["rope_theta"]),
            rope_scaling=rope_scaling(rope),
            # Without an output layer there is nothing to tie.
            tie_word_embeddings=bool(config["tie_word_embeddings"]) and not num_labels(config),
            initializer_range=config["initializer_range"],
            torch_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            moe=self.experts(config) if self.experts else None,
            mla=self.latent_attention(config) if self.latent_attention else None,
            delta=self.delta_nets(config) if self.delta_nets else None,
            windows=self.windows(config) if self.windows else (),
            vision=vision,
            mrope=mrope,
            num_labels=num_labels(config),
            padding_token=_padding_token(config),
            **{attribute: config[key] for attribute, key in self.read.items()},
            **(self.derive(config) if self.derive else {}),
            **self.constants,
        )
        return architecture if vision is None else replace(architecture, vision=self._counted(architecture))

    def _counted(self, architecture: Architecture) -> Vision:
        """Return the encoder's numbers, with those of its parameters."""
        assert architecture.vision is not None
        encoder = self._num_parameters(architecture, (Stack.VISION,))
        projectors = self._num_parameters(architecture, (Stack.PROJECTOR, Stack.DEEPSTACK))
        return replace(architecture.vision, num_parameters=encoder, num_projector_parameters=projectors)

    def _num_parameters(self, architecture: Architecture, stacks: tuple[Stack, ...]) -> int:
        return sum(
            prod(shape)
            for weight in self.weight_map(architecture)
            if weight.stack in stacks and not weight.is_buffer
            for layer in layers_of(weight, architecture)
            for shape in hf_shapes(weight, architecture, layer).values()
        )

    def _computation_problems(self, config: Config) -> Iterator[tuple[str, str]]:
        quantization = config.get("quantization_config") or {}
        method, blocks = quantization.get("quant_method", "unknown"), quantization.get("weight_block_size")
        if quantization and method not in self.dequantized:
            yield f"the weights are quantized ({method})", "training needs them in 16 or 32 bits"
        elif method == "fp8" and blocks != list(_FP8_BLOCK):
            what = f"the weights are quantized (fp8 with weight_block_size = {blocks!r})"
            yield what, f"fp8 is read in blocks of {list(_FP8_BLOCK)}"
        kinds = {FULL_ATTENTION} | ({LINEAR_ATTENTION} if self.delta_nets else set())
        kinds |= {SLIDING_ATTENTION} if self.windows else set()
        others = sorted(set(config.get("layer_types") or ()) - kinds)
        if others:
            what = f"layer_types has {', '.join(others)}, which is not supported"
            yield what, f"{self.model_type} is computed with {', '.join(sorted(kinds))}"

    def _filled(self, config: Config) -> dict[str, Any]:
        """Put config.json, of its decoder's part, under one set of names, with defaults for what it leaves out."""
        if self.vision is not None:
            config = self.vision.text_config(config)
        named = {self.aliases.get(key, key): value for key, value in config.items()}
        absent = {
            key: value
            for key, value in {**_DEFAULTS, **self.defaults}.items()
            if named.get(key) is None and not (key in self.nulls and key in named)
        }
        return {**named, **absent}


def _padding_token(config: Config) -> int | None:
    """Return the row of the word embedding that gets no gradient; torch counts a negative one from the last."""
    token: int | None = config.get("pad_token_id")
    return token if token is None or token >= 0 else config["vocab_size"] + token


def _of_layers(patterns: tuple[str, ...], architecture: Architecture) -> list[str]:
    return [pattern.replace("{num_layers}", str(architecture.num_layers)) for pattern in patterns]


def _vision_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    mrope, vision, half = architecture.mrope, architecture.vision, architecture.rotary_dim // 2
    if mrope is not None and sum(mrope.section) != half:
        why = f"rotary embedding turns {architecture.rotary_dim} channels of a head by {half} frequencies"
        yield f"mrope_section = {list(mrope.section)} is impossible", why
    if vision is None:
        return
    if vision.out_hidden_size != architecture.hidden_size:
        why = f"the decoder's hidden states are {architecture.hidden_size} wide"
        yield f"vision_config: tokens of images and videos are {vision.out_hidden_size} wide", why
    if vision.square is not None and vision.square % (side := vision.patch_size * vision.spatial_merge_size):
        why = f"tokens of images are squares of {side} pixels"
        yield f"vision_config: image_size = {vision.square} is impossible", why
    for layer in vision.deepstack_visual_indexes:
        if layer not in range(vision.depth):
            why = f"depth = {vision.depth}, counted from 0"
            yield f"vision_config: deepstack_visual_indexes names layer {layer}, which is not there", why
    if vision.layers is not None and vision.hidden_act not in ("silu", "gelu", "gelu_pytorch_tanh"):
        why = "the encoder is computed with silu, gelu or gelu_pytorch_tanh"
        yield f"vision_config: hidden_act = {vision.hidden_act!r} is not supported", why
    if vision.layers is not None and vision.layers.rotary_base and vision.hidden_size % (4 * vision.num_heads):
        why = "rotary embeddings turn pairs of a head's channels, for height and for width"
        yield f"vision_config: num_heads = {vision.num_heads} is impossible", why
    elif vision.hidden_size % vision.num_heads:
        why = f"the encoder's hidden states are {vision.hidden_size} wide"
        yield f"vision_config: num_heads = {vision.num_heads} is impossible", why


def _findings(problems: Iterator[tuple[str, str]], where: str, fix: str) -> list[Finding]:
    return [Finding(what, where, why, fix) for what, why in problems]
