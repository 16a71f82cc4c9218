"""Recomputing activations changes no bit, and uneven pipelines compute what even ones do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import LENGTHS, differences, failures
from layouts import EXPERT_LAYOUTS, LAYOUTS, Layout

from megatune.bridge.assemble import assemble
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.settings import Settings
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import Sample, random_samples

Kept = Callable[[str, Layout], list[tuple[float, list[torch.Tensor]]]]

SAMPLES = random_samples(301, LENGTHS)
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTE = {
    "full": FULL,
    "full, uniform, 2 layers": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "full, block, 1 layer": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": SELECTIVE,
    "layernorm": SELECTIVE | {"recompute_modules": ["layernorm"]},
    "mlp": SELECTIVE | {"recompute_modules": ["mlp"]},
    "all": SELECTIVE | {"recompute_modules": ["core_attn", "layernorm", "mlp"]},
}


def gradients(model: Path, settings: Settings, samples: list[Sample]) -> tuple[float, list[torch.Tensor]]:
    """On every rank: the loss, and the gradient of each parameter it holds."""
    assembly = assemble(model, settings)
    loss = measure_loss(
        assembly, shard_samples(samples, assembly.coords, settings.parallel, packed=settings.data.packing)
    )
    parameters = [local.parameter for local in assembly.parameters if local.parameter.requires_grad]
    return loss, [parameter.main_grad.clone() for parameter in parameters]


@pytest.fixture(scope="module")
def kept(pool, model_dir) -> Kept:
    """kept(family, layout): loss and gradients of every rank without recomputation, computed once."""
    made: dict[tuple[str, int], list[tuple[float, list[torch.Tensor]]]] = {}

    def compute(family: str, layout: Layout) -> list[tuple[float, list[torch.Tensor]]]:
        key = (family, id(layout))
        if key not in made:
            made[key] = pool.run(layout.world_size, gradients, model_dir(family), layout.settings(), SAMPLES)
        return made[key]

    return compute


def assert_no_bit_changes(pool, model_dir, kept: Kept, family: str, layout: Layout, recompute: dict[str, Any]) -> None:
    again = layout.settings().model_copy(update={"recompute": RecomputeSettings(**recompute)})
    recomputed = pool.run(layout.world_size, gradients, model_dir(family), again, SAMPLES)
    for (loss, expected), (other_loss, found) in zip(kept(family, layout), recomputed, strict=True):
        assert loss == other_loss
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.extended("core_attn", "layernorm", "mlp")  # "all" has them
@pytest.mark.covering
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2"])
def test_recompute_changes_no_bit(pool, model_dir, kept, layout, recompute):
    assert_no_bit_changes(pool, model_dir, kept, "qwen3", LAYOUTS[layout], RECOMPUTE[recompute])


SPARSE = {
    "moe": SELECTIVE | {"recompute_modules": ["moe"]},
    "moe_layer_recompute": {"moe_layer_recompute": True},
    "moe_act": SELECTIVE | {"recompute_modules": ["moe_act"]},
    "shared_experts": SELECTIVE | {"recompute_modules": ["shared_experts"]},
    "mla_up_proj": SELECTIVE | {"recompute_modules": ["mla_up_proj"]},
    "all": SELECTIVE | {"recompute_modules": ["core_attn", "layernorm", "mlp", "moe_act", "shared_experts",
                                              "mla_up_proj"]},
    "full": FULL,
    "full, block, 1 layer, moe_layer_recompute": FULL | {"recompute_method": "block", "recompute_num_layers": 1,
                                                         "moe_layer_recompute": True},
}  # fmt: skip


BALANCED = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.01}
BALANCED_LAYOUTS = {
    name: replace(EXPERT_LAYOUTS[name], experts=BALANCED) for name in ("ep2 etp1 tp2 sp", "ep2 pp2", "cp2 ep2, packed")
}


@pytest.mark.extended("moe_act", "shared_experts", "mla_up_proj")  # "all" has them
@pytest.mark.covering
@pytest.mark.parametrize("recompute", SPARSE)
@pytest.mark.parametrize("layout", BALANCED_LAYOUTS)
def test_recompute_of_experts_changes_no_bit(pool, model_dir, kept, layout, recompute):
    """With a loss that balances experts: it is not to be counted twice."""
    assert_no_bit_changes(pool, model_dir, kept, "deepseek_v3", BALANCED_LAYOUTS[layout], SPARSE[recompute])


def routings(model: Path, settings: Settings) -> list[int]:
    """How often the router of each layer computes in a step of one micro-batch."""
    from megatune.engine.layers.moe.router import Router

    assembly = assemble(model, settings)
    counts: dict[int, int] = {}

    def count(router: torch.nn.Module, args: Any) -> None:
        counts[router.layer_number] = counts.get(router.layer_number, 0) + 1

    for module in assembly.model[0].modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(count)
    measure_loss(assembly, shard_samples(SAMPLES[:1], assembly.coords, settings.parallel))
    return [counts[layer] for layer in sorted(counts)]


@pytest.mark.parametrize(("moe", "expected"), [(False, [2, 1, 1, 1]), (True, [2, 2, 2, 2])])
def test_experts_of_layers_that_blocks_keep_are_recomputed_if_asked_for(pool, model_dir, moe, expected):
    recompute = FULL | {"recompute_method": "block", "recompute_num_layers": 1, "moe_layer_recompute": moe}
    settings = Layout(1, recompute=recompute).settings()
    assert pool.run(1, routings, model_dir("mixtral", num_hidden_layers=4), settings) == [expected]


_PP2, _PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
PIPELINES = {
    "7 layers on pp2": (7, Layout(2, _PP2)),
    "7 layers on pp2 vpp2": (7, Layout(2, _PP2 | {"virtual_pipeline_model_parallel_size": 2})),
    "pp2 vpp3": (6, Layout(2, _PP2 | {"virtual_pipeline_model_parallel_size": 3})),
    "5 layers on pp4": (5, Layout(4, _PP4)),
    "first 1": (4, Layout(2, _PP2 | {"decoder_first_pipeline_num_layers": 1})),
    "last 1 of pp4": (7, Layout(4, _PP4 | {"decoder_last_pipeline_num_layers": 1})),
    "embedding and loss counted": (6, Layout(4, _PP4 | {"account_for_embedding_in_pipeline_split": True,
                                                        "account_for_loss_in_pipeline_split": True})),
    "explicit layout": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Ettt|tL"})),
    "explicit layout, virtual": (6, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Et|tt|tt|tL"})),
    "embedding alone": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "E|t*4L"})),
    "loss alone": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Et*4|L"})),
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize(
    ("pipeline", "tied"),
    [*((name, False) for name in PIPELINES), ("7 layers on pp2 vpp2", True), ("embedding alone", True),
     ("loss alone", True)],
)  # fmt: skip
def test_every_pipeline_shape_agrees_with_transformers(pool, model_dir, reference, table, tmp_path, pipeline, tied):
    num_layers, layout = PIPELINES[pipeline]
    model = model_dir("qwen3", tied=tied, num_hidden_layers=num_layers)
    found = differences(pool, model, layout, SAMPLES, reference(model, SAMPLES), tmp_path)
    assert not failures(found)
    table.add(f"qwen3, {'tied' if tied else 'untied'}", pipeline, found)
