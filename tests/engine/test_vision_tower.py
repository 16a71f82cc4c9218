"""The encoder of pictures against Transformers' own, which attends run by run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatune.config.settings import Settings
from megatune.engine.layers.vision import tower
from megatune.engine.layers.vision.tower import Tower, build_encoder, encoder_inputs
from megatune.engine.transformer_config import transformer_config
from megatune.families import load_architecture

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Two images of one size, one that windows do not divide, and a video of three frames.
GRIDS = torch.tensor([[1, 4, 4], [1, 6, 10], [3, 4, 6], [1, 4, 4]])
GRANULARITIES = (None, "full")


def built(model: Path, granularity: str | None = None) -> tuple[torch.nn.Module, Tower]:
    architecture = load_architecture(model)
    recompute = {"recompute_granularity": granularity}
    config = transformer_config(architecture, Settings(recompute=recompute))
    encoder = build_encoder(architecture, config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return encoder, Tower(encoder, architecture.vision, config)


def plain(model: Path, encoder: torch.nn.Module) -> torch.nn.Module:
    """Transformers' module as Transformers makes it, with the same weights."""
    stock = type(encoder)(type(encoder.config).from_dict(json.loads(load_architecture(model).vision.config)))
    stock.config._attn_implementation = "eager"
    stock.load_state_dict(encoder.state_dict())
    return stock


def pixels(model: Path) -> Tensor:
    vision = load_architecture(model).vision
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.randn(int(GRIDS.prod(1).sum()), channels, generator=torch.Generator().manual_seed(1))


def gradients(output: Tensor, module: torch.nn.Module) -> dict[str, Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad((output * weights).sum(), parameters), strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_gradients_agree(model_dir, family):
    model = model_dir(family)
    encoder, encode = built(model)
    stock = plain(model, encoder)
    output = stock(pixels(model), grid_thw=GRIDS)
    expected = torch.stack((output.pooler_output, *(getattr(output, "deepstack_features", None) or ())), 1)
    found = encode(pixels(model), GRIDS)
    assert found.shape == expected.shape
    assert found.shape[1] == 1 + load_architecture(model).vision.num_deepstack_mergers
    assert error(found, expected) < 1e-5
    wanted = gradients(expected, stock)
    assert all(error(gradient, wanted[name]) < 1e-5 for name, gradient in gradients(found, encoder).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_has_the_same_features_whatever_is_beside_it(model_dir, family):
    model = model_dir(family)
    _, encode = built(model)
    values, sizes = pixels(model), GRIDS.prod(1).tolist()
    alone = [encode(some, GRIDS[[number]]) for number, some in enumerate(values.split(sizes))]
    assert error(encode(values, GRIDS), torch.cat(alone)) < 1e-6


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_recomputed_layers_have_the_same_gradients(model_dir, monkeypatch, family):
    model, kept = model_dir(family), {}
    found = {}
    for granularity in GRANULARITIES:
        encoder, encode = built(model, granularity)
        kept[granularity] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept[granularity]: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            output = encode(pixels(model), GRIDS)
        found[granularity] = gradients(output, encoder)
    assert all(torch.equal(found[None][name], gradient) for name, gradient in found["full"].items())
    assert sum(kept["full"]) < sum(kept[None]) / 2


def test_frequencies_stay_in_fp32(model_dir):
    encoder, encode = built(model_dir("qwen3_vl"))
    expected = encode(pixels(model_dir("qwen3_vl")), GRIDS)
    encoder.to(torch.bfloat16)
    assert encoder.rotary_pos_emb.inv_freq.dtype == torch.float32
    found = encode(pixels(model_dir("qwen3_vl")), GRIDS)
    assert found.dtype == torch.bfloat16
    assert error(found, expected) < 2e-2


def test_the_encoder_has_no_input_that_waits_for_the_device(model_dir, monkeypatch):
    """All that follows from the sizes of pictures comes from the host: it calls nothing that could compute it."""
    for family in FAMILIES:
        model = model_dir(family)
        vision = load_architecture(model).vision
        inputs = encoder_inputs(GRIDS, vision)
        assert {"cu_seqlens", "max_seqlen", "position_ids"} <= inputs.keys()
        assert ("window_index" in inputs) == (vision.window_size is not None)
        assert ("interp_indices" in inputs) == bool(vision.num_position_embeddings)
        _, encode = built(model)
        expected = encode(pixels(model), GRIDS)
        monkeypatch.setattr(tower, "encoder_inputs", lambda grids, vision, inputs=inputs: dict(inputs))
        # Sizes that are nobody's: what they would be needed for is there.
        assert torch.equal(encode(pixels(model), torch.full_like(GRIDS, -1)), expected)
        monkeypatch.undo()


def test_windows_and_frames_are_few_calls(model_dir):
    """On a CPU runs of equal length are one call: as many calls as there are lengths."""
    vision = load_architecture(model_dir("qwen2_5_vl")).vision
    inputs = encoder_inputs(GRIDS.repeat(8, 1), vision)
    assert len(inputs["cu_seqlens"].runs) == 8 * 6
    assert len(inputs["cu_seqlens"].equal_runs) == 3
    assert len(inputs["cu_window_seqlens"].equal_runs) <= 4
