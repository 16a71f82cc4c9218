"""What a family declares, and how a config.json becomes an Architecture through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatune.architecture import Architecture, Llama3RopeScaling
from megatune.errors import Finding
from megatune.families.weights import Weight

# Transformers' defaults for keys that a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
}
_DIMENSIONS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, declared.

    Attributes:
        model_type: the Hugging Face model_type.
        weights: its weight map; `output_layer.weight` is dropped where embeddings are tied.
        constants: Architecture attributes that every member shares and config.json does not say.
        required: config.json keys and the one value this engine computes; an absent key has that value.
        rope_types: the kinds of rotary scaling it may ask for.
        ignored_keys: regular expressions of checkpoint keys that hold nothing learned.
        head_dim_default: head dimension where config.json has none; None means hidden_size / num_attention_heads.
    """

    model_type: str
    weights: tuple[Weight, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)
    ignored_keys: tuple[str, ...] = ()
    head_dim_default: int | None = None

    def weight_map(self, architecture: Architecture) -> tuple[Weight, ...]:
        """The weights of this member of the family."""
        if not architecture.tie_word_embeddings:
            return self.weights
        return tuple(weight for weight in self.weights if weight.engine != "output_layer.weight")

    def check(self, config: Mapping[str, Any], where: str) -> list[Finding]:
        """Everything in config.json that keeps this engine from computing the model, each named."""
        findings = [
            Finding(f"{key!r} is missing", where, mend="use the config.json that was published with the weights")
            for key in _DIMENSIONS
            if not isinstance(config.get(key), int)
        ]
        for key, value in self.required.items():
            # 0 and 0.0 and False are one value here, and null means "not used".
            if (config.get(key, value) or 0) != (value or 0):
                findings.append(
                    Finding(
                        f"{key} = {config[key]!r} is not supported",
                        where,
                        f"{self.model_type} is computed with {key} = {value!r}; another value would change the numbers",
                        "train a checkpoint without it",
                    )
                )
        rope_type = rope_parameters(config)["rope_type"]
        if rope_type not in self.rope_types:
            findings.append(
                Finding(
                    f"rotary scaling {rope_type!r} is not supported",
                    where,
                    f"{self.model_type} is computed with {', '.join(self.rope_types)}",
                    "remove rope_scaling to train at the published context length",
                )
            )
        return findings

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The numbers of a config.json that `check` found nothing against."""
        config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        heads = config["num_attention_heads"]
        rope = rope_parameters(config)
        scaling = None
        if rope["rope_type"] == "llama3":
            scaling = Llama3RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
        return Architecture(
            model_type=self.model_type,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads", heads),
            kv_channels=config.get("head_dim") or self.head_dim_default or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            norm_epsilon=config["rms_norm_eps"],
            rotary_base=float(rope["rope_theta"]),
            rope_scaling=scaling,
            tie_word_embeddings=bool(config["tie_word_embeddings"]),
            initializer_range=config["initializer_range"],
            torch_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            **self.constants,
        )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config.json, whether written by Transformers 5 (rope_parameters) or 4 (rope_theta and
    rope_scaling, its kind under "rope_type" or "type")."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return parameters
