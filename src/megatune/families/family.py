"""The declaration of a model family, and how it turns a config.json into an Architecture."""

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
from megatune.families.values import layer_problems, value_problems
from megatune.families.vision import VisionDeclaration
from megatune.families.weights import Stack, Weight, hf_shapes, layers_of
from megatune.references import remove

Config = Mapping[str, Any]

# Transformers' defaults for keys that a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "max_position_embeddings": 2048,
}  # fmt: skip
_FP8_BLOCK = (128, 128)
_DIMENSIONS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The declaration of a model family.

    Attributes:
        model_type: the Hugging Face model_type.
        weights: its weight map.
        constants: Architecture attributes that are fixed for the family.
        read: Architecture attributes that only this family reads, with their config.json keys.
        required: config.json keys with the only supported value, which is also the default of an absent key.
        dimensions: config.json keys that must be whole numbers above 0, in addition to those of every decoder.
        derive: computes Architecture attributes that depend on more than one key.
        defaults: Transformers' defaults of this family for keys that a config.json may omit.
        nulls: keys for which null is a value, and not replaced by the default.
        aliases: alternative names of config.json keys, with the names used here.
        rope_types: the supported kinds of rotary scaling.
        ignored_keys: regular expressions of checkpoint keys that neither this model nor Transformers uses;
            {num_layers} is replaced by the number of layers.
        carried_keys: regular expressions, as above, of checkpoint keys that this model does not use, but that are
            written back unchanged.
        mtp: the multi-token prediction layer, if it can be trained; otherwise its weights are among those keys.
        partial_rotary: whether config.json's partial_rotary_factor may exclude channels of a head from rotation.
        head_dim_key: config.json key of the head dimension; in latent attention of its rotary part.
        head_dim_default: head dimension if config.json has none; None means hidden_size / num_attention_heads.
        experts: reads the mixture of experts; returns None if no layer is sparse.
        latent_attention: reads multi-head latent attention.
        delta_nets: reads gated delta nets; returns None if every layer has attention.
        windows: reads the sliding window of each layer; returns () if none has one.
        problems: yields further problems of a config.json, with reasons.
        vision: how a vision-language model's config.json is read besides its decoder's part; None for a language model.
        dequantized: quantization methods whose checkpoints are dequantized to 16 bits (`bridge.block_formats`).
        computed_as: the model_type whose Transformers classes compute it, if it has none itself.
        forms: supported names and arrangements of tensors in checkpoints; of several that fit the first is used.
        renamed: parts of tensors' names, with their replacements in Transformers' modules.
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
        mtp = self.mtp.weights(self.weights) if self.mtp is not None and architecture.mtp_num_layers else ()
        return tuple(weight for weight in (*self.weights, *mtp) if weight.exists(architecture))

    def vocabulary_tensors(self) -> list[str]:
        """List the tensors with one row per token by their names in files, for every form."""
        names = [tensor.name for weight in self.weights for tensor in weight.hf if tensor.shape[:1] == ("vocab_size",)]
        return list(dict.fromkeys(form.file_name(name) for name in names for form in self.forms))

    def ignored(self, architecture: Architecture) -> list[str]:
        """List regular expressions of checkpoint keys that are skipped, as in Transformers."""
        # Published checkpoints with tied embeddings may still contain an output layer. A reward model has none, but may
        # be initialized from a language model.
        without = architecture.tie_word_embeddings or architecture.num_labels
        patterns = _of_layers((*self.ignored_keys, *self.carried_keys), architecture)
        return [*patterns, *([r"(language_model\.)?lm_head\.weight"] if without else [])]

    def in_modules(self, name: str) -> str:
        """Return the name of a tensor in Transformers' modules, given its name in files."""
        for part, other in self.renamed:
            name = name.replace(part, other)
        return name

    def carried(self, architecture: Architecture) -> list[str]:
        """List regular expressions of checkpoint keys that are written back unchanged."""
        return [] if architecture.mtp_num_layers else _of_layers(self.carried_keys, architecture)

    def copies(self, architecture: Architecture) -> dict[str, str]:
        """Return the names under which files may duplicate weights for the MTP layer, by the names of the originals."""
        if self.mtp is None or not self.mtp.copies or not architecture.mtp_num_layers:
            return {}
        names = {weight.engine: weight.hf[0].name for weight in self.weight_map(architecture)}
        repeated = {names[engine]: copy for engine, copy in self.mtp.copies.items() if engine in names}
        return dict(zip(repeated, _of_layers(tuple(repeated.values()), architecture), strict=True))

    def check(self, config: Config, where: str) -> list[Finding]:
        """Find everything in a config.json that this engine does not support."""
        published = "use the config.json that was published with the weights"
        # The checks below assume valid types.
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
            # 0, 0.0 and False are the same value here, and null means "not used".
            if (config.get(key, value) or 0) != (value or 0):
                what = f"{key} = {config[key]!r} is not supported"
                why = f"{self.model_type} is computed with {key} = {value!r}; another value would change the numbers"
                findings.append(Finding(what, where, why, "train a checkpoint without it"))
        findings += _findings(self._computation_problems(config), where, "train a checkpoint without it")
        fix = f"{remove('rope_scaling')} to train at the published context length"
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
        """Read a config.json for which `check` found no problems."""
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
            # A model with scores has no output layer to tie.
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
        """Return the vision configuration with the numbers of its parameters."""
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
        yield from layer_problems(config)  # whose number may be a default
        kinds = {FULL_ATTENTION} | ({LINEAR_ATTENTION} if self.delta_nets else set())
        kinds |= {SLIDING_ATTENTION} if self.windows else set()
        others = sorted(set(config.get("layer_types") or ()) - kinds)
        if others:
            what = f"layer_types has {', '.join(others)}, which is not supported"
            yield what, f"{self.model_type} is computed with {', '.join(sorted(kinds))}"

    def _filled(self, config: Config) -> dict[str, Any]:
        """Return the decoder's part of config.json under one set of names, with defaults for missing keys."""
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
    """Return the padding token, whose word embedding gets no gradient; torch counts negative ones from the end."""
    token: int | None = config.get("pad_token_id")
    return token if token is None or token >= 0 else config["vocab_size"] + token


def _of_layers(patterns: tuple[str, ...], architecture: Architecture) -> list[str]:
    return [pattern.replace("{num_layers}", str(architecture.num_layers)) for pattern in patterns]


def _vision_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    mrope, vision, half = architecture.mrope, architecture.vision, architecture.rotary_dim // 2
    if mrope is not None and sum(mrope.section) != half:
        why = f"rotary embedding rotates {architecture.rotary_dim} channels of a head by {half} frequencies"
        yield f"mrope_section = {list(mrope.section)} is impossible", why
    if vision is None:
        return
    if vision.out_hidden_size != architecture.hidden_size:
        why = f"the decoder's hidden states are {architecture.hidden_size} wide"
        yield f"vision_config: tokens of images and videos are {vision.out_hidden_size} wide", why
    if vision.square is not None and vision.square % (side := vision.patch_size * vision.spatial_merge_size):
        why = f"tokens of images are squares with sides of {side} pixels"
        yield f"vision_config: image_size = {vision.square} is impossible", why
    for layer in vision.deepstack_visual_indexes:
        if layer not in range(vision.depth):
            why = f"depth = {vision.depth}, counted from 0"
            yield f"vision_config: deepstack_visual_indexes names layer {layer}, which is not there", why
    if vision.layers is not None and vision.hidden_act not in ("silu", "gelu", "gelu_pytorch_tanh"):
        why = "the encoder is computed with silu, gelu or gelu_pytorch_tanh"
        yield f"vision_config: hidden_act = {vision.hidden_act!r} is not supported", why
    if vision.layers is not None and vision.layers.rotary_base and vision.hidden_size % (4 * vision.num_heads):
        why = "rotary embeddings rotate pairs of a head's channels, for height and for width"
        yield f"vision_config: num_heads = {vision.num_heads} is impossible", why
    elif vision.hidden_size % vision.num_heads:
        why = f"the encoder's hidden states are {vision.hidden_size} wide"
        yield f"vision_config: num_heads = {vision.num_heads} is impossible", why


def _findings(problems: Iterator[tuple[str, str]], where: str, fix: str) -> list[Finding]:
    return [Finding(what, where, why, fix) for what, why in problems]
