"""A published row as the planner's case, and what it predicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import GROUPS, Settings
from megatune.plan.case import OURS, Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.machine import Machine
from megatune.plan.memory.parameters import StateConfig, elements_of
from megatune.plan.time import StepTime, step_time
from megatune.plan.time.communication import HIDING, all_gather, data_groups
from planner.row import Row


@dataclass(frozen=True)
class Prediction:
    """Of a row: the planner's answer, and seconds of what it does not know."""

    row: Row
    case: Case
    time: StepTime
    sharding: float

    @property
    def speed(self) -> float:
        """Tokens/s/GPU."""
        return self.time.tokens / (self.time.total + self.sharding) / self.row.gpus

    @property
    def error(self) -> float:
        """Of tokens/s, relative: above 0 where the planner is too fast."""
        return self.speed / self.row.speed - 1


def predict(row: Row) -> Prediction:
    """What the planner says; with FSDP, its exchanges in place of the distributed optimizer's."""
    case = case_of(row)
    time = step_time(case)
    return Prediction(row, case, time, _sharding(case, time) if row.sharded else 0.0)


def by_this_engine(row: Row) -> Prediction:
    """What this project's engine is planned to reach with the same settings."""
    return predict(dataclasses.replace(row, engine=OURS))


def case_of(row: Row) -> Case:
    """The row, planned as it ran."""
    model = model_of(row.model)
    trainable = FinetuningSettings()
    if row.lora:
        trainable = FinetuningSettings(finetuning_type="lora", lora_rank=row.lora, lora_target=list(row.lora_target))
    return Case(
        model=model,
        settings=_settings(row, model.architecture).model_copy(update={"finetuning": trainable}),
        world_size=row.gpus,
        machine=machine_of(row.device),
        document_length=row.document,
        image_tokens=row.image_tokens,
        engine=row.engine,
    )


@cache
def machine_of(device: str) -> Machine:
    """From the catalogue; torchtitan's H100 by its page: 2.4 TB/s, and limited to 500 W of 700."""
    if device != "h100-96g":
        return find_machine(device)
    machine = find_machine("h100-80g")
    return dataclasses.replace(
        machine,
        device=dataclasses.replace(machine.device, name=device, bandwidth=2.4e12, memory=int(94.5 * 2**30), watts=500),
    )


def _settings(row: Row, architecture: Architecture) -> Settings:
    """Fused kernels, overlapped exchanges and bf16, where the row does not say otherwise."""
    values: dict[str, Any] = {
        "bf16": True,
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "gradient_accumulation_fusion": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "packing": False,
        "cutoff_len": row.length,
        "per_device_train_batch_size": row.rows,
        "gradient_accumulation_steps": row.steps,
        **row.settings,
    }
    if values.get("recompute_num_layers") == "half":
        values["recompute_num_layers"] = architecture.num_layers // 2
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        mine = {key: values.pop(key) for key in list(values) if key in group.model_fields}
        groups[name] = group(**mine)
    assert not values, f"no such settings: {values}"
    return Settings(**groups)


def _sharding(case: Case, time: StepTime) -> float:
    """Seconds of FSDP (and ZeRO 3) beyond the distributed optimizer's that nothing hides.

    In every micro-batch weights are gathered forward and backward, in the model's dtype, and gradients are
    reduce-scattered in fp32; what the passes beside it hide is as the planner's own. Frozen weights are gathered, too.
    The planner's exposed exchange of a step is taken off: here it is part of every micro-batch.
    """
    exposed = 0.0
    for stage, chunks in enumerate(time.chunks):
        elements = elements_of(StateConfig.of(case), stage)
        trained = elements.trained_dense, elements.trained_expert
        held = elements.dense, elements.expert
        seconds = 0.0
        for group, weights, gradients in zip(data_groups(case), held, trained, strict=True):
            seconds += 2 * all_gather(group, 2 * weights) + all_gather(group, 4 * gradients)
        passes = sum(chunk.total for chunk in chunks)
        exposed = max(exposed, seconds - HIDING * passes)
    return case.num_micro_batches * max(0.0, exposed) - time.data_parallel


@cache
def model_of(name: str) -> PlannedModel:
    """From the catalogue, or one of those below."""
    return _MODELS[name]() if name in _MODELS else find_model(name)


def _llama2(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> PlannedModel:
    base = find_model("Meta-Llama-3-8B")
    shape = dataclasses.replace(
        base.architecture,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        vocab_size=32000,
    )
    return PlannedModel(name="Llama-2", architecture=shape)


def _cut(name: str, layers: int, **more: Any) -> PlannedModel:
    """A model of so many layers; of experts all but the first."""
    shape = find_model(name).architecture
    if shape.moe is not None:
        more["moe"] = dataclasses.replace(more.get("moe", shape.moe), layers=(False, *[True] * (layers - 1)))
    return PlannedModel(name=name, architecture=dataclasses.replace(shape, num_layers=layers, **more))


def _latent(layers: int, heads: int, vocabulary: int, ffn: int, shared: int) -> PlannedModel:
    """DeepSeek-V2-Lite's shape, and Moonlight's."""
    shape = find_model("DeepSeek-V3").architecture
    assert shape.moe is not None
    assert shape.mla is not None
    experts = dataclasses.replace(
        shape.moe, num_experts=64, router_topk=6, moe_ffn_hidden_size=1408, shared_expert_intermediate_size=shared,
        num_groups=0, group_topk=0,
    )  # fmt: skip
    return _cut(
        "DeepSeek-V3", layers, hidden_size=2048, ffn_hidden_size=ffn, num_attention_heads=heads,
        num_query_groups=heads, vocab_size=vocabulary, moe=experts,
        mla=dataclasses.replace(shape.mla, q_lora_rank=None),
    )  # fmt: skip


def _deepseek_v2() -> PlannedModel:
    shape = find_model("DeepSeek-V3").architecture
    assert shape.moe is not None
    experts = dataclasses.replace(
        shape.moe, num_experts=160, router_topk=6, moe_ffn_hidden_size=1536, shared_expert_intermediate_size=3072
    )
    return _cut("DeepSeek-V3", 4, hidden_size=5120, ffn_hidden_size=12288, vocab_size=102400, moe=experts)


_MODELS = {
    "Llama-2-13B": lambda: _llama2(40, 5120, 13824, 40, 40),
    "Llama-2-70B": lambda: _llama2(80, 8192, 28672, 64, 8),
    # What torchtitan calls deepseek_v3 16B.
    "DeepSeek-V2-Lite": lambda: _latent(27, 16, 102400, 10944, 2816),
    "Moonlight-16B-A3B": lambda: _latent(27, 16, 163840, 11264, 2816),
    "Llama-3-70B, 12 layers": lambda: _cut("Meta-Llama-3-70B", 12),
    "Llama-3.1-405B, 4 layers": lambda: _cut(
        "Meta-Llama-3-70B", 4, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128, num_query_groups=16
    ),
    "DeepSeek-V2, 4 layers": _deepseek_v2,
    "DeepSeek-V3, 4 layers": lambda: _cut("DeepSeek-V3", 4),
}
