"""Defaults of settings that are derived from the device, the model or an adapter.

A GPU decides precision, fusions and overlaps, since the declared defaults are those of a CPU; the model's config.json
decides the weight of the balancing loss; and an adapter that is trained further decides how it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.dialects.dialect import AUX_LOSS
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.load import Loaded
from megatune.config.settings import Settings, setting_value
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG, adapter_weights
from megatune.families.peft_reading import read_adapter, settings_of
from megatune.families.weights import Weight, layers_of
from megatune.references import ref, remove, write

CONFIG = "config.json"
_ROUTED = ("aux_loss", "seq_aux_loss")  # the balancing types with a loss
_KEY = "adapter_name_or_path"
_BF16, _FP16 = "precision.bf16", "precision.fp16"
_FUSIONS = (
    "performance.bias_activation_fusion",
    "performance.apply_rope_fusion",
    "performance.gradient_accumulation_fusion",
)
_REDUCE, _GATHER = "parallel.overlap_grad_reduce", "parallel.overlap_param_gather"


def with_model_defaults(loaded: Loaded, architecture: Architecture) -> tuple[Loaded, list[str]]:
    """Return the settings with the weight of the balancing loss, and log lines on it.

    As in mcore_adapter and Megatron-SWIFT 3 the default is config.json's router_aux_loss_coef. A weight for
    Transformers' formula is converted to Megatron-Core's.
    """
    entry, moe = loaded.entries.get(AUX_LOSS), architecture.moe
    written = loaded.settings.experts.moe_aux_loss_coeff
    if moe is None or AUX_LOSS in loaded.invalid:
        return loaded, []
    if written is None:
        return _published(loaded, moe)
    row = None if entry is None else loaded.dialect.row_of(entry.key)
    if entry is None or row is None or not row.pooled_loss:
        return loaded, []
    value = written * pooled_factor(moe)
    line = (
        f"{entry.key} {written:g}: moe_aux_loss_coeff {value:.4g}, for Transformers' loss pools the {sum(moe.layers)} "
        f"layers and grows with the {moe.router_topk} experts of a token, and Megatron-Core's is summed over layers"
    )
    return loaded.with_values({AUX_LOSS: value}, entry.where, entry.origin), [line]


def pooled_factor(moe: MixtureOfExperts) -> float:
    """Return the factor that converts a weight of Transformers' balancing loss to Megatron-Core's.

    With f(l, e) the mean number of times that a token chooses expert e in layer l, and P(l, e) its mean probability,
    Transformers' loss is E sum_e mean_l f mean_l P, and Megatron-Core's sum_l E/k sum_e f P. If all layers route alike,
    the second is L/k times the first, and so are its gradients.
    """
    return moe.router_topk / sum(moe.layers)


def _published(loaded: Loaded, moe: MixtureOfExperts) -> tuple[Loaded, list[str]]:
    value = moe.aux_loss_coeff if loaded.settings.experts.moe_router_load_balancing_type in _ROUTED else 0.0
    lines = [f"moe_aux_loss_coeff {value:g}: router_aux_loss_coef of {CONFIG}"] if value else []
    return loaded.with_values({AUX_LOSS: value}, CONFIG, CONFIG), lines


def with_adapter_settings(loaded: Loaded, architecture: Architecture) -> Loaded:
    """Return the settings with those of the last of `adapter_name_or_path`, if it is trained further.

    A different value of a user is a finding. The other adapters are checked, so that a run does not fail on them later.

    Raises:
        MegatuneError: INPUT, with all problems of the adapters.
    """
    finetuning = loaded.settings.finetuning
    if finetuning.finetuning_type != "lora" or not finetuning.adapter_name_or_path:
        return loaded
    folders, taken = [Path(path) for path in finetuning.adapter_name_or_path], {}
    findings: list[Finding] = []
    last = folders.pop() if finetuning.continues_adapter else None
    for folder in [*folders, *([last] if last is not None else [])]:
        try:
            if folder is last:
                taken = settings_of(folder, architecture)
            else:
                read_adapter(folder, architecture)
        except MegatuneError as error:
            findings += error.findings
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return _taken(loaded, architecture, last, taken) if last is not None else loaded


def resolve_finetuning(finetuning: FinetuningSettings, architecture: Architecture) -> FinetuningSettings:
    """Return the settings of fine-tuning with those of the adapter that is trained further, if there is one.

    For processes that could not read the model's config.json before they were started; it has no effect in others.

    Raises:
        MegatuneError: INPUT, see `settings_of`.
    """
    if not finetuning.continues_adapter:
        return finetuning
    taken = settings_of(Path(finetuning.adapter_name_or_path[-1]), architecture)
    whole = dict.fromkeys((*taken["additional_target"], *finetuning.additional_target))
    return finetuning.model_copy(update={**taken, "additional_target": list(whole)})


def _taken(loaded: Loaded, architecture: Architecture, folder: Path, taken: Mapping[str, Any]) -> Loaded:
    """Return the settings with those of the adapter."""
    finetuning, written = loaded.settings.finetuning, loaded.written
    trained = finetuning.model_copy(update=dict(taken))
    kept = {name for name in taken if f"finetuning.{name}" in written}
    findings = [*_otherwise(finetuning, trained, kept, architecture, loaded, folder)]
    new = {f"finetuning.{name}": value for name, value in taken.items() if name not in kept}
    changed = loaded.with_values(new, str(folder / ADAPTER_CONFIG), ADAPTER_CONFIG)
    return replace(changed, findings=[*loaded.findings, *map(loaded.phrased, findings)])


def _in_layers(architecture: Architecture, finetuning: FinetuningSettings) -> list[Weight]:
    """List the weights with adapters that some layer has: if all layers have experts, none has a dense feed-forward."""
    return [weight for weight in adapter_weights(architecture, finetuning) if layers_of(weight, architecture)]


def _otherwise(
    asked: FinetuningSettings,
    trained: FinetuningSettings,
    kept: set[str],
    architecture: Architecture,
    loaded: Loaded,
    folder: Path,
) -> Iterator[Finding]:
    """Yield findings for user settings that differ from those of the adapter."""
    for name in sorted(kept):
        mine, its = getattr(asked, name), getattr(trained, name)
        match name:
            case "lora_target":
                wanted = trained.model_copy(update={"lora_target": mine})
                is_same = _in_layers(architecture, wanted) == _in_layers(architecture, trained)
            case "additional_target":
                is_same = set(its) <= set(mine)  # further modules come from the base
            case _:
                is_same = mine == its
        if not is_same:
            what = f"{ref(name)} is {_shown(mine)}, that of {folder} is {_shown(its)}"
            why = f"training continues with the last adapter of {ref(_KEY)} as it is"
            fix = f"{remove(name)}, or {write('create_new_adapter', True)} to merge it and train a new one"
            yield Finding(what, loaded.written[f"finetuning.{name}"].where, why, fix)


def _shown(value: Any) -> str:
    if isinstance(value, list):  # module paths, without those of their layers
        value = [each.rpartition("{layer}.")[2].replace("{expert}.", "") for each in value]
    if isinstance(value, list) and len(value) > 3:
        return f"{', '.join(value[:3])} and {len(value) - 3} more"
    return ", ".join(value) or "none" if isinstance(value, list) else shown(value)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that defaults depend on.

    Attributes:
        has_bf16: its tensor cores support bf16, as those since Ampere do; None if not known.
        speedup: how much faster it computes matrix products in 16 bits than in fp32; None if not known.
    """

    name: str
    has_bf16: bool | None
    speedup: float | None = None


def with_device_defaults(loaded: Loaded, gpu: Gpu, world_size: int | None) -> tuple[Loaded, list[str]]:
    """Return the settings with the defaults of a GPU, and log lines with the reasons.

    Values of a user or a dialect do not change: Megatron-SWIFT's reader sets the precision of the model's config.json.
    Only the precision affects what is learned. LLaMA-Factory also computes a bf16 checkpoint in bf16 on such a GPU
    if neither bf16 nor fp16 is set.
    """
    reasons = {path: why for path, why in _defaults(loaded, gpu, world_size) if path not in loaded.entries}
    changed = loaded.with_values(dict.fromkeys(reasons, True), gpu.name, gpu.name)
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [path.partition(".")[2] for path, each in reasons.items() if each == why]
        lines.append(f"{', '.join(names)}: true on {gpu.name}, {why}")
    return changed, [*lines, *_cost_of_fp32(changed.settings, gpu)]


def _defaults(loaded: Loaded, gpu: Gpu, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield the settings to turn on if they are not written, with the reasons."""
    settings, parallel = loaded.settings, loaded.settings.parallel
    if gpu.has_bf16 and _FP16 not in loaded.entries:
        faster = f"which computes it {gpu.speedup:.3g} times as fast as fp32" if gpu.speedup else "which computes in it"
        yield _BF16, f"{faster}, and has flash attention for it; bf16: false keeps fp32"
    for path in _FUSIONS:
        yield path, "where one pass over memory is faster than several"
    stages = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replicas = (world_size or 1) // stages
    if replicas > 1:
        why = f"where {replicas} ranks exchange gradients and weights while they compute"
        yield _REDUCE, why
        reduces = settings.parallel.overlap_grad_reduce or _REDUCE not in loaded.entries
        if reduces and parallel.use_distributed_optimizer:
            yield _GATHER, why


def _cost_of_fp32(settings: Settings, gpu: Gpu) -> Iterator[str]:
    """Yield a note on the cost of fp32, if it is used."""
    if setting_value(settings, _BF16) or setting_value(settings, _FP16):
        return
    key = "fp16" if gpu.has_bf16 is False else "bf16"
    times = f"{gpu.speedup:.3g} times as fast" if gpu.speedup else "several times as fast"
    yield (
        f"fp32 on {gpu.name}: products without TF32, attention without flash kernels, twice the bytes of activations;"
        f" {key}: true computes {times}"
    )
