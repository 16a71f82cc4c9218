"""Inputs of `megatune verify`: layouts, checked together with the checkpoint, rows of random tokens, and the weights
whose gradients are compared: all, or those of adapters, from a folder or defined by settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.architecture import Architecture
from megatune.config.flags import split_arguments
from megatune.config.load import Loaded, load
from megatune.config.rules import check
from megatune.config.settings import BatchSettings, FinetuningSettings, Settings, setting_value, with_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.scores import CLASSES
from megatune.launch.devices import count_gpus
from megatune.launch.world import World, decide_world

if TYPE_CHECKING:
    from megatune.verify.samples import Sample


# Settings that affect a comparison; others would have no effect, and are refused.
_GROUPS = ("parallel", "precision", "experts", "recompute", "performance")
_OF_MODEL = (
    "model.model_name_or_path", "model.model_revision", "model.cache_dir", "model.rope_scaling", "model.add_tokens",
    "model.add_special_tokens", "model.new_special_tokens_config", "model.init_special_tokens", "model.resize_vocab",
)  # fmt: skip
_SETTINGS = ("data.packing", "run.seed", "run.num_processes", "run.ddp_timeout", *_OF_MODEL)
_NO_PART = ("experts.moe_router_bias_update_rate", "performance.manual_gc", "performance.manual_gc_interval")
# Settings that both layouts share, and that are set in the first one.
_SHARED = ("run.seed", "run.ddp_timeout")
_SHARED_GROUPS = ("precision.", "model.", "finetuning.")
# Settings of training runs only, whose rules do not apply here.
_NOT_HERE = ("model.model_name_or_path", "model.rope_scaling", "data.dataset", "data.cutoff_len", "run.output_dir")


def with_num_labels(loaded: Loaded, num_labels: int) -> Loaded:
    """Return the settings with this number of labels, for a model with a score head."""
    changes = {"run.stage": CLASSES, "run.num_labels": num_labels}
    return replace(loaded, settings=with_settings(loaded.settings, changes))


def samples_of(architecture: Architecture, count: int, longest: int, seed: int) -> list[Sample]:
    """Return rows of random tokens; for vision-language models some have images or videos."""
    from megatune.verify.samples import random_media, random_samples, uneven_lengths

    vision = architecture.vision
    return random_samples(
        architecture.vocab_size,
        uneven_lengths(count, longest),
        seed,
        media=random_media(count, vision) if vision is not None else (),
        vision=vision,
    )


def describe_samples(samples: list[Sample]) -> str:
    """Return the number and lengths of rows, and the numbers of images and videos, for users."""
    lengths = [len(sample.input_ids) for sample in samples]
    media = [each for one in samples for each in one.media]
    kinds = {kind: sum(item.kind == kind for item in media) for kind in ("image", "video")}
    counted = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items() if count]
    return f"{len(samples)} rows of {min(lengths)} to {max(lengths)} tokens" + "".join(f", {each}" for each in counted)


def read_against(text: str, first: Settings) -> Loaded:
    """Return the other layout; it has the precision and the tokens of the first one."""
    try:
        words = split_arguments(shlex.split(text))
    except ValueError as error:
        raise MegatuneError(Finding(f"--against {text}: {error}"), ExitCode.SETTINGS) from None
    loaded = load(overrides=words.overrides, flags=words.flags)
    findings = [replace(finding, where="--against") for finding in loaded.findings]
    if words.source is not None:
        findings.append(Finding(f"{words.source!r} is not a setting", "--against", fix="write key=value key=value"))
    findings += [
        Finding(f"{path.partition('.')[2]} is the same in both layouts", "--against", fix="write it before --against")
        for path in loaded.entries
        if path in _SHARED or path.startswith(_SHARED_GROUPS)
    ]
    shared = {path: setting_value(first, path) for path in _SHARED}
    settings = with_settings(loaded.settings, shared).model_copy(update={"precision": first.precision})
    entries = {path: replace(entry, where="--against") for path, entry in loaded.entries.items()}
    return replace(loaded, settings=settings, entries=entries, findings=findings)


def without_part(loaded: Loaded) -> Iterator[Finding]:
    """Yield findings for settings without an effect on a comparison."""
    settings = *_SETTINGS, *adapter_settings(loaded.settings.finetuning)
    for path, where in loaded.places.items():
        has_part = path.partition(".")[0] in _GROUPS or path in settings
        if not has_part or path in _NO_PART:
            why = "a comparison computes the gradients of one step; only settings of the layout and computation apply"
            yield Finding(f"{path.partition('.')[2]} has no effect in verify", where, why)
    if isinstance(kind := loaded.settings.model.rope_scaling, str):
        fix = f"write rope_scaling='{{rope_type: {kind}, factor: 2.0}}'"
        yield Finding(f"rope_scaling {kind} without a factor", "", "a run computes it from its rows", fix)


def not_as_transformers(loaded: Loaded) -> Iterator[Finding]:
    """Yield findings for settings that make results differ from those of Transformers."""
    experts = loaded.settings.experts
    asked = {
        "moe_aux_loss_coeff": bool(experts.moe_aux_loss_coeff),
        "moe_z_loss_coeff": bool(experts.moe_z_loss_coeff),
        "moe_expert_capacity_factor": experts.moe_expert_capacity_factor is not None,
        "moe_router_load_balancing_type": experts.moe_router_load_balancing_type == "sinkhorn",
    }
    why = "Transformers computes only the language-model loss, and every expert processes all tokens routed to it"
    for name in (name for name, differs in asked.items() if differs):
        what, where = f"{name} {getattr(experts, name)} changes the results", loaded.places.get(f"experts.{name}", "")
        yield Finding(what, where, why, f"remove {name}, or compare with another layout that also has it: --against")


def _world(loaded: Loaded) -> World:
    asked, smallest = loaded.settings.run.num_processes, loaded.settings.parallel.smallest_world
    try:
        world = decide_world(smallest, num_processes=asked, num_devices=count_gpus(), env=os.environ)
    except MegatuneError as error:
        raise MegatuneError([*map(loaded.phrased, error.findings)], error.exit_code) from None
    if world.nnodes > 1:
        finding = Finding(f"NNODES={world.nnodes}", "environment", "verify runs on one machine", "unset NNODES")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    return world


def checked(
    loaded: Loaded, finetuning: FinetuningSettings, architecture: Architecture, samples: list[Sample], length: int
) -> tuple[Settings, World]:
    """Check the rules of the layout for the model; return the settings and the world.

    Args:
        finetuning: settings of the trained weights, whose gradients are compared.
        length: tokens of the longest row, without images and videos.
    """
    parallel, world = loaded.settings.parallel, _world(loaded)
    # With virtual stages the number of micro-batches is a multiple of the stages; the remaining ones are padding.
    accumulation = -(-len(samples) * parallel.model_parallel_size // world.world_size)
    if parallel.virtual_stages:
        accumulation = -(-accumulation // parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    batch = BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation)
    settings = loaded.settings.model_copy(update={"batch": batch, "finetuning": finetuning})
    findings = check(settings, architecture, world.world_size, origins=loaded.places, invalid=_NOT_HERE)
    longest, limit = max(len(sample.input_ids) for sample in samples), architecture.max_position_embeddings
    of_media = longest - length
    if longest > limit:
        with_media = f", with {of_media} tokens of images and videos," if of_media else ""
        what = f"--length {length}{with_media} is more than the model's {limit} positions"
        findings.append(Finding(what, fix=f"--length {limit - of_media} or less"))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return settings, world


def describe(settings: Settings, world: World) -> str:
    """Return a description of a layout for users."""
    parallel, recompute = settings.parallel, settings.recompute
    split = [f"{name} {size}" for name, size in parallel.sizes(world.world_size).items() if size > 1]
    split += ["sequence parallel"] if parallel.sequence_parallel else []
    split += ["packed"] if settings.packing else []
    split += [f"recompute {recompute.recompute_granularity}"] if recompute.recompute_granularity else []
    if settings.finetuning.finetuning_type == "lora":
        split = [f"adapters of rank {settings.finetuning.lora_rank}", *split]
    return ", ".join(split) or "one process"


_WHICH = ("finetuning_type", "adapter_name_or_path", "create_new_adapter")
# Settings that define an adapter; an adapter in a folder has its own.
_DEFINES_ADAPTER = (
    "lora_rank", "lora_alpha", "lora_target", "additional_target", "use_rslora", "use_dora",
    "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_deepstack_mergers", "freeze_language_model",
)  # fmt: skip


def adapter_settings(finetuning: FinetuningSettings) -> Iterator[str]:
    """Yield the settings that determine which gradients are compared, as "group.name"."""
    names: tuple[str, ...] = _WHICH[1:] if finetuning.finetuning_type == "freeze" else _WHICH
    if finetuning.finetuning_type == "lora" or finetuning.adapter_name_or_path:
        names += _DEFINES_ADAPTER
    yield from (f"finetuning.{name}" for name in names)


def trained_settings(loaded: Loaded, adapters: Sequence[Path], architecture: Architecture) -> FinetuningSettings:
    """Return the settings of the trained weights: of adapters, or of all weights without any frozen ones.

    Args:
        adapters: folders.

    Raises:
        MegatuneError: SETTINGS; a setting is written that the last adapter defines itself. INPUT; the last adapter,
            whose gradients are compared, is not supported.
    """
    finetuning = loaded.settings.finetuning
    if not adapters and finetuning.finetuning_type != "lora":
        if architecture.vision is None:
            return finetuning
        return type(finetuning)(freeze_vision_tower=False, freeze_multi_modal_projector=False)
    own: dict[str, Any] = {"finetuning_type": "lora", "adapter_name_or_path": [str(folder) for folder in adapters]}
    if adapters and not finetuning.create_new_adapter:
        from megatune.families.peft_reading import settings_of

        if findings := list(_own_of(adapters[-1], loaded)):
            raise MegatuneError(findings, ExitCode.SETTINGS)
        own |= settings_of(adapters[-1], architecture)
    return finetuning.model_copy(update=own)


def _own_of(adapter: Path, loaded: Loaded) -> Iterator[Finding]:
    for name in _DEFINES_ADAPTER:
        if (where := loaded.places.get(f"finetuning.{name}")) is not None:
            what, why = f"{name} has no effect in verify", f"{adapter} defines it"
            yield Finding(what, where, why, f"remove {name}, or add create_new_adapter=true")
