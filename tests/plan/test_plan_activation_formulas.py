"""Activations by hand: published formulas, kernels, schedules, and what is frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from activation_cases import (
    DENSE,
    EP2,
    FULL,
    LATENT,
    PP4,
    SHARED,
    SP,
    SPARSE,
    VPP2,
    activation_bytes,
    architecture,
    machine,
)
from hypothesis import given
from hypothesis import strategies as st
from layouts import Layout

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import BatchSettings, DataSettings
from megatune.plan.case import Case, PlannedModel
from megatune.plan.machine import Calibration
from megatune.plan.memory.activations import layer_memory
from megatune.plan.memory.estimate import COMMUNICATOR, CONTEXT, num_communicators, workspace_bytes
from megatune.plan.operators.experts import expert_rows
from megatune.plan.operators.operator import Memory, chain, recomputed, repeat
from megatune.plan.operators.shapes import expert_imbalance, shapes_of
from megatune.plan.schedule import in_flight

LENGTH = 1024
MHA = architecture(num_query_groups=8)


def make_case(
    model: Architecture = DENSE,
    layout: Layout | None = None,
    *,
    generation: str = "ampere",
    micro_batches: int = 1,
    bf16: bool = True,
    length: int = LENGTH,
    trainable: FinetuningSettings | None = None,
    **case: Any,
) -> Case:
    layout = layout or Layout(1)
    update = {
        "batch": BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=micro_batches),
        "data": DataSettings(cutoff_len=length, packing=layout.packed),
        "finetuning": trainable or FinetuningSettings(),
    }
    return Case(
        **{
            "model": PlannedModel(name="x", architecture=model),
            "settings": layout.settings(precision={"bf16": bf16}).model_copy(update=update),
            "world_size": layout.world_size,
            "machine": machine(generation),
            **case,
        }
    )


def test_a_chain_is_fullest_where_what_was_kept_and_what_is_added_are_most():
    one, other = Memory(10, 5, 40), Memory(20, 1, 8)
    assert chain((one, other)) == Memory(30, 1, 20)
    assert chain((one, other), hold=3) == Memory(30, 1, 23)
    assert recomputed(one, 4, output=2) == Memory(4, 5, 10 - 4 + 40 + 2)


@given(st.lists(st.tuples(*[st.integers(0, 99)] * 3), min_size=1, max_size=4), st.integers(1, 5))
def test_chains_of_chains_are_chains(numbers, times):
    operators = [Memory(*one) for one in numbers]
    whole = chain(operators)
    assert chain((chain(operators[:1]), chain(operators[1:]))) == whole if len(operators) > 1 else True
    assert chain([repeat(whole, times)]) == chain(operators * times)


@pytest.mark.parametrize(
    ("parallel", "cut", "whole"),
    [
        # Korthikanti et al. (arXiv:2205.05198), table 2, of a layer with dropout, GELU, and scores in memory:
        # s·b·h (34 + 5 a s / h); with tensor parallelism s·b·h (10 + 24 / t + 5 a s / (h t)); with sequence
        # parallelism all of it divided by t. Of the 34, 11 are attention's (1 a mask), 19 the feed-forward's (1 a
        # mask), 4 the norms'. Without masks and scores, attention's are 10. SwiGLU's feed-forward keeps its input and
        # 3 · f where theirs keeps 2 and 16 · h.
        ({}, 10 - 2, 2 + 2 + 4),
        ({"tensor_model_parallel_size": 4}, 10 - 2, 2 + 2 + 4),
        ({"tensor_model_parallel_size": 4} | SP, 10 - 2 + 2 + 2 + 4, 0),
    ],
)
def test_a_layer_keeps_what_the_published_formula_says(parallel, cut, whole):
    layout = Layout(4, parallel, performance={"bias_activation_fusion": True})
    shapes = shapes_of(make_case(MHA, layout))
    tp = layout.settings().parallel.tensor_model_parallel_size
    sbh, inner = LENGTH * MHA.hidden_size, 2 * 3 * LENGTH * MHA.ffn_hidden_size
    statistics = 2 * 4 * shapes.sp_tokens + 4 * LENGTH * MHA.num_attention_heads // tp
    assert layer_memory(shapes, False, ()).kept == sbh * cut // tp + sbh * whole + inner // tp + statistics


def test_full_recomputation_keeps_the_inputs_of_groups():
    hidden = 2 * LENGTH * DENSE.hidden_size

    def stage(micro_batches: int, **recompute: Any) -> int:
        layout = Layout(4, PP4, recompute=FULL | recompute)
        deep = replace(DENSE, num_layers=16)
        return activation_bytes(make_case(deep, layout, micro_batches=micro_batches), 1).activations

    tables = 2 * 2 * LENGTH * DENSE.kv_channels + 33 * LENGTH
    # A second micro-batch in flight adds what one keeps.
    assert stage(2) - stage(1) == 4 * hidden + tables
    assert stage(2, recompute_num_layers=2) - stage(1, recompute_num_layers=2) == 2 * hidden + tables
    assert stage(2, recompute_num_layers=2) > stage(2)  # of a group of two, both layers are made again


def test_layers_that_block_keeps_recompute_their_experts_where_asked_for():
    def added(stage: int, **recompute: Any) -> int:
        layout = Layout(2, {"pipeline_model_parallel_size": 2}, recompute=recompute)
        one, two = (activation_bytes(make_case(SPARSE, layout, micro_batches=m), stage).activations for m in (1, 2))
        return two - one

    shapes = shapes_of(make_case(SPARSE))
    kept, without = (layer_memory(shapes, True, modules).kept for modules in ((), ("moe",)))
    block = FULL | {"recompute_method": "block", "recompute_num_layers": 1}
    # Of two layers of the first stage, which holds both micro-batches, the second one keeps its activations.
    assert added(0, **block) - added(0, **block, moe_layer_recompute=True) == kept - without > 0
    # Where no layer is kept there is nothing left to recompute.
    for whole in (FULL, FULL | {"recompute_method": "block"}):
        assert added(0, **whole) == added(0, **whole, moe_layer_recompute=True)


@pytest.mark.parametrize("vpp", [{}, VPP2])
def test_stages_hold_what_the_schedule_has_in_flight(vpp):
    layout, virtual = Layout(4, PP4 | vpp), 2 if vpp else 1
    model = replace(DENSE, num_layers=16)
    one = layer_memory(shapes_of(make_case(model, layout)), False, ()).kept * 4 // virtual
    for stage in (1, 2):
        more, fewer = (activation_bytes(make_case(model, layout, micro_batches=m), stage) for m in (16, 4))
        held = [sum(in_flight(4, virtual, stage, m)) for m in (16, 4)]
        tables = 2 * 2 * LENGTH * DENSE.kv_channels + 33 * LENGTH
        assert more.activations - fewer.activations == (held[0] - held[1]) * (one + tables)


@pytest.mark.parametrize(
    ("generation", "performance", "kernel", "latent"),
    [
        ("cpu", {}, "fused", "padded"),
        ("ampere", {}, "fused", "padded"),
        ("hopper", {}, "fused", "padded"),
        ("blackwell", {"attention_backend": "fused"}, "fused", "fused"),
        ("volta", {}, "math", "padded"),
        ("ampere", {"attention_backend": "unfused"}, "plain", "plain"),
    ],
)
def test_memory_is_that_of_the_kernel_which_the_engine_chooses(generation, performance, kernel, latent):
    layout = Layout(1, performance=performance)
    assert shapes_of(make_case(DENSE, layout, generation=generation)).kernel == kernel
    assert shapes_of(make_case(LATENT, layout, generation=generation)).kernel == latent
    packed = "plain" if kernel in ("math", "plain") else "varlen"
    assert shapes_of(make_case(LATENT, replace(layout, packed=True), generation=generation)).kernel == packed


def test_the_fused_loss_holds_a_chunk_of_logits():
    model = replace(DENSE, vocab_size=128 * 1024)
    fused = activation_bytes(make_case(model, length=16384), 0).logits_and_loss
    whole = activation_bytes(
        make_case(model, Layout(1, performance={"cross_entropy_loss_fusion": False}), length=16384), 0
    ).logits_and_loss
    logits = 16384 * model.vocab_size
    # bf16 logits and their fp32 softmax; two bf16 tensors of a chunk that would be 1 GiB in fp32.
    assert 5.9 * logits < whole < 6.1 * logits
    assert 0.95 * 2**30 < fused < 1.05 * 2**30


def test_expert_imbalance_is_of_routed_rows_and_bounded_by_capacity():
    def imbalance(**experts: Any) -> int:
        return activation_bytes(make_case(SPARSE, Layout(2, EP2, experts)), 0).expert_imbalance

    assert activation_bytes(make_case(SPARSE), 0).expert_imbalance == 0
    assert 0 < imbalance(moe_aux_loss_coeff=1e-3) < imbalance()
    assert imbalance(moe_expert_capacity_factor=1.0) == 0
    assert imbalance(moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True) == 0
    shapes = shapes_of(make_case(SPARSE, Layout(2, EP2)))
    for factor, rows_ in ((1.0, 2 * LENGTH), (1.2, 2458), (1.5, 3 * LENGTH), (9.0, 4096)):
        assert expert_rows(replace(shapes, imbalance=factor)) == rows_
    # No rank has more rows than all of them have; one rank that has all experts has just those of its tokens.
    assert expert_rows(replace(shapes, ep=1, imbalance=1.2)) == 2 * LENGTH


@pytest.mark.parametrize(
    ("ep", "experts", "factor"),
    [
        (1, {}, 1.0),
        # 16 of 128 experts: 0.5 · √(1 / 8) · √(2 · ln 16); 0.2 with a loss that counts, a bias, or Sinkhorn.
        (16, {}, 1.416),
        (16, {"moe_aux_loss_coeff": 1e-3}, 1.167),
        (16, {"moe_router_load_balancing_type": "sinkhorn"}, 1.167),
        (16, {"moe_router_bias_update_rate": 1e-3}, 1.167),
        (16, {"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "none"}, 1.416),
        (16, {"moe_expert_capacity_factor": 1.1}, 1.1),
        (16, {"moe_expert_capacity_factor": 2.0}, 1.416),
        # Padded rows are computed, too, wherever the experts are.
        (1, {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}, 1.5),
    ],
)
def test_the_fullest_expert_rank_is_one_assumption_of_memory_and_of_time(ep, experts, factor):
    model = replace(SPARSE, moe=replace(SPARSE.moe, num_experts=128))
    case = make_case(model, Layout(ep, {"expert_model_parallel_size": ep}, experts))
    assert expert_imbalance(case.settings, model.moe) == pytest.approx(factor, abs=1e-3)
    assert shapes_of(case).imbalance == expert_imbalance(case.settings, model.moe)


def test_adapters_keep_the_inputs_of_their_layers_only():
    def kept(trainable: FinetuningSettings, model: Architecture = DENSE) -> int:
        return layer_memory(shapes_of(make_case(model, trainable=trainable)), model.moe is not None, ()).kept

    frozen = kept(FinetuningSettings(freeze_language_model=True))
    hidden, inner = 2 * LENGTH * DENSE.hidden_size, 2 * LENGTH * DENSE.ffn_hidden_size
    width, ffn, heads = DENSE.hidden_size, DENSE.ffn_hidden_size, DENSE.query_size
    mixed = heads + 2 * DENSE.key_value_size

    def of_adapter(latent: int, inputs: int, outputs: int) -> int:
        """Of the latent, and of A and B in the model's dtype."""
        return 2 * latent * (LENGTH + inputs + outputs)

    for targets, more in {
        "linear_qkv": hidden + of_adapter(3 * 8, width, mixed),
        # One matrix of three: B is as long as all of them.
        "q_proj": hidden + of_adapter(8, width, mixed),
        "linear_proj": of_adapter(8, heads, width),  # attention keeps the context anyway
        "linear_fc1": hidden + of_adapter(2 * 8, width, 2 * ffn),
        "up_proj": hidden + of_adapter(8, width, 2 * ffn),
        "linear_fc2": inner + of_adapter(8, ffn, width),
    }.items():
        assert kept(FinetuningSettings(finetuning_type="lora", lora_target=[targets])) == frozen + more
    assert kept(FinetuningSettings()) == frozen + 2 * hidden + inner
    assert kept(FinetuningSettings(finetuning_type="lora"), SHARED) < kept(FinetuningSettings(), SHARED) * 1.1


def test_workspace_counts_groups_and_takes_the_calibration():
    layout = Layout(16, {"tensor_model_parallel_size": 2, "context_parallel_size": 2} | PP4 | SP)
    case = make_case(DENSE, layout, micro_batches=8)
    # tp, cp, pp, the replicas of a weight (its cp ranks), a model's ranks, and all ranks.
    assert num_communicators(case) == 6
    assert num_communicators(make_case(DENSE)) == 0
    sparse = make_case(SPARSE, Layout(4, EP2), generation="hopper")
    assert num_communicators(sparse) == 5  # replicas of weights, of experts; ep, twice; all ranks
    hidden = 2 * LENGTH // 2 * DENSE.hidden_size
    # What the sequence is gathered into, and one message to the stage before.
    assert workspace_bytes(case, 0).communication == 6 * COMMUNICATOR + hidden
    assert workspace_bytes(case, 1).communication == 6 * COMMUNICATOR + hidden + hidden // 2
    calibrated = replace(case, machine=replace(case.machine, calibration=Calibration(activations=1.5, framework=7)))
    assert workspace_bytes(calibrated, 0).framework == CONTEXT + 7
    bare, more = activation_bytes(case, 3), activation_bytes(calibrated, 3)
    assert more.activations == round(1.5 * bare.activations)
    assert more.logits_and_loss == round(1.5 * bare.logits_and_loss)
