"""Where a difference arises: one altered weight, or one wrong gradient, is found in every layout."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from pool import RankPool
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.families import FAMILIES, load_architecture
from megatune.verify.localize import Location, forward_order, locate, place_of_weight
from megatune.verify.measure import measure
from megatune.verify.reference import write_reference
from megatune.verify.results import Difference, Results, Trace, check_errors, compare, write_trace
from megatune.verify.samples import Sample, random_media, random_samples

SAMPLES = random_samples(301, (17, 5, 30, 12))
PLACES = ("embedding", "final norm")
ALL_LAYOUTS = {**LAYOUTS, **SEQUENCE_LAYOUTS, **EXPERT_LAYOUTS}


def with_altered_weight(model: Path, folder: Path, pattern: str) -> Path:
    """A copy of a checkpoint in which the first element of one tensor, the first whose name matches, is larger."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if re.fullmatch(pattern, name))
    tensors[name].view(-1)[0] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def compute(model: Path, settings: Settings, samples: list[Sample], folder: Path, spoiled: int | None = None) -> None:
    """On every rank: numbers and a trace.

    Args:
        spoiled: layer whose attention hands on a gradient that is one percent too large.
    """
    assembly = assemble(model, settings)
    for chunk in assembly.model:
        for layer in chunk.module.decoder.layers:
            if layer.layer_number - 1 == spoiled:
                layer.self_attention.register_forward_hook(spoil_gradient)
    packed = settings.data.packing
    measure(assembly, samples, settings.parallel, folder, packed=packed)


def spoil_gradient(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
    if output[0].requires_grad:
        output[0].register_hook(lambda gradient: gradient * 1.01)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, list[Sample]], Path]:
    """truth(model, samples): a folder with the reference's numbers and trace, written once."""
    made: dict[tuple[Path, tuple[Sample, ...]], Path] = {}

    def make(model: Path, samples: list[Sample]) -> Path:
        if (key := (model, tuple(samples))) not in made:
            made[key] = tmp_path_factory.mktemp("truth")
            write_reference(model, samples, made[key])
        return made[key]

    return make


def location(
    pool: RankPool, model: Path, truth: Path, layout: Layout, folder: Path, *spoiled: int,
    samples: list[Sample] = SAMPLES,
) -> Location:  # fmt: skip
    (folder / "layout").mkdir()
    pool.run(layout.world_size, compute, model, layout.settings(), samples, folder / "layout", *spoiled)
    differences = check_errors(compare(Results(folder / "layout"), Results(truth)))
    assert not all(one.passes for one in differences)
    return locate(differences, Trace(folder / "layout"), Trace(truth))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_the_places_of_its_reference(pool, model_dir, tmp_path, family):
    """In one pass of each side, and all of them agree."""
    model = model_dir(family)
    (tmp_path / "layout").mkdir()
    vision = load_architecture(model).vision
    media = random_media(2, vision) if vision is not None else ()
    samples = random_samples(301, (17, 9), media=media, vision=vision)
    pool.run(1, compute, model, LAYOUTS["1"].settings(), samples, tmp_path / "layout")
    write_reference(model, samples, tmp_path / "truth")
    traces = Trace(tmp_path / "layout"), Trace(tmp_path / "truth")
    assert traces[0].places == traces[1].places
    assert {"embedding", "layer 0 attention", "final norm"} < traces[0].places
    wrong = [place for place in locate([], *traces).places if not place.passes]
    assert not wrong


DENSE = [
    (r"model\.embed_tokens\.weight", "embedding"),
    (r"model\.layers\.2\.self_attn\.o_proj\.weight", "layer 2 attention"),
    (r"model\.layers\.1\.self_attn\.k_norm\.weight", "layer 1 attention"),
    (r"model\.layers\.3\.input_layernorm\.weight", "layer 3 attention"),
    (r"model\.layers\.1\.post_attention_layernorm\.weight", "layer 1 MLP"),
    (r"model\.layers\.0\.mlp\.up_proj\.weight", "layer 0 MLP"),
    (r"model\.norm\.weight", "final norm"),
    (r"lm_head\.weight", "logits"),
]


@pytest.mark.covering
@pytest.mark.parametrize(("pattern", "place"), DENSE)
def test_altered_weight_is_located(pool, model_dir, truth, tmp_path, pattern, place):
    good = model_dir("qwen3")
    if place == "embedding":  # of the first token, so that it is used
        tokens = {token for sample in SAMPLES for token in sample.input_ids}
        assert 0 in tokens
    bad = with_altered_weight(good, tmp_path / "bad", pattern)
    found = location(pool, bad, truth(good, SAMPLES), LAYOUTS["1"], tmp_path)
    assert found.first is not None
    assert (found.first.name, found.in_gradients) == (place, False)
    before = found.places[: found.places.index(found.first)]
    assert all(one.error < 2e-6 for one in before)
    assert found.first.error > 1e-4


@pytest.mark.covering
@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (r"model\.visual\.blocks\.1\.mlp\.linear_fc1\.bias", "embedding"),
        (r"model\.visual\.deepstack_merger_list\.0\.linear_fc2\.bias", "layer 1 attention"),
        (r"model\.language_model\.layers\.2\.self_attn\.o_proj\.weight", "layer 2 attention"),
    ],
)
@pytest.mark.parametrize("layout", ["tp2 sp", "cp2, packed"])
def test_altered_weight_of_a_vision_language_model_is_located(pool, model_dir, truth, tmp_path, layout, pattern, place):
    """An encoder shows in what goes into the first layer, a deepstack merger in what goes into the second one."""
    good = model_dir("qwen3_vl")
    vision = load_architecture(good).vision
    samples = random_samples(301, (17, 5, 30, 12), media=random_media(4, vision), vision=vision)
    bad = with_altered_weight(good, tmp_path / "bad", pattern)
    found = location(pool, bad, truth(good, samples), ALL_LAYOUTS[layout], tmp_path, samples=samples)
    assert found.first is not None
    assert (found.first.name, found.in_gradients) == (place, False)
    assert all(one.error < 2e-6 for one in found.places[: found.places.index(found.first)])


@pytest.mark.extended("tp2 pp2 dp2 sp", "cp2 pp2")  # the others cut the same
@pytest.mark.covering
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "tp2 pp2 dp2 sp", "cp2 p2p", "cp2 pp2", "cp2, packed"])
def test_altered_weight_is_located_in_every_layout(pool, model_dir, truth, tmp_path, layout):
    good = model_dir("qwen3")
    bad = with_altered_weight(good, tmp_path / "bad", r"model\.layers\.2\.self_attn\.o_proj\.weight")
    found = location(pool, bad, truth(good, SAMPLES), ALL_LAYOUTS[layout], tmp_path)
    assert found.first is not None
    assert found.first.name == "layer 2 attention"
    # Embedding, four layers of two, norm, logits, loss: all stages told of theirs, and what comes before agrees.
    assert len(found.places) == 12
    assert all(one.error < 2e-6 for one in found.places[:5])


@pytest.mark.covering
@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (r"model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight", "layer 1 experts"),
        (r"model\.layers\.3\.mlp\.gate\.weight", "layer 3 router"),
    ],
)
@pytest.mark.parametrize("layout", ["1", "ep2", "ep2 etp1 tp2 sp", "cp2 ep2, packed"])
def test_experts_and_their_router_are_told_apart(pool, model_dir, truth, tmp_path, layout, pattern, place):
    good = model_dir("qwen3_moe")
    bad = with_altered_weight(good, tmp_path / "bad", pattern)
    found = location(pool, bad, truth(good, SAMPLES), ALL_LAYOUTS[layout], tmp_path)
    assert found.first is not None
    assert found.first.name == place
    assert (found.first.moved > 0) == place.endswith("router")
    assert [one.name for one in found.places if "layer 0" in one.name] == ["layer 0 attention", "layer 0 MLP"]


@pytest.mark.extended("1")
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2"])
def test_wrong_gradient_is_located(pool, model_dir, truth, tmp_path, layout):
    good = model_dir("qwen3")
    found = location(pool, good, truth(good, SAMPLES), LAYOUTS[layout], tmp_path, 2)
    assert found.first is not None
    assert (found.first.name, found.in_gradients) == ("layer 2 attention", True)
    backward = [one.name for one in found.places]
    assert backward[:3] == ["head", "final norm", "layer 3 MLP"]
    assert backward[-1] == "embedding"


def test_token_that_is_wrong_is_named(tmp_path):
    expected, output = torch.randn(2, 7, 4).repeat(2, 1, 1, 1)
    output[1, 5, 2] += 1
    for folder, values in (("a", output), ("b", expected)):
        (tmp_path / folder).mkdir()
        write_trace(tmp_path / folder, 0, {(sample, "embedding"): values[sample].clone() for sample in (0, 1)})
    found = locate([], Trace(tmp_path / "a"), Trace(tmp_path / "b")).first
    assert found is not None
    assert found.worst == (1, 5)
    assert found.error == pytest.approx(1 / expected.norm().item(), rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_located(tmp_path, value):
    for folder, values in (("a", torch.tensor([[1.0], [value]])), ("b", torch.ones(2, 1))):
        (tmp_path / folder).mkdir()
        write_trace(tmp_path / folder, 0, {(0, "embedding"): torch.ones(2, 1), (0, "layer 0 MLP"): values})
    found = locate([], Trace(tmp_path / "a"), Trace(tmp_path / "b")).first
    assert found is not None
    assert (found.name, found.worst, found.error) == ("layer 0 MLP", (0, 1), float("inf"))


def test_place_that_one_side_lacks_differs(tmp_path):
    for folder, places in (("a", ["embedding"]), ("b", ["embedding", "layer 0 attention"])):
        (tmp_path / folder).mkdir()
        write_trace(tmp_path / folder, 0, {(0, place): torch.ones(2, 1) for place in places})
    found = locate([], Trace(tmp_path / "a"), Trace(tmp_path / "b")).first
    assert found is not None
    assert found.name == "layer 0 attention"


def test_loss_alone_is_located(tmp_path):
    write_trace(tmp_path, 0, {(0, "embedding"): torch.ones(2, 1)})
    differences = [Difference("logits", 0.0, 1e-4), Difference("loss", 1e-3, 1e-6)]
    found = locate(differences, Trace(tmp_path), Trace(tmp_path)).first
    assert found is not None
    assert found.name == "loss"


def test_sixteen_bits_are_held_against_those_of_transformers(tmp_path):
    """The truth is 1; the stock computation errs by 0.001, the layout by 0.0015 and then by 0.0025."""
    for folder, values in (("truth", (1.0, 1.0)), ("stock", (1.001, 1.001)), ("layout", (1.0015, 1.0025))):
        (tmp_path / folder).mkdir()
        outputs = {(0, place): torch.full((3, 2), value) for place, value in zip(PLACES, values, strict=True)}
        write_trace(tmp_path / folder, 0, outputs)
    traces = [Trace(tmp_path / name) for name in ("layout", "truth", "stock")]
    found = locate([], *traces)
    assert [one.passes for one in found.places] == [True, False]
    # Two layouts that ought to be alike: neither may be so much better, either.
    found = locate([], traces[2], traces[1], traces[0], alike=True)
    assert [one.passes for one in found.places] == [True, False]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.10.input_layernorm.weight", "layer 10 attention"),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "layer 1 attention"),
        ("model.layers.1.post_attention_layernorm.weight", "layer 1 MLP"),
        ("model.layers.2.post_attention_layernorm.weight", "layer 2 experts"),
        ("model.layers.2.mlp.experts.7.up_proj.weight", "layer 2 experts"),
        ("model.layers.2.mlp.shared_expert_gate.weight", "layer 2 experts"),
        ("model.layers.2.mlp.gate.weight", "layer 2 router"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "head"),
        ("model.visual.blocks.3.norm1.weight", "vision encoder"),
        ("model.language_model.embed_tokens.weight", "embedding"),
        ("model.language_model.layers.10.self_attn.q_norm.weight", "layer 10 attention"),
        ("model.language_model.layers.2.mlp.gate.weight", "layer 2 router"),
        ("model.language_model.norm.weight", "final norm"),
    ],
)
def test_weights_have_places(name, place):
    assert place_of_weight(name, {2}) == place


def test_order_is_that_of_computing():
    places = [
        "vision encoder",
        "embedding",
        "layer 2 attention",
        "layer 2 router",
        "layer 2 experts",
        "layer 10 MLP",
        "final norm",
        "logits",
    ]
    assert sorted(sorted(places), key=forward_order) == places
