"""The model of a file, and a small model of the same family and layer pattern that fits this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.architecture import Architecture, LayerKind
from megatune.bridge.auto import register_types
from megatune.config.model import as_changed, open_changed
from megatune.config.pipeline import holds_deepstack
from megatune.config.settings import ParallelSettings, Settings
from megatune.data.templates import check_template
from megatune.data.templates.named import is_template_file, read_template
from megatune.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG
from megatune.demo.family import FAMILIES as DEMO_FAMILIES
from megatune.errors import ExitCode, Finding, MegatuneError, with_article
from megatune.families import FAMILIES, read_architecture, read_config
from megatune.hub.models import CONFIG, is_hub_id
from megatune.rehearse.outcome import Change
from megatune.rehearse.sizes import fewer_layers, text_config, vision_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_TOKENIZERS = (TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "vocab.json")
_MEDIA_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "image_token_index": "[IMG]",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True, slots=True)
class RealModel:
    """The model that a file names.

    Attributes:
        config: its config.json.
        where: where config.json was found.
        folder: folder of its tokenizer; None if that is not on this machine, with the reason in `note`.
    """

    name: str
    config: Mapping[str, Any]
    where: str
    architecture: Architecture
    folder: Path | None = None
    note: str = ""


def find_real_model(settings: Settings) -> RealModel:
    """Find config.json and tokenizer of the file's model: in its folder, on a hub, or else the configs of published
    models that ship with megatune.

    Raises:
        MegatuneError: the model is not found (exit code 66) or not supported.
    """
    from megatune.plan.catalogue.models import model_config

    model = settings.model
    name = model.model_name_or_path
    if name is None:
        fix = "write model_name_or_path: FOLDER, or the id of a model on a hub"
        raise MegatuneError(Finding("model_name_or_path is missing", fix=fix), ExitCode.SETTINGS)
    folder, note = None, ""
    try:
        folder = open_changed(settings, name, model.model_revision, model.mcore_model).tokenizer_dir()
        config: dict[str, Any] = read_config(folder)
        where = str(folder / CONFIG)
    except MegatuneError as error:
        if not is_hub_id(name):
            raise
        try:
            found, where = model_config(name, asks_hub=False)
            config = as_changed(found, settings)
        except MegatuneError:
            raise error from None
        folder, note = None, f"{name} is not on this machine, and its hub was not reached"
    if folder is not None and not any((folder / each).is_file() for each in _TOKENIZERS):
        folder, note = None, f"{folder} has no tokenizer"
    return RealModel(name, config, where, read_architecture(config, where), folder, note)


def template_tokens(name: str | None) -> tuple[str, ...]:
    """Return the special tokens of a template file; built-in templates are checked against a tokenizer instead."""
    if name is None or not is_template_file(name):
        return ()
    return tuple(each for each in read_template(name).special_tokens if each not in ("{bos}", "{eos}"))


@dataclass(slots=True)
class SmallModel:
    """The small model that replaces the real one.

    Attributes:
        config: Transformers' keyword arguments, without the vocabulary.
        layout: pipeline settings for its number of layers, by name.
    """

    real: RealModel
    config: dict[str, Any]
    architecture: Architecture
    layout: dict[str, Any] = field(default_factory=dict)

    def changes(self) -> Iterator[Change]:
        """Yield the differences from the real model, one for each part."""
        real, small = self.real.architecture, self.architecture
        yield Change("layers", str(real.num_layers), str(small.num_layers), "the minimum for layout and layer pattern")
        why = "the layout shards them as before"
        sizes = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
        yield Change("widths", _listed(real, sizes), _listed(small, sizes), why)
        if (epsilon := small.norm_epsilon) != real.norm_epsilon:
            why_larger = "norms of random gated delta nets amplify rounding"
            yield Change("norm epsilon", f"{real.norm_epsilon:g}", f"{epsilon:g}", why_larger)
        if real.moe is not None and small.moe is not None:
            of = ("num_experts", "router_topk", "moe_ffn_hidden_size")
            yield Change("experts", _listed(real.moe, of), _listed(small.moe, of), why)
        if real.vision is not None and small.vision is not None:
            of = ("depth", "hidden_size", "num_deepstack_mergers")
            yield Change("vision encoder", _listed(real.vision, of), _listed(small.vision, of), "it is replicated")


def _listed(of: Any, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {getattr(of, name)}" for name in names)


def shrink(real: RealModel, parallel: ParallelSettings) -> SmallModel:
    """Return the smallest model that the layout shards like the real one.

    Dense and sparse layers are both kept, key/value heads stay fewer than tensor-parallel processes, and unequal
    pipeline stages stay unequal.

    Args:
        parallel: a valid layout for the real model.
    """
    config = _completed(real.config)
    architecture = real.architecture
    for num_layers, layout in fewer_layers(parallel, architecture.num_layers):
        changed = parallel.model_copy(update=layout)
        small = _shrink_config(config, architecture, changed, num_layers)
        found = read_architecture(small, real.where)
        kept = _pattern(found) >= _pattern(architecture) and num_layers >= min(2, architecture.num_layers)
        if kept and holds_deepstack(changed, found):
            return SmallModel(real, small, found, layout)
    raise AssertionError("the model's own number of layers is the last candidate")


def _pattern(architecture: Architecture) -> set[tuple[LayerKind, bool]]:
    """Return the kinds of layers, each with or without rotary embedding."""
    layers, without = range(architecture.num_layers), architecture.no_rope_layers
    return {(architecture.layer_kind(each), each in without) for each in layers}


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with all defaults of Transformers."""
    from transformers import AutoConfig

    register_types()
    left_out = ("model_type", "transformers_version", "quantization_config")
    rest = {key: value for key, value in config.items() if key not in left_out}
    found: PreTrainedConfig = AutoConfig.for_model(config["model_type"], **rest)
    # Without layer_types, Transformers computes them for the new number of layers.
    return {key: _without_layers(value) for key, value in _without_layers(found.to_dict()).items()}


def _without_layers(value: Any) -> Any:
    return {key: each for key, each in value.items() if key != "layer_types"} if isinstance(value, dict) else value


def _shrink_config(
    config: Mapping[str, Any], architecture: Architecture, parallel: ParallelSettings, num_layers: int
) -> dict[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    decoder = text_config(text, architecture, parallel, num_layers)
    if architecture.vision is None:
        return {**config, **decoder}
    declared = FAMILIES[architecture.model_type].vision
    assert declared is not None
    vision = vision_config(config["vision_config"], architecture, declared.keys, decoder["hidden_size"])
    parts = {"text_config": {**text, **decoder}, "vision_config": {**config["vision_config"], **vision}}
    return {**config, **parts}


def write_model(small: SmallModel, folder: Path, template: str | None, seed: int, *, real_tokenizer: bool) -> Path:
    """Write a random checkpoint with a tokenizer: the model's, or a demo tokenizer that fits the template.

    Args:
        template: the template of the file; a demo tokenizer gets its special tokens.
        real_tokenizer: whether to use the tokenizer and vocabulary of the real model.

    Raises:
        MegatuneError: the template fits no tokenizer of this family.
    """
    from transformers import AutoConfig, GenerationConfig

    from megatune.demo.checkpoint import no_progress_bar, random_model
    from megatune.training.model_files import small_files

    folder.mkdir(parents=True)
    config, source = small.config, small.real.folder
    if real_tokenizer and source is not None:
        for file in small_files(source):
            if file.name not in (CONFIG, "generation_config.json"):
                shutil.copyfile(file, folder / file.name)
    else:
        tokenizer = _write_demo_tokenizer(small.real.architecture, folder, template)
        config = _with_tokens(config, tokenizer)
    auto_config = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    model = random_model(auto_config, seed, has_vision=small.architecture.vision is not None)
    text = auto_config.get_text_config()
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    with no_progress_bar():
        model.save_pretrained(folder)
    return folder


def _with_tokens(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a config with the tokenizer's vocabulary size and token ids."""
    own = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    own["vocab_size"] = len(tokenizer)
    text = config.get("text_config")
    if text is None:
        return {**config, **own}
    media = {key: tokenizer.convert_tokens_to_ids(token) for key, token in _MEDIA_TOKENS.items() if key in config}
    return {**config, **media, "text_config": {**text, **own}}


def _write_demo_tokenizer(architecture: Architecture, folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    """Write the tokenizer of a demo family that fits the template, with its image and video processors.

    Raises:
        MegatuneError: the template fits none.
    """
    from megatune.demo.checkpoint import publish_tokenizer_config
    from megatune.demo.tokenizer import make_tokenizer
    from megatune.demo.vision import write_processors

    refusal = None
    for family in (each for each in DEMO_FAMILIES.values() if each.model_type == architecture.model_type):
        tokenizer = make_tokenizer(family)
        # The user's template may have tokens that only the real tokenizer has.
        tokenizer.add_special_tokens({"additional_special_tokens": list(template_tokens(template))})
        tokenizer.save_pretrained(folder)
        publish_tokenizer_config(folder, family.tokenizer_class)
        if family.vision is not None:
            write_processors(family.vision, folder)
        try:
            check_template(template, folder)
        except MegatuneError as error:
            refusal = refusal or error
            continue
        return tokenizer
    assert refusal is not None
    raise MegatuneError([_of_family(each, architecture) for each in refusal.findings], refusal.exit_code)


def _of_family(finding: Finding, architecture: Architecture) -> Finding:
    """Replace the temporary folder in a finding by the model family."""
    what = finding.what.replace("this model's tokenizer", f"the tokenizers of {with_article(architecture.model_type)}")
    return Finding(what, "", finding.why, finding.fix)
