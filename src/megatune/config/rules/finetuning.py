"""Rules of what training does not have yet: settings that a plan takes and a run refuses by name."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.dialect import Refused
from megatune.config.groups.finetuning import ALL_TARGETS, LORA_TARGETS
from megatune.config.rules.problem import Context, Problem
from megatune.config.settings import setting_value

_TYPE = Refused(
    "only full fine-tuning is built; LoRA and freezing are not yet",
    values=("lora", "freeze"),
    fix="write finetuning_type: full",
)
_VISION = "vision-language models are not built yet; only text is read"
_LORA, _FREEZE = "LoRA is not built yet", "freezing layers is not built yet"
_OF_VISION = (
    "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen media_dir "
    "freeze_vision_tower freeze_multi_modal_projector"
)
_OF_FREEZE = "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"
_OF_LORA = (
    "lora_rank lora_alpha lora_dropout lora_target additional_target loraplus_lr_ratio loraplus_lr_embedding "
    "adapter_name_or_path"
)
NOT_BUILT: dict[str, Refused] = {
    "finetuning_type": _TYPE,
    **{name: Refused(_VISION) for name in _OF_VISION.split()},
    "freeze_language_model": Refused(_VISION, off=(False,)),
    **{name: Refused(_FREEZE) for name in _OF_FREEZE.split()},
    "use_llama_pro": Refused(_FREEZE, off=(False,)),
    **{name: Refused(_LORA) for name in _OF_LORA.split()},
    **{name: Refused(_LORA, off=(False,)) for name in ("use_rslora", "use_dora", "create_new_adapter")},
}


def not_built(context: Context) -> Iterator[Problem]:
    """What a user wrote is refused where it asks for something, even if that is the default."""
    for path, entry in context.written.items():
        name, value = path.partition(".")[2], setting_value(context.settings, path)
        if name in NOT_BUILT and NOT_BUILT[name].refuses(value):
            said = value if entry.value.text is None else entry.value.text
            yield Problem((name,), *NOT_BUILT[name].texts(name, said), entry.where)


def not_planned(context: Context) -> Iterator[Problem]:
    """A plan knows all parameters, those without a part, and plain adapters."""
    finetuning = context.settings.finetuning
    if finetuning.finetuning_type == "freeze":
        what = "finetuning_type: freeze cannot be planned"
        yield Problem(("finetuning_type",), what, fix="write finetuning_type: full, or lora")
    for name in ("use_dora", "additional_target", "adapter_name_or_path"):
        if getattr(finetuning, name):
            yield Problem((name,), f"{name} cannot be planned", fix=f"remove {name}")


def targets(context: Context) -> Iterator[Problem]:
    """Adapters are added to linear layers of the model."""
    names = context.settings.finetuning.lora_target
    unknown = [name for name in names if name not in LORA_TARGETS]
    if (unknown or not names) and set(names).isdisjoint(ALL_TARGETS):
        what = f"lora_target has {', '.join(unknown) or 'nothing'}"
        yield Problem(("lora_target",), what, fix=f"one or more of all, {', '.join(LORA_TARGETS)}")


RULES = (not_built,)
PLAN_RULES = (not_planned, targets)
