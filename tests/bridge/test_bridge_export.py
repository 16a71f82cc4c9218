"""Weights as a stream: names and values are the checkpoint's, in one order, in every layout, one weight at a time."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from bridging import assert_same_bits, tensors
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS
from live_bytes import LiveBytes
from torch import Tensor

from megatune.bridge import export as module
from megatune.bridge.assemble import load_model
from megatune.bridge.export import export_weights
from megatune.config.settings import Settings
from megatune.engine.groups import build

ALL = {**LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}


def export(model: Path, settings: Settings, ranks: list[int] | None, trained: bool) -> list[tuple[str, Tensor]]:
    """On every rank: what the stream gave it, in its order."""
    coords = build(settings.parallel, seed=0, timeout=30)
    return list(export_weights(load_model(model, settings, coords, trained=trained), ranks))


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "tied", "layout", "ranks"),
    [
        ("qwen3", True, "1", None),
        ("qwen3", True, "tp2 sp", None),
        ("llama", False, "tp2 pp2 vpp2", [0]),
        ("qwen2", True, "tp2 pp2 dp2 sp", [0, 4]),
        ("qwen3", True, "pp2", [1]),
        ("qwen3_moe", False, "ep2", None),
        ("qwen2_moe", False, "ep2 etp2 tp2 sp", [3]),
        ("deepseek_v3", False, "ep2 etp1 tp2 sp pp2 dp2", None),
        ("mixtral", False, "ep2 pp2 vpp2", [0, 2]),
    ],
)
def test_the_stream_is_the_checkpoint(pool, model_dir, family, tied, layout, ranks):
    model = model_dir(family, tied=tied)
    found = pool.run(ALL[layout].world_size, export, model, ALL[layout].settings(), ranks, False)
    (alone,) = pool.run(1, export, model, ALL["1"].settings(), None, True)
    for rank, pairs in enumerate(found):
        if ranks is not None and rank not in ranks:
            assert pairs == []
            continue
        assert_same_bits(dict(pairs), tensors(model))
        assert [name for name, _ in pairs] == [name for name, _ in alone]
    assert len(alone) == len(dict(alone))


@pytest.mark.parametrize("ranks", [None, [1]])
def test_experts_come_one_by_one_and_layers_in_order(pool, model_dir, ranks):
    settings = ALL["ep2"].settings(precision={"bf16": True})
    _, pairs = pool.run(2, export, model_dir("deepseek_v3"), settings, ranks, True)
    names = [name for name, _ in pairs]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    experts = [name for name in names if name.startswith("model.layers.1.mlp.experts.") and "down_proj" in name]
    assert experts == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(8)]
    # As saved: in the dtype of the parameter.
    assert {tensor.dtype for name, tensor in pairs if "bias" not in name} == {torch.bfloat16}
    assert dict(pairs)["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def export_bytes(model: Path, settings: Settings, ranks: list[int] | None) -> tuple[int, int]:
    """On every rank: the most bytes that exporting has at a time, and bytes of the largest weight; an expert alone is
    as large as what is sent together."""
    coords = build(settings.parallel, seed=0, timeout=30)
    loaded = load_model(model, settings, coords)
    largest = 0
    with LiveBytes() as found, mock.patch.object(module, "_MAX_BYTES", 1):
        for _, tensor in export_weights(loaded, ranks):
            largest = max(largest, tensor.nbytes)
    return found.peak, largest


def count_broadcasts(model: Path, settings: Settings) -> tuple[int, int]:
    """On every rank: broadcasts of an export, and tensors that it gave."""
    coords = build(settings.parallel, seed=0, timeout=30)
    loaded = load_model(model, settings, coords, trained=False)
    with mock.patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as sent:
        pairs = list(export_weights(loaded))
    return sent.call_count, len(pairs)


def test_what_a_rank_has_of_a_weight_is_sent_at_once(pool, model_dir):
    """Gate and up of four experts each of two ranks are 2 broadcasts a layer instead of 16, down 2 instead of 8."""
    model = model_dir("qwen3_moe", moe_intermediate_size=40, num_hidden_layers=6)
    # A layer has 6 more weights, and its router, or two matrices where it has no experts; 3 weights are in no layer.
    for count, tensors_given in pool.run(2, count_broadcasts, model, ALL["ep2"].settings()):
        assert count == 3 * (2 + 2 + 7) + 3 * (2 + 6) + 3
        assert tensors_given == len(tensors(model))


@pytest.mark.parametrize(("layout", "ranks"), [("ep2 etp1 tp2 sp pp2 dp2", None), ("ep2 pp2", [0]), ("tp2 sp", None)])
def test_no_rank_holds_more_than_a_weight_twice(pool, model_dir, layout, ranks):
    """Queries, keys and values are one weight; so are gate and up, of experts one expert's."""
    model = model_dir("qwen3_moe", moe_intermediate_size=40, num_hidden_layers=6)
    sizes = sorted(tensor.nbytes for tensor in tensors(model).values())
    # The output layer is the largest, with its padding.
    most = 2 * sizes[-1] * 384 / 301
    assert most < sum(sizes) / 4
    found = pool.run(ALL[layout].world_size, export_bytes, model, ALL[layout].settings(), ranks)
    for rank, (peak, largest) in enumerate(found):
        assert peak <= most
        assert largest == (sizes[-1] if ranks is None or rank in ranks else 0)
