"""Read peft's adapter_config.json of a low-rank adapter, and report what is not supported."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.families.dense import SCORE
from megatune.families.selection import is_whole_match
from megatune.families.weight_index import read_header

WEIGHTS_FILE = "adapter_model.safetensors"

# Fields that do not affect what a saved adapter computes: descriptions, selection of modules, initialization.
_HARMLESS = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules exclude_modules"
    " layers_to_transform layers_pattern megatron_core loftq_config eva_config corda_config lora_ga_config"
    " qalora_group_size runtime_config"
)
_READ = (
    "peft_type r lora_alpha lora_dropout use_rslora use_dora rank_pattern alpha_pattern target_parameters"
    " modules_to_save ensure_weight_tying init_lora_weights bias"
)
_VARIANT = "it does not compute W + s · B · A"
# Fields that must be off, with reasons.
_OFF: dict[str, str] = {
    "fan_in_fan_out": "it transposes matrices, which no supported family needs",
    "lora_bias": "adapters have no biases here",
    "layer_replication": "the adapter belongs to a model with repeated layers",
    "trainable_token_indices": "single rows of embeddings are not trained here; modules_to_save has whole ones",
    "alora_invocation_tokens": "the adapter would only apply to some tokens of a text",
    "megatron_config": "it was trained on Megatron-Core's own layers, whose names differ from those of Transformers",
    **dict.fromkeys(
        ("velora_config", "use_qalora", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"), _VARIANT
    ),
}
# Initializations that also change the base: the adapter only fits the changed base.
_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga")
_CONVERT = (
    "convert it with peft: model.save_pretrained(OUT, path_initial_model_for_weight_conversion=INITIAL), or give it the"
    " base that was saved with it and write init_lora_weights true"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The adapter_config.json of a low-rank adapter.

    Attributes:
        rank, alpha: for modules that no pattern matches.
        rank_pattern, alpha_pattern: for other modules, by regular expressions of the ends of their paths.
        target_parameters: ends of the names of adapted parameters, such as stacked experts.
        modules_to_save: modules that are trained whole.
        ensure_weight_tying: whether tied embeddings stay tied.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter, by the module's path in Transformers."""
        return _matching(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str, rank: int) -> float:
        """Return the scaling factor of a module's adapter, given its rank."""
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module or the end of its path, as peft does."""
    found = (value for pattern, value in patterns.items() if is_whole_match(rf"(.*\.)?({pattern})", module))
    return next(found, default)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def has_score(folder: Path) -> bool:
    """Return whether an adapter belongs to a model with scores, which are trained whole.

    Raises:
        MegatuneError: as `read_peft_config`.
    """
    return SCORE.engine.partition(".")[0] in read_peft_config(folder).modules_to_save


def num_scores(folder: Path) -> int:
    """Return the number of scores that are saved with an adapter, 0 if there are none.

    Raises:
        MegatuneError: INPUT, if the adapter cannot be read.
    """
    if not has_score(folder):
        return 0
    tensors, own = read_header(folder / WEIGHTS_FILE), SCORE.engine.partition(".")[0]
    return next((entry.shape[0] for name, entry in tensors.items() if own in name.split(".")), 0)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read an adapter's adapter_config.json.

    Raises:
        MegatuneError: INPUT, if folder, configuration or weights are missing, or with every field that is not
            supported.
    """
    if not folder.is_dir():
        fix = "give the folder that holds adapter_config.json and adapter_model.safetensors"
        raise MegatuneError(Finding(f"there is no folder {folder}", "adapter_name_or_path", "", fix), ExitCode.INPUT)
    config, findings = _read_json(folder)
    findings += _missing_weights(folder)
    path = str(folder / ADAPTER_CONFIG)
    findings += _problems(config, path) if config is not None else []
    if findings or config is None:
        raise MegatuneError(findings, ExitCode.INPUT)
    return PeftConfig(
        rank=config["r"],
        alpha=config["lora_alpha"],
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        target_parameters=tuple(config.get("target_parameters") or ()),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        ensure_weight_tying=bool(config.get("ensure_weight_tying")),
        base_model_name_or_path=config.get("base_model_name_or_path") or None,
    )


def _read_json(folder: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "it holds the rank, alpha and base of the adapter"
        fix = "give the folder of an adapter, as peft saves it"
        if (folder / "config.json").is_file():
            why, fix = "the folder holds a whole model", "give it as model_name_or_path"
        return None, [Finding(f"there is no {ADAPTER_CONFIG}", str(folder), why, fix)]
    except (OSError, ValueError, RecursionError) as error:
        return None, [Finding(f"cannot be read: {error}", str(path), "", "copy it again")]
    if not isinstance(config, dict):
        return None, [Finding("is not a JSON object", str(path))]
    return config, []


def _missing_weights(folder: Path) -> Iterator[Finding]:
    if (folder / WEIGHTS_FILE).is_file():
        return
    pickles = sorted(path.name for path in folder.glob("adapter_model*") if path.suffix in (".bin", ".pt", ".pth"))
    why, fix = "it holds the adapter's weights", "give the folder of an adapter, as peft saves it"
    if pickles:
        why = f"{pickles[0]} is a pickle, which can run code when it is loaded"
        fix = "save it as safetensors with peft: model.save_pretrained(OUT, safe_serialization=True)"
    yield Finding(f"there is no {WEIGHTS_FILE}", str(folder), why, fix)


def _problems(config: Mapping[str, Any], path: str) -> Iterator[Finding]:
    peft_type = config.get("peft_type", "LORA")
    if peft_type != "LORA":
        what, why = f"peft_type is {peft_type!r}", "only low-rank adapters (LORA) are supported"
        yield Finding(what, path, why, "train a LoRA adapter")
        return
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield Finding(f"r is {rank!r}", path, "the rank must be a whole number above 0")
    if not _is_number(alpha):
        yield Finding(f"lora_alpha is {alpha!r:.60}", path, "it must be a number")
    dropout = config.get("lora_dropout") or 0
    if not _is_number(dropout) or not 0 <= dropout < 1:
        yield Finding(f"lora_dropout is {dropout!r:.60}", path, "it must be a number from 0 to below 1")
    for key in ("rank_pattern", "alpha_pattern"):
        yield from _pattern_problems(key, config.get(key), path)
    for key in ("target_parameters", "modules_to_save"):
        value = config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            yield Finding(f"{key} is {value!r}", path, "it must be a list of names")
    if config.get("bias", "none") not in ("none", None):
        why = "biases of the base were trained, too, but are frozen here"
        yield Finding(f"bias is {config['bias']!r}", path, why, 'train an adapter with bias "none"')
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and _CHANGES_BASE.fullmatch(begun.lower()):
        why = "this initialization changes the base, and the adapter belongs to the changed base"
        yield Finding(f"init_lora_weights is {begun!r}", path, why, _CONVERT)
    for key, why in _OFF.items():
        if config.get(key):
            yield Finding(f"{key} is {_short(config[key])}", path, why, "train an adapter without it")
    for key in sorted(config.keys() - {*_HARMLESS.split(), *_READ.split()} - _OFF.keys()):
        if config[key]:
            why = "this field is unknown, and may change what the adapter computes"
            yield Finding(f"{key} is {_short(config[key])}", path, why, f"train an adapter without {key}")


def _pattern_problems(key: str, patterns: Any, path: str) -> Iterator[Finding]:
    if patterns and not isinstance(patterns, dict):
        yield Finding(f"{key} is {_short(patterns)}", path, "it must be a mapping of names to numbers")
        return
    for pattern, value in (patterns or {}).items():
        if not _is_number(value) or (key == "rank_pattern" and value < 1):
            yield Finding(f"{key} of {pattern!r:.60} is {value!r:.60}", path, "it must be a number, a rank above 0")
        try:
            re.compile(pattern)
        except re.error as error:
            yield Finding(f"{key} has {pattern!r}", path, f"it is not a valid regular expression: {error}")


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number of reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
