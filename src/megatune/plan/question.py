"""What a user asks the planner: settings as `megatune train` reads them, with those keys that can only be planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatune.config.arguments import Arguments, read_flags, read_overrides
from megatune.config.dialects.dialect import Refused
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.entry import Entry
from megatune.config.load import Loaded, load
from megatune.config.settings import Settings
from megatune.config.yaml_file import read_file
from megatune.errors import Finding
from megatune.plan.case import Case, PlannedModel, Trainable
from megatune.plan.machine import Machine
from megatune.plan.search import SearchRequest

_TRAINABLE = (
    "finetuning_type", "lora_rank", "lora_target", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_language_model",
)  # fmt: skip
# Of these only image_max_pixels changes a plan.
_OF_IMAGES = (
    "lora_alpha", "lora_dropout", "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels",
    "video_fps", "video_maxlen", "media_dir",
)  # fmt: skip
_TARGETS = {
    "linear_qkv": "linear_qkv", "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv",
    "linear_proj": "linear_proj", "o_proj": "linear_proj",
    "linear_fc1": "linear_fc1", "gate_proj": "linear_fc1", "up_proj": "linear_fc1",
    "linear_fc2": "linear_fc2", "down_proj": "linear_fc2",
}  # fmt: skip
_FREEZE = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
_LAYOUT_GROUPS = ("parallel", "batch", "recompute")

# Training refuses these keys until it has what they ask for; a plan takes them.
DIALECT = replace(
    LLAMAFACTORY,
    keys={key: path for key, path in LLAMAFACTORY.keys.items() if key != "finetuning_type"},
    not_built={**LLAMAFACTORY.not_built, **dict.fromkeys((*_TRAINABLE, *_OF_IMAGES), Refused("", values=()))},
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned.

    Attributes:
        origins: as `Loaded.origins`; empty for a plan of a bare model.
        plans_own: whether the settings' own layout is planned, before a better one is searched for.
        dataset_tokens: of the whole run; None where not known.
        notes: what was assumed, in sentences.
        file: the settings file that was planned.
    """

    model: PlannedModel
    machine: Machine
    world_size: int
    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)
    trainable: Trainable = field(default_factory=Trainable)
    global_batch_size: int
    document_length: float | None = None
    image_tokens: int = 0
    plans_own: bool = False
    dataset_tokens: float | None = None
    notes: tuple[str, ...] = ()
    file: str | None = None

    @property
    def case(self) -> Case:
        """The settings' own layout."""
        return self.request.case(self.settings)

    @property
    def request(self) -> SearchRequest:
        """All layouts with the same global batch."""
        return SearchRequest(
            model=self.model,
            machine=self.machine,
            world_size=self.world_size,
            settings=self.settings,
            trainable=self.trainable,
            global_batch_size=self.global_batch_size,
            document_length=self.document_length,
            image_tokens=self.image_tokens,
        )


@dataclass(frozen=True)
class Asked:
    """Settings, and what a plan takes beside them.

    Attributes:
        image_pixels: image_max_pixels where it is written.
        written: groups of settings among which something is written.
        findings: what is wrong with `trainable` and `image_pixels`.
    """

    loaded: Loaded
    trainable: Trainable
    image_pixels: int | None
    written: frozenset[str]
    findings: list[Finding]

    @property
    def has_layout(self) -> bool:
        """Whether a layout, a batch or recomputation is written."""
        return not self.written.isdisjoint(_LAYOUT_GROUPS)


def read_settings(source: str | None, words: Arguments, lora: bool | None = None) -> Asked:
    """Read settings as `megatune train` does, with the keys of LoRA and of vision.

    Args:
        source: the settings file; None for a plan of a model.
        lora: what --trainable says; None where it says nothing.

    Raises:
        MegatuneError: INPUT, where the file cannot be read.
    """
    loaded = load(source, words.overrides, words.flags, DIALECT)
    entries: dict[str, Entry] = {}
    in_file = read_file(source)[0] if source else []
    for some in (in_file, read_overrides(words.overrides)[0], read_flags(words.flags)[0]):
        entries.update((entry.key, entry) for entry in some)
    findings: list[Finding] = []
    trainable = _trainable(entries, lora, findings)
    pixels = _number(entries, "image_max_pixels", findings)
    written = frozenset(path.partition(".")[0] for path, origin in loaded.origins.items() if origin != "default")
    return Asked(loaded, trainable, pixels, written, findings)


def image_tokens(model: PlannedModel, pixels: int) -> int:
    """Tokens that an image of so many pixels becomes: one for each square of merged patches."""
    assert model.architecture.vision is not None
    return pixels // (model.architecture.vision.patch_size * model.architecture.vision.spatial_merge_size) ** 2


def _trainable(entries: Mapping[str, Entry], lora: bool | None, findings: list[Finding]) -> Trainable:
    chosen: dict[str, Any] = {}
    kind = entries.get("finetuning_type")
    if lora is None and kind is not None:
        if kind.value.data not in ("full", "lora"):
            what = f"finetuning_type: {kind.value.text} cannot be planned"
            findings.append(Finding(what, kind.where, fix="write finetuning_type: full, or lora"))
        lora = kind.value.data == "lora"
    chosen["kind"] = "lora" if lora else "full"
    if (rank := _number(entries, "lora_rank", findings)) is not None:
        chosen["lora_rank"] = rank
    if (target := entries.get("lora_target")) is not None:
        chosen["lora_target"] = _targets(target, findings)
    for key in _FREEZE:
        if (entry := entries.get(key)) is None:
            continue
        if isinstance(entry.value.data, bool):
            chosen[key] = entry.value.data
        else:
            what = f"{key} is {entry.value.text!r}"
            findings.append(Finding(what, entry.where, fix=f"write {key}: true, or false"))
    return Trainable(**chosen)


def _number(entries: Mapping[str, Entry], key: str, findings: list[Finding]) -> int | None:
    entry = entries.get(key)
    if entry is None or entry.value.data is None:
        return None
    value = entry.value.data
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    what, why = f"{key} is {entry.value.text!r}", "expected a whole number above 0"
    findings.append(Finding(what, entry.where, why, f"write {key}: 8" if key == "lora_rank" else f"remove {key}"))
    return None


def _targets(entry: Entry, findings: list[Finding]) -> tuple[str, ...]:
    """Our names of the layers, from ours and those of Hugging Face."""
    data = entry.value.data
    names = data if isinstance(data, list) else [name.strip() for name in str(data).split(",")]
    if any(name in ("all", "all-linear") for name in names):
        return Trainable().lora_target
    unknown = [str(name) for name in names if name not in _TARGETS]
    if unknown or not names:
        what = f"lora_target has {', '.join(unknown) or 'nothing'}"
        findings.append(Finding(what, entry.where, fix=f"one or more of all, {', '.join(_TARGETS)}"))
        return Trainable().lora_target
    return tuple(dict.fromkeys(_TARGETS[name] for name in names))
