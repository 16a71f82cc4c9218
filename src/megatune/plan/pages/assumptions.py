"""What a plan takes for granted, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatune.plan.changes.variation import with_settings
from megatune.plan.memory.workspace import COMMUNICATOR, CONTEXT, CPU_PROCESS
from megatune.plan.pages.units import bytes_unit, count
from megatune.plan.question import Question
from megatune.plan.routing import BALANCED_VARIATION, FREE_VARIATION, expert_imbalance, is_balanced


def standing_notes(question: Question) -> Iterator[str]:
    """What every plan takes for granted, and what this one cannot be trained with."""
    machine = question.machine
    device, dtype = machine.device, question.settings.precision.params_dtype
    unit = bytes_unit(device.memory)
    yield (
        f"{device.name}: {unit.with_name(device.memory)} can be used, {device.flops[dtype] / 1e12:,.4g} TFLOP/s in "
        f"{dtype}, {device.bandwidth / 1e9:,.4g} GB/s of memory bandwidth"
    )
    yield "memory is that of a step whose rows all have the longest length; shorter rows take less"
    yield from _beside_tensors(question)
    yield from _uneven_experts(question)
    runs = machine.calibration.num_runs
    fitted = (
        f"fitted to {count(runs, 'run')} on this device" if runs else "of this kind of device, not of your machines"
    )
    yield f"efficiencies are {fitted}" + ("" if runs else "; megatune plan --calibrate RUN fits them")
    if question.settings.finetuning.finetuning_type == "lora":
        yield "LoRA can be planned, and not trained yet"
    if question.model.vision is not None:
        yield "vision-language models can be planned, and not trained yet"


def _beside_tensors(question: Question) -> Iterator[str]:
    """Of memory that is no tensor."""
    if question.machine.device.generation == "cpu":
        yield f"framework: a process takes {_mib(CPU_PROCESS)} before it makes a model"
    else:
        yield (
            f"framework: a CUDA context with its libraries takes {_mib(CONTEXT)}; communication buffers: NCCL takes "
            f"{_mib(COMMUNICATOR)} for each group of more than one rank; neither was measured"
        )
    yield "fragments of freed memory are not counted"


def _uneven_experts(question: Question) -> Iterator[str]:
    """The law of expert imbalance by an example: of the settings' own expert-parallel ranks, or of eight."""
    settings, moe = question.settings, question.model.architecture.moe
    if moe is None:
        return
    own = settings.parallel.expert_model_parallel_size
    ranks = own if own > 1 else math.gcd(8, moe.num_experts)
    factor = expert_imbalance(with_settings(settings, {"parallel.expert_model_parallel_size": ranks}), moe)
    variations = {True: BALANCED_VARIATION, False: FREE_VARIATION}
    balanced = is_balanced(settings)
    other = f"{variations[not balanced]:.0%} where {'nothing' if balanced else 'something'} balances them"
    yield (
        f"expert imbalance: an expert's tokens vary by {variations[balanced]:.0%} of their mean ({other}), so the "
        f"fullest of {ranks} expert-parallel ranks has {factor:.2f} times an even share"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
