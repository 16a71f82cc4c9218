"""Whole expert layers against Transformers' in every layout: outputs, every gradient, and auxiliary losses.

The tests add up gradients over ranks as the engine does: over data and context parallelism, over tensor parallelism
where sequence parallelism cuts tokens, and those of experts over the ranks that hold the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layouts import Layout
from moe_cases import (
    FAMILIES,
    FFN,
    NUM_EXPERTS,
    Case,
    Expected,
    Rows,
    architecture,
    expect,
    make_rows,
    reported_of,
)
from torch import Tensor

from megatune.config.groups.parallel import ExpertSettings

TOLERANCE = 1e-5  # relative L2, of gradients; see megatune.verify.results

_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_EP = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "1": Layout(1),
    "dp2": Layout(2),
    "ep2": Layout(2, _EP),
    "ep4": Layout(4, {"expert_model_parallel_size": 4}),
    "ep2 dp4": Layout(4, _EP),
    "tp2 sp etp2": Layout(2, _SP),
    "tp2 sp etp1": Layout(2, _SP | {"expert_tensor_parallel_size": 1}),
    "tp2 sp etp1 ep2": Layout(2, _SP | _EP | {"expert_tensor_parallel_size": 1}),
    "tp2 sp etp2 ep2": Layout(4, _SP | _EP),
    "cp2": Layout(2, {"context_parallel_size": 2}),
    "cp2 tp2 sp etp1 ep4": Layout(
        4, _SP | {"context_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    ),
}
# Of four data-parallel ranks: the last one has a row of padding only.
LENGTHS = ((16, 9), (5, 12), (13, 16), (7, 0))
# Packed: real tokens of documents, and their spans in a row. The last one is padding only.
PACKED_LENGTHS = ((5, 8, 1, 0), (12, 3, 8, 0), (4, 4, 4, 9), (24, 0, 0, 0))
PACKED_SPANS = ((8, 8, 4, 12), (12, 4, 8, 8), (4, 4, 8, 16), (24, 4, 0, 4))


def rows_for(layout: Layout, *, packed: bool = False) -> Rows:
    if packed:
        return make_rows(PACKED_LENGTHS[: layout.dp_size], 32, PACKED_SPANS[: layout.dp_size])
    return make_rows(LENGTHS[: layout.dp_size], 16)


@dataclass
class Measured:
    """Errors of one rank, relative L2: of the outputs and of every gradient; and what it reports."""

    errors: dict[str, float]
    reported: dict[str, float]


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-12))


def build_layer(family: str, case: Case, weights: dict[str, Tensor]) -> tuple[Any, dict[str, tuple[slice, ...]]]:
    """The layer with its part of these weights, and where each part lies in the whole."""
    from megatune.engine import groups
    from megatune.engine.layers.moe.layer import MoELayer
    from megatune.engine.transformer_config import transformer_config

    settings = case.settings
    coords = groups.build(settings.parallel, seed=0, timeout=30)
    layer = MoELayer(transformer_config(architecture(family), settings))
    parts = {name: part_of(name, whole, coords) for name, whole in weights.items()}
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if name in parts:
                tensor.copy_(weights[name][parts[name]])
    assert {name for name, _ in layer.named_parameters()} <= set(parts)
    return layer, parts


def part_of(name: str, whole: Tensor, coords: Any) -> Any:
    """Index of this rank's part of a whole weight."""
    if name.startswith("experts."):
        count, size = NUM_EXPERTS // coords.ep_size, FFN // coords.etp_size
        experts = torch.arange(coords.ep_rank * count, (coords.ep_rank + 1) * count)
        channels = torch.arange(coords.etp_rank * size, (coords.etp_rank + 1) * size)
        if name == "experts.weight1":
            return experts[:, None], torch.cat((channels, channels + FFN))
        return experts[:, None, None], torch.arange(whole.shape[1])[:, None], channels
    if name == "shared_experts.linear_fc1.weight":
        ffn = whole.shape[0] // 2
        size = ffn // coords.tp_size
        channels = torch.arange(coords.tp_rank * size, (coords.tp_rank + 1) * size)
        return torch.cat((channels, channels + ffn))
    if name == "shared_experts.linear_fc2.weight":
        size = whole.shape[1] // coords.tp_size
        return slice(None), slice(coords.tp_rank * size, (coords.tp_rank + 1) * size)
    return ...


def local(whole: Tensor, sequences: Any, cp: int, cp_rank: int, tp: int, tp_rank: int) -> Tensor:
    """This rank's part [s / cp / tp, b, h] of [b, s, h]."""
    from megatune.engine.sequences import local_tokens

    mine = whole[:, local_tokens(sequences.boundaries, cp_rank, cp)]
    return mine.transpose(0, 1).chunk(tp)[tp_rank].contiguous()


def measure(family: str, case: Case, rows: Rows, expected: Expected, loss_scale: float = 1.0) -> Measured:
    """On every rank: forward and backward of the layer, compared with its part of what is expected."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatune.engine import groups
    from megatune.engine.sequences import local_batch

    layer, parts = build_layer(family, case, expected.weights)
    coords = groups.coordinates()
    sequences = local_batch(rows.batches[coords.dp_rank]).sequences
    where = (sequences, coords.cp_size, coords.cp_rank, coords.tp_size, coords.tp_rank)
    hidden = local(rows.hidden[coords.dp_rank], *where).requires_grad_()
    MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), loss_scale))
    output, bias = layer(hidden, padding_mask=sequences)
    assert bias is None
    (output * local(rows.weights[coords.dp_rank], *where)).sum().mul(loss_scale).backward()
    errors = {
        "output": relative(output, local(expected.outputs[coords.dp_rank], *where)),
        "hidden": relative(hidden.grad / loss_scale, local(expected.hidden_gradients[coords.dp_rank], *where)),
    }
    for name, parameter in layer.named_parameters():
        grad = parameter.grad / loss_scale
        if name.startswith("experts."):
            torch.distributed.all_reduce(grad, group=groups.expert_replica_group())
        else:
            torch.distributed.all_reduce(grad, group=groups.replica_group())
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        errors[name] = relative(grad, expected.gradients[name][parts[name]])
    return Measured(errors, reported_of([layer]))


def check(pool: Any, family: str, case: Case, rows: Rows, **arguments: Any) -> None:
    """Every rank agrees with one process."""
    expected = expect(family, rows, ExpertSettings(**case.experts))
    answers = pool.run(case.layout.world_size, measure, family, case, rows, expected, *arguments.values())
    coeffs = case.experts.get("moe_aux_loss_coeff"), case.experts.get("moe_z_loss_coeff")
    reported = {name: value for name, value, coeff in zip(
        ("load_balancing_loss", "z_loss"), (expected.balance, expected.z), coeffs, strict=True) if coeff}  # fmt: skip
    reported["expert_load"] = expected.load
    for answer in answers:
        worst = max(answer.errors, key=lambda name: answer.errors[name])
        assert answer.errors[worst] <= TOLERANCE, (worst, answer.errors)
        assert answer.reported == pytest.approx(reported, rel=1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "dispatcher"), [*((family, "alltoall") for family in FAMILIES), ("qwen2_moe", "allgather")]
)
def test_layers_equal_those_of_transformers(pool, family, dispatcher, layout):
    check(pool, family, Case(LAYOUTS[layout], {"moe_token_dispatcher_type": dispatcher}), rows_for(LAYOUTS[layout]))


@pytest.mark.covering
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("qwen3_moe", layout) for layout in LAYOUTS), ("deepseek_v3", "1"), ("deepseek_v3", "cp2 tp2 sp etp1 ep4")],
)
def test_auxiliary_losses_equal_those_of_one_process(pool, family, layout, kind, packed):
    """Values and gradients, over the real tokens of each micro-batch."""
    experts = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
    check(pool, family, Case(LAYOUTS[layout], experts), rows_for(LAYOUTS[layout], packed=packed))
