"""Recomputing activations changes no bit, and uneven pipelines compute what even ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import LAYOUTS, Layout
from test_parity import failures

from megatune.bridge.assemble import assemble
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.settings import Settings
from megatune.verify.compare import compare, judge
from megatune.verify.measure import deal, measure, measure_loss
from megatune.verify.numbers import Numbers
from megatune.verify.reference import write_reference
from megatune.verify.samples import Sample, random_samples

LENGTHS = (17, 5, 30, 12, 9, 25, 21, 8)

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
    loss = measure_loss(assembly, deal(samples, assembly.place, settings.parallel))
    return loss, [local.parameter.main_grad.clone() for local in assembly.parameters]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2"])
def test_recompute_changes_no_bit(pool, model_dir, layout, recompute):
    model, samples = model_dir("qwen3"), random_samples(301, LENGTHS)
    settings = LAYOUTS[layout].settings()
    again = settings.model_copy(update={"recompute": RecomputeSettings(**RECOMPUTE[recompute])})
    kept = pool.run(LAYOUTS[layout].world_size, gradients, model, settings, samples)
    recomputed = pool.run(LAYOUTS[layout].world_size, gradients, model, again, samples)
    for (loss, expected), (other_loss, found) in zip(kept, recomputed, strict=True):
        assert loss == other_loss
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


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
    "written out": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Ettt|tL"})),
    "written out, virtual": (6, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Et|tt|tt|tL"})),
    "embedding alone": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "E|t*4L"})),
    "loss alone": (4, Layout(2, _PP2 | {"pipeline_model_parallel_layout": "Et*4|L"})),
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_shape_agrees_with_transformers(pool, model_dir, tmp_path, pipeline, tied):
    num_layers, layout = PIPELINES[pipeline]
    model = model_dir("qwen3", tied=tied, num_hidden_layers=num_layers)
    samples = random_samples(301, LENGTHS)
    write_reference(model, samples, tmp_path / "reference")
    (tmp_path / "layout").mkdir()
    pool.run(layout.world_size, measure_shape, model, layout.settings(), samples, tmp_path / "layout")
    assert not failures(judge(compare(Numbers(tmp_path / "layout"), Numbers(tmp_path / "reference"))))


def measure_shape(model: Path, settings: Settings, samples: list[Sample], folder: Path) -> None:
    """On every rank."""
    measure(assemble(model, settings), samples, settings.parallel, folder)
