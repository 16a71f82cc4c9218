"""How layouts, parts and machines are called on every page."""

from __future__ import annotations

from megatune.config.groups.performance import RecomputeSettings
from megatune.plan.case import Case
from megatune.plan.machine import Machine
from megatune.plan.memory.adapters import num_trained_parameters
from megatune.plan.pages.units import amount, count
from megatune.plan.question import Question

MEMORY_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "master_weights": "master weights (fp32)",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "communication": "communication buffers",
    "expert_imbalance": "expert imbalance",
    "framework": "framework",
}

# Heads of narrow columns.
SHORT_MEMORY_WORDS = {
    "weights": "weights",
    "gradients": "grads",
    "master_weights": "master",
    "optimizer_state": "optim",
    "activations": "activ",
    "logits_and_loss": "logits",
    "communication": "comm",
    "expert_imbalance": "uneven",
    "framework": "frame",
}

TIME_WORDS = {
    "compute": "computing",
    "recompute": "recomputing",
    "tensor_parallel": "tensor parallel",
    "context_parallel": "context parallel",
    "expert_parallel": "expert parallel",
    "pipeline": "pipeline bubble",
    "data_parallel": "data parallel",
    "optimizer": "optimizer",
    "overhead": "overhead",
}

_MODULES = {
    "core_attn": "attn",
    "layernorm": "norm",
    "moe_act": "act",
    "mla_up_proj": "mla",
    "shared_experts": "shared",
}


def layout_words(case: Case) -> str:
    """Every size above 1, as people write layouts: tp2 pp4 vpp2 ep8 dp4."""
    parallel = case.settings.parallel
    sizes = parallel.sizes(case.world_size)
    etp = parallel.expert_tensor_size
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if case.model.architecture.moe is not None and etp != sizes["tp"]:
        words.insert(-1 if case.dp_size > 1 else len(words), f"etp{etp}")
    return " ".join(words) or "one device"


def recompute_words(recompute: RecomputeSettings) -> str:
    """none, full, block 8, or the modules of selective recomputation."""
    if recompute.recompute_granularity == "full":
        if recompute.recompute_method == "block":
            return f"block {recompute.recompute_num_layers or 'all'}"
        groups = recompute.recompute_num_layers or 1
        return "full" if groups == 1 else f"full by {groups}"
    return "+".join(_MODULES.get(module, module) for module in recompute.selective_modules) or "none"


def machine_words(machine: Machine, world_size: int) -> str:
    """32 × a100-80g: 4 nodes of 8, nvlink-3 inside, ib-200 between."""
    device, per_node = machine.device, machine.gpus_per_node
    if device.generation == "cpu":
        return f"{count(world_size, 'process')[:-1] + 'es' if world_size > 1 else '1 process'} on this machine's CPU"
    if world_size <= per_node:
        inside = f", {machine.link.name}" if world_size > 1 else ""
        return f"{world_size} × {device.name}{inside}"
    nodes = -(-world_size // per_node)
    within = f" of {per_node}, {machine.link.name} inside" if per_node > 1 else " of 1"
    return f"{world_size:,} × {device.name}: {nodes:,} nodes{within}, {machine.network.name} between"


# A dtype that the device computes this many times as fast is worth a word.
_WORTH_SAYING = 1.5


def slow_precision(question: Question) -> str:
    """What to write where the device computes much faster in another precision; "" where it does not."""
    device, dtype = question.machine.device, question.settings.precision.params_dtype
    best = max(("bfloat16", "float16"), key=lambda each: device.flops.get(each, 0.0))
    if dtype not in device.flops or best not in device.flops:
        return ""
    ratio = device.flops[best] / device.flops[dtype]
    key = "bf16" if best == "bfloat16" else "fp16"
    return f"({key}: true computes {ratio:.3g} times as fast on this device)" if ratio >= _WORTH_SAYING else ""


def trained_words(case: Case) -> str:
    """What is trained, and in which precision."""
    trainable = case.settings.finetuning
    if trainable.finetuning_type == "lora":
        text = f"LoRA of rank {trainable.lora_rank} on {', '.join(trainable.lora_layers)}"
    else:
        text = "full fine-tuning"
    if case.model.vision is not None:
        frozen = [
            name
            for name, is_frozen in (
                ("vision tower", trainable.freeze_vision_tower),
                ("projector", trainable.freeze_multi_modal_projector),
                ("language model", trainable.freeze_language_model),
            )
            if is_frozen
        ]
        text += f", frozen: {', '.join(frozen)}" if frozen else ""
    if trainable.finetuning_type == "lora" or case.model.vision is not None:
        text += f", {amount(num_trained_parameters(case.model, trainable))} parameters"
    return f"{text}, {case.settings.precision.params_dtype}"
