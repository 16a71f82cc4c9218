"""Formats numbers, layouts, parts of memory and time, and machines for all printed pages."""

from __future__ import annotations

from typing import NamedTuple

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.values import counted
from megatune.families.trained import adapted_modules, frozen_parts, kind_of_adapters, whole_modules
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.machine import Machine
from megatune.plan.memory.stage import MEMORY_PARTS, StageMemory
from megatune.plan.memory.tensors import num_trained_parameters
from megatune.plan.schedule import bubble_shares
from megatune.plan.time.estimate import answers, num_reference_passes

# Names of each part: in a sentence, and at the head of a narrow column.
_PARTS = {
    "weights": ("weights", "weights"),
    "gradients": ("gradients", "grads"),
    "master_weights": ("master weights (fp32)", "master"),
    "optimizer_state": ("optimizer state", "optim"),
    "activations": ("activations", "activ"),
    "logits_and_loss": ("logits and loss", "logits"),
    "communication": ("communication buffers", "comm"),
    "expert_imbalance": ("expert imbalance", "uneven"),
    "framework": ("framework", "frame"),
}
MEMORY_NAMES = {part: words for part, (words, _) in _PARTS.items()}
SHORT_MEMORY_NAMES = {part: word for part, (_, word) in _PARTS.items()}
TIME_NAMES = {
    "compute": "computing",
    "recompute": "recomputing",
    "tensor_parallel": "tensor parallel",
    "context_parallel": "context parallel",
    "expert_parallel": "expert parallel",
    "host": "host",
    "pipeline": "pipeline bubble",
    "data_parallel": "data parallel",
    "optimizer": "optimizer",
    "overhead": "overhead",
}


class Unit(NamedTuple):
    """The unit of the numbers in a table."""

    name: str
    size: float

    def of(self, number: float) -> str:
        """Format a number with three digits or more, without the name of the unit."""
        value = number / self.size
        size = abs(value)
        if 0 < size < 0.005:
            return "<0.01" if value > 0 else ">-0.01"
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"

    def with_name(self, number: float) -> str:
        return f"{self.of(number)} {self.name}"


GIB = Unit("GiB", 2**30)


def bytes_unit(largest: float) -> Unit:
    """Return the unit for a table with this largest number of bytes; GiB from 0.1 GiB on."""
    return GIB if largest >= 0.1 * 2**30 else Unit("MiB", 2**20) if largest >= 0.1 * 2**20 else Unit("KiB", 2**10)


def seconds_unit(largest: float) -> Unit:
    """Return the unit for a table with this largest duration in seconds."""
    return Unit("s", 1) if largest >= 2 else Unit("ms", 1e-3)


def amount(number: float) -> str:
    """Format a large number: 8.03 B, 596 M, 12.3 k."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {suffix}" if number < 1000 * size else f"{number / size:,.0f} {suffix}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """Format a duration in a unit that suits its length: 45 s, 12 min, 3.4 hours, 5.2 days."""
    for name, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= (1.5 if name != "min" else 2) * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Format bytes: 23.4 GiB, 512 MiB."""
    return bytes_unit(abs(num_bytes)).with_name(num_bytes)


def seconds(value: float) -> str:
    """Format a duration with two digits and its unit: 85 ms, 1.9 s, 132 s."""
    if value < 0.0995:
        return f"{value * 1000:.2g} ms"
    return f"{value:#.2g} s" if value < 9.95 else f"{value:,.0f} s"


def percent(share: float) -> str:
    """Format a share from 0 to 1 as a percentage: 12 %."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.0095 else f"{share * 100:.1g} %"


def describe_pace(ratio: float) -> str:
    """Describe a ratio of times: `26 % slower`, `as fast`; from 2 on `2.6 times slower`."""
    if 0.995 < ratio < 1.005:
        return "as fast"
    return (
        f"{ratio:.1f} times slower"
        if ratio >= 2
        else f"{percent(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"
    )


def fullest(planned: Estimate) -> str:
    """Compare the fullest stage with the device: `23.4 of 79.2 GiB`; with its number if there are several stages."""
    stage, memory = planned.fullest, planned.case.machine.device.memory
    unit = bytes_unit(stage.total)
    which = f" {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else ""
    return f"{'fullest stage' if which else 'memory'}{which}: {unit.of(stage.total)} of {unit.of(memory)} {unit.name}"


def parts(stage: StageMemory) -> str:
    """List a stage's parts of at least 1 % of its memory: `weights 3.8, gradients 7.6, …`, in the total's unit."""
    unit = bytes_unit(stage.total)
    sizes = {part: getattr(stage, part) for part in MEMORY_PARTS}
    seen = {part: held for part, held in sizes.items() if held >= 0.01 * stage.total}
    return ", ".join(f"{MEMORY_NAMES[part]} {unit.of(held)}" for part, held in seen.items())


def largest_part(stage: StageMemory) -> tuple[str, int]:
    """Return the name and the bytes of the largest part of a stage's memory."""
    part = max(MEMORY_PARTS, key=lambda part: getattr(stage, part))
    return MEMORY_NAMES[part], getattr(stage, part)


_MODULES = {
    "core_attn": "attn",
    "layernorm": "norm",
    "moe_act": "act",
    "mla_up_proj": "mla",
    "shared_experts": "shared",
}


def describe_layout(case: Case) -> str:
    """Format all parallel sizes above 1: tp2 pp4 vpp2 ep8 dp4."""
    has_experts = case.model.architecture.moe is not None
    return case.settings.parallel.layout_name(case.world_size, has_experts=has_experts) or "one device"


def describe_recompute(recompute: RecomputeSettings) -> str:
    """Format the recomputation: none, full, block 8, or the modules of selective recomputation."""
    if recompute.recompute_granularity == "full":
        if recompute.recompute_method == "block":
            return f"block {recompute.recompute_num_layers or 'all'}"
        groups = recompute.recompute_num_layers or 1
        return "full" if groups == 1 else f"full by {groups}"
    return "+".join(_MODULES.get(module, module) for module in recompute.selective_modules) or "none"


def describe_machine(machine: Machine, world_size: int) -> str:
    """Format the machines of a run: 32 × a100-80g: 4 nodes of 8, nvlink-3 inside, ib-200 between."""
    device, per_node = machine.device, machine.gpus_per_node
    if device.on_cpu:
        return f"{world_size:,} process{'es' * (world_size > 1)} on this machine's CPU"
    if world_size <= per_node:
        return f"{world_size} × {device.name}" + (f", {machine.link.name}" if world_size > 1 else "")
    nodes, left = divmod(world_size, per_node)
    within = f" of {per_node}{f' and 1 of {left}' if left else ''}"
    within += f", {machine.link.name} inside" if per_node > 1 else ""
    return f"{world_size:,} × {device.name}: {counted(nodes, 'node')}{within}, {machine.network.name} between"


def slow_precision(case: Case) -> str:
    """Recommend a 16-bit dtype if the device computes much faster in it; return "" otherwise."""
    device, dtype = case.machine.device, case.settings.precision.params_dtype
    best = max(("bfloat16", "float16"), key=lambda each: device.flops.get(each, 0.0))
    if dtype not in device.flops or best not in device.flops:
        return ""
    ratio = device.flops[best] / device.flops[dtype]
    key = "bf16" if best == "bfloat16" else "fp16"
    return f"({key}: true computes {ratio:.3g} times as fast on this device)" if ratio >= 1.5 else ""


def row_length(case: Case) -> str:
    """Format the tokens of the longest row: 2,048; of a preference pair 2 × 2,048."""
    per_row = case.sequences_per_row
    return f"{case.sequence_length:,}" if per_row == 1 else f"{per_row} × {case.sequence_length:,}"


def describe_row_length(case: Case) -> str:
    """Format `row_length` with its unit."""
    return f"{row_length(case)} token{'s' * (case.row_tokens != 1)}"


def describe_lengths(case: Case) -> str:
    """Describe the lengths of rows, and the length that micro-batches are padded to."""
    if (lengths := case.lengths) is None:
        return f"rows of {describe_row_length(case)}"
    kind = "packed rows" if case.settings.packing else "answers" if case.sequences_per_row > 1 else "rows"
    text = f"{kind} of {lengths.mean:,.0f} tokens on average, {lengths.longest:,} the longest"
    if round(lengths.mean) == lengths.longest:
        text = f"{kind} of {lengths.longest:,} tokens each"
    text += f" ({lengths.origin})" if lengths.origin else ""
    padded = case.with_mean_rows.sequence_length
    if case.settings.packing or padded < 1.02 * lengths.mean:
        return text
    return f"{text}; micro-batches are padded to {padded:,}"


def describe_reference_passes(planned: Estimate) -> str:
    """Describe the forward passes of the reference before the first step; return "" if there are none."""
    if not (passes := num_reference_passes(planned.case.settings)):
        return ""
    times = "once" if passes == 1 else "twice, with their own answers and with others"
    rows = f"{seconds(passes * planned.time.forward)} for the rows of a step"
    return f"before the first step the reference computes all rows {times}, without gradients: about {rows}"


def describe_generation(planned: Estimate) -> str:
    """Describe the time to generate answers during training; return "" if none are generated."""
    if (written := answers(planned.case)) is None:
        return ""
    evaluation = planned.case.settings.evaluation
    prompts, tokens = counted(evaluation.eval_generate_samples, "prompt"), evaluation.eval_generate_tokens
    text = f"answers to {prompts}, of up to {tokens:,} tokens each, take up to {seconds(written.seconds)} each time"
    if written.every is None:
        return text
    if written.every < 1:
        return f"{text}: every {written.every:.2%} of the run's steps"
    share = written.seconds / (written.every * planned.time.total)
    return f"{text}: every {written.every:,.0f} steps, {share:.1%} of the training time"


def describe_waiting(planned: Estimate) -> str:
    """Describe the share of a step in which pipeline stages wait for each other."""
    of_all, of_slowest = bubble_shares(planned.time.chunks, planned.case.num_micro_batches)
    waits = f"stages wait {of_all:.1%} of a step, the busiest of them {of_slowest:.1%}"
    return f"Pipeline: {waits}. --figures DIR writes the schedule as a trace."


def describe_host_memory(planned: Estimate) -> str:
    """Describe the host memory of the optimizer; return "" if it needs none."""
    each = max(stage.host for stage in planned.stages)
    if not each:
        return ""
    case = planned.case
    ranks = min(case.machine.gpus_per_node, case.world_size)
    whole = f", {size(ranks * each)} on a machine of {ranks}" if ranks > 1 else ""
    return f"host memory: {size(each)} of optimizer state per process{whole}"


def describe_media(case: Case) -> str:
    """Describe the images and videos that rows are assumed to have; return "" for a language model."""
    tokens, image = case.picture_tokens, case.tokens_per_image
    if case.model.architecture.vision is None:
        return ""
    if not tokens:
        return (
            "rows are assumed to have no images or videos"
            if case.largest_picture is None
            else "rows have no images or videos"
        )
    if case.largest_picture is not None:
        return f"rows have at most {counted(tokens, 'token')} of images or videos; the largest one has {image:,}"
    pixels = f"{case.settings.data.image_max_pixels:,} pixels"
    if tokens <= image:
        return f"each row is assumed to have one image of {pixels}: {counted(tokens, 'token')}"
    return f"each row is assumed to have {counted(tokens, 'token')} of images of {pixels}, {image:,} each"


def describe_trained(case: Case) -> str:
    """Describe what is trained, and its dtype."""
    trainable = case.settings.finetuning
    architecture = case.model.architecture
    if trainable.finetuning_type == "lora":
        text = f"{kind_of_adapters(trainable)} on {adapted_modules(architecture, trainable)}"
        text += f"; whole: {', '.join(whole)}" if (whole := whole_modules(architecture, trainable)) else ""
    else:
        frozen = ", ".join(frozen_parts(architecture, trainable))
        text = f"{trainable.finetuning_type} fine-tuning{f', frozen: {frozen}' if frozen else ''}"
    if trainable.finetuning_type != "full" or architecture.vision is not None:
        text += f", {amount(num_trained_parameters(architecture, trainable))} parameters"
    return f"{text}, {case.settings.precision.params_dtype}"
