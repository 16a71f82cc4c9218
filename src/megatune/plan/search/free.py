"""What costs nothing: settings that make a step faster or smaller, and no number of the run worse."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.rules import check
from megatune.config.settings import Settings
from megatune.plan.changes.variation import Changes, with_settings
from megatune.plan.search.candidate import SearchRequest

# Kernels that do in one pass over memory what others do in several: results differ in the last bits at most.
FREE: Changes = {
    "performance.bias_activation_fusion": True,
    "performance.apply_rope_fusion": True,
    "performance.cross_entropy_loss_fusion": True,
    "performance.rms_norm_fusion": True,
    "performance.gradient_accumulation_fusion": True,
    "experts.moe_grouped_gemm": True,
}
_GRADIENTS: Changes = {"precision.accumulate_allreduce_grads_in_fp32": False}
_AVERAGES: Changes = {"optimizer.exp_avg_dtype": "bf16", "optimizer.exp_avg_sq_dtype": "bf16"}
# What is faster or smaller for a price in numbers, by its name.
PRICED: dict[str, Changes] = {
    "gradients in bf16": _GRADIENTS,
    "gradients and Adam's averages in bf16": {**_GRADIENTS, **_AVERAGES},
}


def with_free(request: SearchRequest) -> Settings:
    """Return the request's settings with everything on that costs nothing, but for what the user wrote, and for what
    the rules have something against. On a CPU, where none of it makes a step faster, the settings as they are."""
    settings = request.settings
    if not request.free or request.machine.device.generation == "cpu":
        return settings
    architecture = request.model.architecture
    before = set(check(settings, architecture))
    for path, value in FREE.items():
        if path in request.written or (architecture.moe is None and path.startswith("experts.")):
            continue
        changed = with_settings(settings, {path: value})
        if changed != settings and not set(check(changed, architecture)) - before:
            settings = changed
    return settings


def priced(request: SearchRequest) -> Iterator[tuple[str, Changes]]:
    """Yield what the request's run can trade numbers for, by its name: of full training in 16 bits on GPUs. What the
    user wrote stays."""
    settings = request.settings
    is_narrow = settings.precision.params_dtype != "float32" and request.machine.device.generation != "cpu"
    if not is_narrow or settings.finetuning.finetuning_type == "lora" or settings.optimizer.optimizer != "adam":
        return
    for name, changes in PRICED.items():
        changed = with_settings(settings, changes)
        if not request.written & changes.keys() and changed != settings:
            yield name, changes
