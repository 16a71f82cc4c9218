"""Sizes of low-rank adapters (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import FAMILIES
from megatune.families.dense import ENGINE_LAYER
from megatune.families.weights import WHOLE, Slice, TensorLayout, Weight, experts_of, hf_shape, layers_of
from megatune.plan.case import PlannedModel

# The engine's matrices by the names that lora_target has for them.
_TARGETS = {
    "self_attention.linear_qkv.weight": "linear_qkv",
    "self_attention.linear_q_proj.weight": "linear_qkv",
    "self_attention.linear_q_down_proj.weight": "linear_qkv",
    "self_attention.linear_q_up_proj.weight": "linear_qkv",
    "self_attention.linear_kv_down_proj.weight": "linear_qkv",
    "self_attention.linear_kv_up_proj.weight": "linear_qkv",
    "self_attention.linear_proj.weight": "linear_proj",
    "mlp.linear_fc1.weight": "linear_fc1",
    "mlp.shared_experts.linear_fc1.weight": "linear_fc1",
    "mlp.experts.weight1": "linear_fc1",
    "mlp.linear_fc2.weight": "linear_fc2",
    "mlp.shared_experts.linear_fc2.weight": "linear_fc2",
    "mlp.experts.weight2": "linear_fc2",
}


def adapter_sizes(
    weight: Weight, architecture: Architecture, part: Slice, trainable: FinetuningSettings
) -> Iterator[int]:
    """Yield elements that a rank holds of each adapter matrix beside a weight: A, then B, of each Hugging Face tensor.

    Nothing where the weight has no adapter. Every Hugging Face matrix [out, in] has its own, as PEFT makes it: A [r,
    in] and B [out, r]; matrices that the engine fuses (queries, keys and values; gate and up) are counted apart. Where
    tensor parallelism cuts the outputs, it cuts B's rows, and A is whole on every rank; where it cuts the inputs, it
    cuts A's columns, and B is whole. An expert's matrices have an adapter for each expert.
    """
    if trainable.finetuning_type != "lora" or trainable.freeze_language_model:
        return
    if _TARGETS.get(weight.engine.removeprefix(f"{ENGINE_LAYER}.")) not in trainable.lora_layers:
        return
    # Key/value heads that are fewer than tp: the rank that gets most of them.
    cut_rows = part.tp_size if weight.layout in (TensorLayout.ROWS, TensorLayout.QKV, TensorLayout.GATE_UP) else 1
    cut_columns = part.tp_size if weight.layout is TensorLayout.COLUMNS else 1
    of_rank = len(experts_of(weight, architecture, part)) * trainable.lora_rank
    for tensor in weight.hf:
        rows, columns = hf_shape(tensor, architecture)
        yield of_rank * -(-columns // cut_columns)
        yield of_rank * -(-rows // cut_rows)


def num_trained_parameters(model: PlannedModel, trainable: FinetuningSettings) -> int:
    """Return elements of the whole model that are trained, without padding; of adapters as PEFT counts them."""
    architecture = model.architecture
    trained = sum(
        len(layers_of(weight, architecture)) * _num_trained(weight, architecture, trainable)
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
    )
    if model.architecture.vision is not None and trainable.finetuning_type == "full":
        trained += 0 if trainable.freeze_vision_tower else model.architecture.vision.num_parameters
        trained += 0 if trainable.freeze_multi_modal_projector else model.architecture.vision.num_projector_parameters
    return trained


def _num_trained(weight: Weight, architecture: Architecture, trainable: FinetuningSettings) -> int:
    """Of one layer's weight."""
    if trainable.freeze_language_model or weight.is_buffer:
        return 0
    if trainable.finetuning_type == "lora":
        return sum(adapter_sizes(weight, architecture, WHOLE, trainable))
    experts = len(experts_of(weight, architecture))
    return experts * sum(prod(hf_shape(tensor, architecture)) for tensor in weight.hf)
