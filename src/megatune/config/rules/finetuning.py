"""Rules of what training does not have yet: settings that a plan takes and a run refuses by name."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.dialect import Refused
from megatune.config.groups.finetuning import ALL_TARGETS, LORA_TARGETS
from megatune.config.rules.problem import Context, Problem, Rule

_VISION = Refused("vision-language models are not built yet; only text is read")
_LORA, _LORA_SWITCH = Refused("LoRA is not built yet"), Refused("LoRA is not built yet", off=(False,))
_FREEZE, _FREEZE_SWITCH = (Refused("freezing layers is not built yet", off=off) for off in ((), (False,)))
NOT_BUILT: dict[str, Refused] = {
    "finetuning.finetuning_type": Refused(
        "only full fine-tuning is built; LoRA and freezing are not yet",
        values=("lora", "freeze"),
        fix="write finetuning_type: full",
    ),
    "finetuning.freeze_trainable_layers": _FREEZE,
    "finetuning.freeze_trainable_modules": _FREEZE,
    "finetuning.freeze_extra_modules": _FREEZE,
    "finetuning.use_llama_pro": _FREEZE_SWITCH,
    "finetuning.freeze_vision_tower": _VISION,
    "finetuning.freeze_multi_modal_projector": _VISION,
    "finetuning.freeze_language_model": Refused(_VISION.why, off=(False,)),
    "finetuning.lora_rank": _LORA,
    "finetuning.lora_alpha": _LORA,
    "finetuning.lora_dropout": _LORA,
    "finetuning.lora_target": _LORA,
    "finetuning.additional_target": _LORA,
    "finetuning.use_rslora": _LORA_SWITCH,
    "finetuning.use_dora": _LORA_SWITCH,
    "finetuning.loraplus_lr_ratio": _LORA,
    "finetuning.loraplus_lr_embedding": _LORA,
    "finetuning.adapter_name_or_path": _LORA,
    "finetuning.create_new_adapter": _LORA_SWITCH,
    "data.image_max_pixels": _VISION,
    "data.image_min_pixels": _VISION,
    "data.video_max_pixels": _VISION,
    "data.video_min_pixels": _VISION,
    "data.video_fps": _VISION,
    "data.video_maxlen": _VISION,
    "data.media_dir": _VISION,
}


def not_built_settings() -> dict[str, Refused]:
    """What is refused, by the settings' names."""
    return {path.partition(".")[2]: refused for path, refused in NOT_BUILT.items()}


def not_built(context: Context) -> Iterator[Problem]:
    """What a user wrote is refused where it asks for something, even if that is the default."""
    for path, where in context.written.items():
        group, _, name = path.partition(".")
        value, refused = getattr(getattr(context.settings, group), name), NOT_BUILT.get(path)
        if refused is not None and refused.refuses(value):
            yield Problem((path,), *refused.texts(name, value), where)


def not_planned(context: Context) -> Iterator[Problem]:
    """A plan knows all parameters, those without a part, and plain adapters."""
    finetuning = context.settings.finetuning
    if finetuning.finetuning_type == "freeze":
        what = "finetuning_type: freeze cannot be planned"
        yield Problem(("finetuning.finetuning_type",), what, fix="write finetuning_type: full, or lora")
    for name in ("use_dora", "additional_target", "adapter_name_or_path"):
        if getattr(finetuning, name):
            yield Problem((f"finetuning.{name}",), f"{name} cannot be planned", fix=f"remove {name}")


def targets(context: Context) -> Iterator[Problem]:
    """Adapters are added to linear layers of the model."""
    names = context.settings.finetuning.lora_target
    unknown = [name for name in names if name not in LORA_TARGETS]
    if (unknown or not names) and set(names).isdisjoint(ALL_TARGETS):
        what = f"lora_target has {', '.join(unknown) or 'nothing'}"
        yield Problem(("finetuning.lora_target",), what, fix=f"one or more of all, {', '.join(LORA_TARGETS)}")


RULES: tuple[Rule, ...] = (not_built,)
PLAN_RULES: tuple[Rule, ...] = (not_planned, targets)
