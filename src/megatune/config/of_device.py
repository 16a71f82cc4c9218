"""Settings that a GPU decides where they are not written: the declared defaults are those of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatune.config.load import Loaded
from megatune.config.settings import Settings, setting_value

_BF16, _FP16 = "precision.bf16", "precision.fp16"
_FUSIONS = (
    "performance.bias_activation_fusion",
    "performance.apply_rope_fusion",
    "performance.gradient_accumulation_fusion",
)
_REDUCE, _GATHER = "parallel.overlap_grad_reduce", "parallel.overlap_param_gather"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the defaults follow from.

    Attributes:
        has_bf16: its tensor cores compute in bf16: those since Ampere do. None where that is not known.
        speedup: how many times as fast as in fp32 it computes products in 16 bits; None where that is not known.
    """

    name: str
    has_bf16: bool | None
    speedup: float | None = None


def of_device(loaded: Loaded, gpu: Gpu, world_size: int | None) -> tuple[Loaded, list[str]]:
    """Return the settings with the defaults of a GPU, as if a user had written them, and lines that say why.

    What a user or a dialect has written stays: Megatron-SWIFT's reader writes the precision of the model's config.json.
    Only the precision changes what is learned. LLaMA-Factory, too, computes a bf16 checkpoint in bf16 on such a GPU
    where neither bf16 nor fp16 is written.
    """
    reasons = {path: why for path, why in _defaults(loaded, gpu, world_size) if path not in loaded.entries}
    changed = loaded.taking(dict.fromkeys(reasons, True), gpu.name, gpu.name)
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [path.partition(".")[2] for path, each in reasons.items() if each == why]
        lines.append(f"{', '.join(names)}: true on {gpu.name}, {why}")
    return changed, [*lines, *_cost_of_fp32(changed.settings, gpu)]


def _defaults(loaded: Loaded, gpu: Gpu, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield what to turn on where it is not written, and why."""
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
    """Say what fp32 costs, where it was chosen or 16 bits were not."""
    if setting_value(settings, _BF16) or setting_value(settings, _FP16):
        return
    key = "fp16" if gpu.has_bf16 is False else "bf16"
    times = f"{gpu.speedup:.3g} times as fast" if gpu.speedup else "several times as fast"
    yield (
        f"fp32 on {gpu.name}: products without TF32, attention without flash kernels, twice the bytes of activations;"
        f" {key}: true computes {times}"
    )
