"""What settings of experts change, and what they must not."""

from __future__ import annotations

import copy

import pytest
import torch
from moe_cases import (
    HIDDEN,
    NUM_EXPERTS,
    Case,
    Rows,
    engine_weights,
    make_rows,
    reported_of,
    transformers_block,
)
from test_moe_layer import LAYOUTS, build_layer, check, local, relative, rows_for

_LOSSES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
VARIANTS = {
    "loop": Case(LAYOUTS["1"], {"moe_grouped_gemm": False}),
    "older name": Case(LAYOUTS["1"], {"moe_token_dispatcher_type": "alltoall_seq"}),
    "fp64 router": Case(LAYOUTS["1"], {"moe_router_dtype": "fp64"}),
    "shared expert overlap": Case(LAYOUTS["1"], {"moe_shared_expert_overlap": True}),
    "fused": Case(LAYOUTS["1"], {}, {}, {"bias_activation_fusion": True}),
    **{
        f"recompute {module}": Case(
            LAYOUTS["1"], {}, {"recompute_granularity": "selective", "recompute_modules": [module]}
        )
        for module in ("moe", "moe_act", "shared_experts")
    },
}


@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), [("qwen2_moe", "tp2 sp etp2 ep2"), ("deepseek_v3", "tp2 sp etp1 ep2")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_speed_and_memory_change_no_number(pool, variant, family, layout):
    chosen = VARIANTS[variant]
    case = Case(LAYOUTS[layout], chosen.experts | _LOSSES, chosen.recompute, chosen.performance)
    check(pool, family, case, rows_for(LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["1", "tp2 sp etp1 ep2"])
def test_auxiliary_losses_follow_the_loss_scale_of_fp16(pool, layout):
    check(pool, "qwen3_moe", Case(LAYOUTS[layout], _LOSSES), rows_for(LAYOUTS[layout]), loss_scale=64.0)


def evaluate(family: str, case: Case, rows: Rows, weights: dict[str, torch.Tensor]) -> list[bool]:
    """On every rank: that neither evaluation mode nor a pass without gradients changes state or attaches a loss."""
    from megatune.engine import groups
    from megatune.engine.sequences import local_batch

    layer, _ = build_layer(family, case, weights)
    coords = groups.coordinates()
    sequences = local_batch(rows.batches[coords.dp_rank]).sequences
    where = (sequences, coords.cp_size, coords.cp_rank, coords.tp_size, coords.tp_rank)
    hidden = local(rows.hidden[coords.dp_rank], *where).requires_grad_()
    before = copy.deepcopy(dict(layer.named_buffers()))
    with torch.no_grad():
        first = layer(hidden, padding_mask=sequences)[0]
    layer.eval()
    second = layer(hidden, padding_mask=sequences)[0]
    # With the outputs' gradient zero, that of the router would be the auxiliary losses'.
    second.backward(torch.zeros_like(second))
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in layer.named_buffers())
    return [unchanged, torch.equal(first, second), not layer.router.weight.grad.count_nonzero()]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_evaluation_changes_nothing(pool, family):
    case, rows = Case(LAYOUTS["tp2 sp etp1 ep2"], _LOSSES), rows_for(LAYOUTS["tp2 sp etp1 ep2"])
    weights = engine_weights(transformers_block(family).state_dict())
    assert pool.run(2, evaluate, family, case, rows, weights) == [[True] * 3] * 2


def sinkhorn_outputs(case: Case, rows: Rows, weights: dict[str, torch.Tensor]) -> list[bool]:
    """Whether training chooses other experts than evaluation, and if their shares still sum to 1."""
    from megatune.engine.sequences import local_batch

    layer, _ = build_layer("qwen3_moe", case, weights)
    sequences, hidden = local_batch(rows.batches[0]).sequences, rows.hidden[0].transpose(0, 1).contiguous()
    trained, evaluated = layer.router(hidden, sequences), layer.eval().router(hidden, sequences)
    sums = trained[0].sum(-1)
    return [not torch.equal(trained[1], evaluated[1]), torch.allclose(sums, torch.ones_like(sums))]


def test_sinkhorn_balances_choices_in_training_only(pool):
    weights = engine_weights(transformers_block("qwen3_moe").state_dict())
    case = Case(LAYOUTS["1"], {"moe_router_load_balancing_type": "sinkhorn"})
    assert pool.run(1, sinkhorn_outputs, case, rows_for(LAYOUTS["1"]), weights) == [[True, True]]


def with_capacity(case: Case, rows: Rows, lengths: tuple[int, ...]) -> dict[str, float]:
    """On every rank: errors of outputs and their gradient against each kept choice computed by itself.

    Args:
        lengths: tokens of the rows of each data-parallel rank, which may differ.
    """
    from megatune.engine import groups
    from megatune.engine.layers.moe import router
    from megatune.engine.layers.moe.router import _of_this_rank
    from megatune.engine.sequences import local_batch

    block = transformers_block("qwen3_moe")
    layer, _ = build_layer("qwen3_moe", case, engine_weights(block.state_dict()))
    coords = groups.coordinates()
    sequences = local_batch(rows.batches[coords.dp_rank]).sequences
    where = (sequences, coords.cp_size, coords.cp_rank, coords.tp_size, coords.tp_rank)
    length = lengths[coords.dp_rank] // coords.tp_size
    hidden = local(rows.hidden[coords.dp_rank], *where).requires_grad_()
    assert hidden.shape[0] == length
    output, _ = layer(hidden, padding_mask=sequences)
    weights = local(rows.weights[coords.dp_rank], *where)
    (grad,) = torch.autograd.grad((output * weights).sum(), hidden)

    flat = hidden.reshape(-1, HIDDEN)
    _, probs, experts = block.gate(flat)
    factor = case.experts.get("moe_expert_capacity_factor")
    if factor is not None:
        most = router.capacity(len(flat), experts.shape[1], NUM_EXPERTS, factor)
        experts = router.drop(
            experts, probs, _of_this_rank(~sequences.is_padding.t(), coords.tp_size > 1), NUM_EXPERTS, most
        )
    parts = []
    for token, choices, shares in zip(flat, experts.tolist(), probs, strict=True):
        part = torch.zeros(HIDDEN)
        for expert, part_share in zip(choices, shares, strict=True):
            if expert < NUM_EXPERTS:
                gate, up = block.experts.gate_up_proj[expert].matmul(token).chunk(2)
                part = part + part_share * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        parts.append(part)
    expected = torch.stack(parts).view_as(output)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), hidden)
    return {"output": relative(output, expected), "hidden": relative(grad, expected_grad)}


@pytest.mark.covering
@pytest.mark.parametrize("pads", [False, True], ids=["", "pads"])
@pytest.mark.parametrize("factor", [0.6, 8.0])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["1", "ep2", "tp2 sp etp1 ep2", "tp2 sp etp2"])
def test_experts_with_a_capacity_compute_what_they_keep(pool, layout, dispatcher, factor, pads):
    experts = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_expert_capacity_factor": factor,
        "moe_pad_expert_input_to_capacity": pads,
    }
    chosen = LAYOUTS[layout]
    answers = pool.run(
        chosen.world_size, with_capacity, Case(chosen, experts), rows_for(chosen), (16,) * chosen.dp_size
    )
    assert all(error <= 1e-5 for answer in answers for error in answer.values()), answers


def of_different_lengths(case: Case, each: list[Rows], lengths: tuple[int, ...]) -> dict[str, float]:
    """On every rank: `with_capacity` with rows of the data-parallel rank's own."""
    mine = each[torch.distributed.get_rank() // case.settings.parallel.tensor_model_parallel_size]
    shape = (len(each), -1, -1, -1)
    return with_capacity(
        case, Rows(mine.hidden.expand(shape), mine.weights.expand(shape), mine.batches * len(each)), lengths
    )


@pytest.mark.extended("ep2")
@pytest.mark.parametrize("experts", [{}, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}],
                         ids=["", "capacity"])  # fmt: skip
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["ep2", "tp2 sp etp2 ep2"])
def test_ranks_may_hold_rows_of_different_lengths(pool, layout, dispatcher, experts):
    """Data-parallel ranks pad their micro-batches to the longest row of their own."""
    lengths = (16, 10)
    case = Case(LAYOUTS[layout], {"moe_token_dispatcher_type": dispatcher, **experts})
    each = [make_rows([(length, 7)], length) for length in lengths]
    answers = pool.run(case.layout.world_size, of_different_lengths, case, each, lengths)
    assert all(error <= 1e-5 for answer in answers for error in answer.values()), answers


def count_choices(case: Case, rows: Rows, weights: dict[str, torch.Tensor]) -> tuple[list[str], float, list[int]]:
    from megatune.engine.sequences import local_batch

    layer, _ = build_layer("deepseek_v3", case, weights)
    bias = layer.router.expert_bias.clone()
    layer.to(torch.bfloat16)
    hidden = rows.hidden[0].transpose(0, 1).contiguous().bfloat16().requires_grad_()
    layer(hidden, padding_mask=local_batch(rows.batches[0]).sequences)
    dtypes = [str(layer.router.weight.dtype), str(layer.router.expert_bias.dtype)]
    return dtypes, float((layer.router.expert_bias - bias).abs().max()), layer.router.local_tokens_per_expert.tolist()


def test_bias_stays_in_fp32_and_choices_of_real_tokens_are_counted(pool):
    rows = rows_for(LAYOUTS["1"])
    weights = engine_weights(transformers_block("deepseek_v3").state_dict())
    ((dtypes, moved, counts),) = pool.run(1, count_choices, Case(LAYOUTS["1"]), rows, weights)
    assert (dtypes, moved) == (["torch.bfloat16", "torch.float32"], 0.0)
    assert sum(counts) == 3 * sum(rows.batches[0].lengths)


def packed_and_not(case: Case, weights: dict[str, torch.Tensor]) -> list[bool]:
    """Whether three documents give the same gradients in one row as in three, and the same auxiliary losses."""
    from megatune.engine.sequences import local_batch

    layer, _ = build_layer("qwen3_moe", case, weights)
    lengths, found = (5, 8, 4), []
    hidden = torch.randn(3, 8, HIDDEN, generator=torch.Generator().manual_seed(5))
    for rows in (make_rows([lengths], 24, [(8, 8, 8)]), make_rows([lengths], 8)):
        mine = hidden.reshape(-1, *rows.hidden.shape[2:]).transpose(0, 1).contiguous().requires_grad_()
        output, _ = layer(mine, padding_mask=local_batch(rows.batches[0]).sequences)
        # The auxiliary losses alone.
        output.backward(torch.zeros_like(output))
        reported = reported_of([layer])
        found.append((mine.grad.transpose(0, 1).reshape(hidden.shape), layer.router.weight.grad.clone(), reported))
        layer.zero_grad()
    (packed, of_packed, reported_packed), (rows, of_rows, reported_rows) = found
    assert of_rows.norm() > 1e-3
    return [
        relative(packed, rows) < 1e-6,
        relative(of_packed, of_rows) < 1e-6,
        reported_packed == pytest.approx(reported_rows),
    ]


def test_seq_aux_loss_does_not_depend_on_packing(pool):
    weights = engine_weights(transformers_block("qwen3_moe").state_dict())
    assert pool.run(1, packed_and_not, Case(LAYOUTS["1"], _LOSSES), weights) == [[True] * 3]


def count_passes(case: Case, rows: Rows, weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """How often the parts of the layer are computed in a forward and a backward pass."""
    from megatune.engine.sequences import local_batch

    layer, _ = build_layer("deepseek_v3", case, weights)
    passes = dict.fromkeys(("router", "shared_experts"), 0)

    def count(name: str) -> None:
        passes[name] += 1

    for name in passes:
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: count(name))
    hidden = rows.hidden[0].transpose(0, 1).contiguous().requires_grad_()
    layer(hidden, padding_mask=local_batch(rows.batches[0]).sequences)[0].sum().backward()
    return passes


@pytest.mark.parametrize(
    ("variant", "expected"), [("loop", (1, 1)), ("recompute moe", (2, 2)), ("recompute shared_experts", (1, 2))]
)
def test_what_is_recomputed_is_computed_twice(pool, variant, expected):
    weights = engine_weights(transformers_block("deepseek_v3").state_dict())
    (passes,) = pool.run(1, count_passes, VARIANTS[variant], rows_for(LAYOUTS["1"]), weights)
    assert tuple(passes.values()) == expected
