"""Bytes of parameters, gradients and optimizer against the memory that built models hold, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from covering import covering
from exact_state import rank_state
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    MORE_EXPERT_LAYOUTS,
    MORE_LAYOUTS,
    MORE_SEQUENCE_LAYOUTS,
    SEQUENCE_LAYOUTS,
    Layout,
)
from model_sizes import tiny_config

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules import check, layout, memory, pipeline
from megatune.config.settings import Settings
from megatune.engine import adam
from megatune.engine.groups import build
from megatune.engine.model import build_model
from megatune.engine.optimizer import build_optimizer, main_shards
from megatune.families import FAMILIES
from megatune.plan.case import Case, PlannedModel
from megatune.plan.flops import num_parameters
from megatune.plan.machine import Device, Link, Machine
from megatune.plan.memory.parameters import StateConfig, elements_of, stage_state
from megatune.plan.memory.tensors import num_trained_parameters

_LINK = Link(name="link", bandwidth=1e9, latency=1e-6)
_DEVICE = Device(name="device", generation="cpu", memory=1, flops={}, bandwidth=1e9, link="link")
MACHINE = Machine(device=_DEVICE, gpus_per_node=8, link=_LINK, network=_LINK)

_BF16, _FP16 = {"bf16": True}, {"fp16": True}
_OFFLOAD = {"optimizer_cpu_offload": True}
# Settings of the optimizer and of the precision.
VARIANTS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({}, _BF16),
    ({}, {}),
    ({}, _FP16),
    ({}, _BF16 | {"accumulate_allreduce_grads_in_fp32": False}),
    ({"exp_avg_dtype": "bf16"}, _BF16),
    ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, {}),
    ({"optimizer": "muon"}, _BF16),
    ({"optimizer": "muon"}, {}),
    ({"optimizer": "sgd"}, _BF16),
    ({"optimizer": "sgd", "sgd_momentum": 0.0}, _FP16),
    (_OFFLOAD, _BF16),
    (_OFFLOAD | {"optimizer_offload_fraction": 0.4}, _BF16),
    (_OFFLOAD | {"optimizer_offload_fraction": 0.7, "exp_avg_sq_dtype": "bf16"}, {}),
]
_PP2, _PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
# Pipelines whose stages are unlike; each says how many layers it is for.
PIPELINES = {
    7: Layout(2, _PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    5: Layout(4, _PP4),
    4: Layout(4, _PP2 | {"pipeline_model_parallel_layout": "E|t*4L"}),
    6: Layout(4, _PP2 | {"pipeline_model_parallel_layout": "Et*6|L", "use_distributed_optimizer": False}),
    8: Layout(8, _PP2 | {"pipeline_model_parallel_layout": "E|ttt|t*5|L", "overlap_grad_reduce": True}),
}
# Replicas of one kind of weights only.
HALVES = {
    "experts alone have replicas": Layout(2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "experts alone have none": Layout(4, {"expert_model_parallel_size": 4}),
    "three shards": Layout(3),
    "six shards on two stages": Layout(6, _PP2 | {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
SPARSE = {f"experts: {name}": one for name, one in (EXPERT_LAYOUTS | MORE_EXPERT_LAYOUTS).items()}
ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS | SEQUENCE_LAYOUTS | MORE_SEQUENCE_LAYOUTS | SPARSE | HALVES
WORLD_SIZES = (1, 2, 3, 4, 6, 8)
# Of the layout, for what a model cannot be cut into.
RULES = (*layout.RULES, *pipeline.RULES, *layout.EXPERT_RULES, memory.whole_rows)


def architecture(family: str, **sizes: Any) -> Architecture:
    """Of a tiny model whose tensors are of odd sizes."""
    return FAMILIES[family].architecture(tiny_config(family, **sizes).to_dict())


@cache
def models() -> dict[str, Architecture]:
    return {family: architecture(family) for family in FAMILIES} | {
        "qwen3, tied": architecture("qwen3", tie_word_embeddings=True),
        "qwen3_moe, tied": architecture("qwen3_moe", tie_word_embeddings=True, vocab_size=700),
        "qwen3, a reward model": replace(architecture("qwen3"), num_labels=1),
        "deepseek_v3, no query latent": architecture("deepseek_v3", q_lora_rank=None),
        "deepseek_v3, no sparse layer": architecture("deepseek_v3", first_k_dense_replace=4),
        "glm4_moe, multi-token prediction": replace(architecture("glm4_moe"), mtp_num_layers=1),
        "deepseek_v3, multi-token prediction": replace(architecture("deepseek_v3"), mtp_num_layers=1),
        "qwen3_5_text, tied, multi-token prediction": replace(
            architecture("qwen3_5_text", tie_word_embeddings=True), mtp_num_layers=1
        ),
        "qwen3_moe, no sparse layer": architecture("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]),
    }


def planned(model: Architecture, settings: Settings, world_size: int) -> Case:
    return Case(model=PlannedModel(name="tiny", architecture=model), settings=settings, world_size=world_size,
                machine=MACHINE)  # fmt: skip


def held(cases: Sequence[tuple[Architecture, Settings]]) -> list[dict[str, int]]:
    """On every rank: bytes of the memory that a model and its optimizer hold, by part, of each case; all of them have
    the same groups of ranks."""
    on_host: list[torch.Tensor] = []
    make = adam._like

    def watched(values: torch.Tensor, dtype: torch.dtype, host: bool) -> torch.Tensor:
        made = make(values, dtype, host)
        on_host.extend([made] * host)
        return made

    adam._like = watched
    build(cases[0][1].parallel, seed=0, timeout=60)
    try:
        return [_held(model, settings, on_host) for model, settings in cases]
    finally:
        adam._like = make


def _held(model: Architecture, settings: Settings, on_host: list[torch.Tensor]) -> dict[str, int]:
    on_host.clear()
    chunks = build_model(model, settings)
    optimizer = build_optimizer(chunks, model, settings.optimizer, settings.parallel, settings.precision)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in chunks for buffer in chunk.module.buffers()]
    gradients = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    shards = main_shards(optimizer).values()
    parts = optimizer.chained_optimizers
    scalars = [value for part in parts for where in (part, part.grad_scaler if hasattr(part, "grad_scaler") else None)
               if where is not None for value in vars(where).values() if isinstance(value, torch.Tensor)]  # fmt: skip
    averages = [value for shard in shards for value in shard.state.values()]
    return {
        "num_layers": sum(len(chunk.module.decoder.layers) for chunk in chunks),
        "weights": allocated([*parameters, *buffers]),
        "gradients": allocated(gradients),
        "master_weights": allocated([shard.main for shard in shards], but=[*parameters, *on_host]),
        "optimizer_state": allocated([*averages, *scalars], but=on_host),
        "buffer_padding": allocated([*parameters, *gradients]) - sum(one.nbytes for one in [*parameters, *gradients]),
        "host_state": sum(one.nbytes for one in on_host),
    }


def allocated(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the memory under the tensors, each counted once, but for what other tensors lie in."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}
    others = {tensor.untyped_storage().data_ptr() for tensor in but}
    return sum(size for place, size in storages.items() if place not in others)


def assert_planned(pool, world_size: int, cases: dict[str, tuple[Architecture, Settings]]) -> None:
    wrong = []
    for some in by_groups(cases):
        found = pool.run(world_size, held, list(some.values()))
        for index, (name, (model, settings)) in enumerate(some.items()):
            case = planned(model, settings, world_size)
            for rank in range(world_size):
                state = rank_state(case, rank)
                expected = {part: getattr(state, part) for part in found[rank][index]}
                if expected != found[rank][index]:
                    wrong.append(f"{name}, rank {rank}: planned {expected}, held {found[rank][index]}")
    assert not wrong, "\n".join(wrong[:20])


def by_groups(cases: dict[str, tuple[Architecture, Settings]]) -> list[dict[str, tuple[Architecture, Settings]]]:
    """Those together whose groups of ranks are the same: building them takes longer than building a model."""
    together: dict[tuple[int | None, ...], dict[str, tuple[Architecture, Settings]]] = {}
    for name, (model, settings) in cases.items():
        parallel = settings.parallel
        key = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.virtual_stages,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_size,
        )
        together.setdefault(key, {})[name] = (model, settings)
    return list(together.values())


def of_layouts(world_size: int, *, few: bool) -> dict[str, tuple[Architecture, Settings]]:
    """Every family in every layout of this many ranks, variants in turn, so that each meets many layouts; or as few of
    these as, with those of the other numbers of ranks, hold every family, every layout and every variant."""
    found = _in_every_layout()
    kept = covering([frozenset(zip(("family", "layout", "variant"), names, strict=True)) for names, _ in found])
    return {
        ", ".join(names): case
        for names, case in ([found[place] for place in kept] if few else found)
        if ALL_LAYOUTS[names[1]].world_size == world_size
    }


@cache
def _in_every_layout() -> list[tuple[tuple[str, str, str], tuple[Architecture, Settings]]]:
    unlike: dict[object, tuple[str, str, Architecture, Layout]] = {}
    for name, one in ALL_LAYOUTS.items():
        for family, model in models().items():
            if one.world_size in WORLD_SIZES and not check(one.settings(), model, one.world_size, rules=RULES):
                # How ranks exchange activations changes no weight.
                parallel = one.settings().parallel.model_copy(update={"cp_comm_type": "p2p", "overlap_p2p_comm": True})
                unlike.setdefault(
                    (one.world_size, model, parallel, "moe_grouped_gemm" in one.experts), (family, name, model, one)
                )
    return [
        ((family, name, str(variant)), (model, one.settings(*variant)))
        for (family, name, model, one), variant in zip(unlike.values(), cycle(VARIANTS), strict=False)
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_state_of_every_rank_is_planned_to_the_byte(pool, world_size, request):
    assert_planned(pool, world_size, of_layouts(world_size, few=request.config.getoption("--covering")))


FREEZING: dict[str, dict[str, Any]] = {
    "last": {"freeze_trainable_layers": 1},
    "first": {"freeze_trainable_layers": -1},
    "feed-forward of the last 2": {"freeze_trainable_modules": ["mlp"]},
    "attention and words": {"freeze_trainable_modules": ["self_attn"], "freeze_extra_modules": ["embed_tokens"]},
    "second and fourth, and the norm": {"use_llama_pro": True, "freeze_extra_modules": ["norm"]},
}
FREEZE, LORA = {"finetuning_type": "freeze"}, {"finetuning_type": "lora"}
ADAPTERS: list[dict[str, Any]] = [
    LORA,
    LORA | {"lora_target": ["o_proj", "gate_proj"], "lora_rank": 64, "additional_target": ["norm"]},
]


def of_freezing(world_size: int) -> dict[str, tuple[Architecture, Settings]]:
    """Layouts in turn, each with all that can be frozen; models of four layers, some of them tied."""
    found: dict[str, tuple[Architecture, Settings]] = {}
    names = ("qwen2", "qwen3, tied", "qwen3, a reward model", "deepseek_v3", "qwen3_moe, tied")
    kinds = {family: models()[family] for family in names}
    for (name, one), variant in zip(
        ((name, one) for name, one in ALL_LAYOUTS.items() if one.world_size == world_size),
        cycle(VARIANTS),
        strict=False,
    ):
        for family, model in kinds.items():
            if check(one.settings(), model, world_size, rules=RULES):
                continue
            for selection, values in FREEZING.items():
                trainable = FinetuningSettings(**FREEZE, **values)
                settings = one.settings(*variant).model_copy(update={"finetuning": trainable})
                found[f"{family}, {name}, {selection}, {variant}"] = (model, settings)
    return found


@pytest.mark.extended(4, 2)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_state_of_frozen_models_is_planned_to_the_byte(pool, world_size, request):
    step = {1: 1, 2: 3, 4: 4, 8: 3}[world_size] * (7 if request.config.getoption("--covering") else 1)
    assert_planned(pool, world_size, dict(list(of_freezing(world_size).items())[::step]))


def of_pipelines(world_size: int) -> dict[str, tuple[Architecture, Settings]]:
    """Pipelines whose stages are unlike, with the word embedding on two stages."""
    return {
        f"{family}, {sizes}": (architecture(family, **sizes), one.settings({}, _BF16))
        for family in ("qwen2", "qwen3_moe")
        for num_layers, one in PIPELINES.items()
        for sizes in [{"num_hidden_layers": num_layers, "tie_word_embeddings": True, "vocab_size": 2000}]
        if one.world_size == world_size
    }


@pytest.mark.parametrize("world_size", sorted({one.world_size for one in PIPELINES.values()}))
def test_state_of_uneven_pipelines_is_planned_to_the_byte(pool, world_size):
    assert_planned(pool, world_size, of_pipelines(world_size))


@pytest.mark.parametrize("layout_", [Layout(2), Layout(4, _PP2)], ids=["dp2", "dp2 pp2"])
def test_full_buckets_are_planned_to_the_byte(pool, layout_):
    """So many words that the first stage's gradients go out in two buckets; 24 channels a head leave gaps in one."""
    many = architecture("qwen3", vocab_size=630_001, num_hidden_layers=2)
    overlap = Layout(layout_.world_size, layout_.parallel | {"overlap_grad_reduce": True})
    assert_planned(pool, layout_.world_size, {"many words": (many, overlap.settings({}, _BF16))})


# Of published sizes, few layers of each: what no process here could build.
PUBLISHED = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
              "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 8},
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
              "head_dim": 64, "vocab_size": 151936, "num_hidden_layers": 24, "tie_word_embeddings": True},
    "qwen3_moe": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
                  "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 12, "num_experts": 128,
                  "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    "deepseek_v3": {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
                    "num_key_value_heads": 128, "vocab_size": 129280, "num_hidden_layers": 8, "n_routed_experts": 256,
                    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048,
                    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                    "v_head_dim": 128, "head_dim": 64},
}  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(sorted(PUBLISHED)))
    model = architecture(family, **PUBLISHED[family])
    parallel = {
        "tensor_model_parallel_size": draw(st.sampled_from([1, 2])),
        "pipeline_model_parallel_size": draw(st.sampled_from([1, 2, 4])),
        "virtual_pipeline_model_parallel_size": draw(st.sampled_from([None, 2])),
        "expert_model_parallel_size": draw(st.sampled_from([1, 4])) if model.moe else 1,
        "expert_tensor_parallel_size": draw(st.sampled_from([None, 1])),
        "use_distributed_optimizer": draw(st.booleans()),
        "overlap_grad_reduce": draw(st.booleans()),
        "sequence_parallel": True,
    }
    if parallel["pipeline_model_parallel_size"] == 1:
        parallel["virtual_pipeline_model_parallel_size"] = None
    one = Layout(0, parallel)
    optimizer, precision = draw(st.sampled_from(VARIANTS))
    world_size = one.settings().parallel.smallest_world * draw(st.sampled_from([1, 2, 3, 8]))
    selection = draw(st.sampled_from([{}, *(FREEZE | one for one in FREEZING.values()), *ADAPTERS]))
    trainable = FinetuningSettings(**selection)
    settings = one.settings(optimizer, precision).model_copy(update={"finetuning": trainable})
    return planned(model, settings, world_size)


@hypothesis_settings(max_examples=40, deadline=None, database=None)
@given(cases())
def test_closed_form_is_that_of_the_fullest_rank(case):
    """What it gives is exact but for the optimizer's share, which no rank exceeds and the fullest almost reaches."""
    stages, optimizer = case.settings.parallel.pipeline_model_parallel_size, case.settings.optimizer
    for stage in range(stages):
        closed, size = stage_state(StateConfig.of(case), stage), case.world_size // stages
        exact = [rank_state(case, rank) for rank in range(stage * size, (stage + 1) * size)]
        assert {(one.num_layers, one.weights, one.gradients) for one in exact} == {
            (closed.num_layers, closed.weights, closed.gradients)
        }
        assert all(one.master_weights <= closed.master_weights for one in exact)
        assert all(one.optimizer_state <= closed.optimizer_state for one in exact)
        if not optimizer.optimizer_cpu_offload or optimizer.optimizer_offload_fraction == 1:
            fullest = max(one.master_weights + one.optimizer_state for one in exact)
            assert closed.master_weights + closed.optimizer_state <= fullest * 1.001 + 4096


@pytest.mark.parametrize("family", PUBLISHED)
def test_elements_of_all_stages_are_those_of_the_checkpoint(family):
    model = architecture(family, **(PUBLISHED[family] | {"vocab_size": 128_000, "tie_word_embeddings": False}))
    # The bias that experts are chosen by is in the checkpoint, and no parameter.
    num_biases = sum(model.moe.layers) * model.moe.num_experts * model.moe.expert_bias if model.moe else 0
    expected = num_parameters(model) - num_biases
    case = planned(model, Layout(1).settings(), 1)
    whole = elements_of(StateConfig.of(case), 0)
    assert whole.dense + whole.expert == whole.trained_dense + whole.trained_expert == whole.updated
    assert (
        whole.dense + whole.expert == expected == num_trained_parameters(case.model.architecture, FinetuningSettings())
    )
    settings = Layout(1, _PP4).settings()
    stages = [elements_of(StateConfig.of(planned(model, settings, 8)), stage) for stage in range(4)]
    assert sum(one.dense + one.expert for one in stages) == expected
    assert all(one.updated == (one.dense + one.expert) / 2 for one in stages)
