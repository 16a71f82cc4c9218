"""Vision-language models against Transformers: logits, loss, and the gradient of every weight of encoder, mergers and
decoder; rows with images, with videos, with text alone, mixed and packed; nothing is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from computing import LENGTHS, MORE_LENGTHS, differences, failures, measure_in_layout, together
from layouts import Layout
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatune.bridge.assemble import assemble, load_model
from megatune.config.settings import Settings
from megatune.data.rows import IGNORE_INDEX
from megatune.engine import groups, step
from megatune.families import load_architecture
from megatune.training.train_step import train_step
from megatune.verify.measure import shard_samples
from megatune.verify.results import WHOLE_GRADIENT, Results, check_errors, compare
from megatune.verify.samples import Sample, SampleMedia, random_samples

# The first chunk of two stages with two virtual stages has two of them, as many as deepstack mergers feed.
NUM_LAYERS = 5

WIDE, SQUARE, TALL = (SampleMedia("image", grid, seed) for seed, grid in enumerate(((1, 6, 10), (1, 4, 4), (1, 14, 6))))
# Frames that are no whole number of positions apart.
CLIP, LONG = (SampleMedia("video", grid, 9, 0.97) for grid in ((3, 4, 6), (5, 2, 4)))
CONTENTS: dict[str, Sequence[Sequence[SampleMedia]]] = {
    "an image": [[WIDE], [SQUARE], [TALL], [WIDE]],
    "two images": [[WIDE, SQUARE], [SQUARE, TALL], [TALL, WIDE], [WIDE, TALL]],
    "a video": [[CLIP], [LONG], [CLIP], [LONG]],
    "mixed": [[WIDE], [], [SQUARE, TALL, CLIP], [CLIP, SQUARE, LONG]],
    # With two data-parallel ranks and rows one by one the second rank has none.
    "every other row": [[WIDE], [], [SQUARE, LONG, TALL], []],
}

TP2, PP2, CP2 = (
    {f"{kind}_size": 2} for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
)
VPP2, SP, EP2 = (
    {"virtual_pipeline_model_parallel_size": 2},
    {"sequence_parallel": True},
    {"expert_model_parallel_size": 2},
)
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FUSIONS = {"bias_activation_fusion": True, "apply_rope_fusion": True, "gradient_accumulation_fusion": True}
FULL = {"recompute_granularity": "full"}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 1}
AT_ONCE = FULL | {"recompute_num_layers": NUM_LAYERS}

# Each with its content, None for another one in each family, and rows of a micro-batch. Of every family:
LAYOUTS: dict[str, tuple[Layout, str | None, int]] = {
    "1": (Layout(1), "mixed", 1),
    "tp2 sp": (Layout(2, TP2 | SP), None, 1),
    "pp2": (Layout(2, PP2), None, 1),
    "pp2 vpp2": (Layout(2, PP2 | VPP2), None, 1),
    "cp2": (Layout(2, CP2), None, 1),
    "dp2, overlaps": (Layout(2, OVERLAPS), "every other row", 1),
    "cp2 tp2 sp, packed": (Layout(4, CP2 | TP2 | SP, packed=True), "mixed", 1),
    "tp2 pp2 dp2 sp, overlaps, fusions": (Layout(8, TP2 | PP2 | SP | OVERLAPS, performance=FUSIONS), "mixed", 1),
    "tp2 sp, recompute full": (Layout(2, TP2 | SP, recompute=FULL), None, 1),
}
# Of the one with deepstack, and of the one with windows those that are not about layers.
MORE_LAYOUTS: dict[str, tuple[Layout, str | None, int]] = {
    "1, two rows, fusions": (Layout(1, performance=FUSIONS), "mixed", 2),
    "tp2": (Layout(2, TP2), "mixed", 1),
    "tp2 sp, two rows": (Layout(2, TP2 | SP), "mixed", 2),
    "cp2 a2a, two rows": (Layout(2, CP2 | {"cp_comm_type": "a2a"}), "mixed", 2),
    "packed": (Layout(1, packed=True), "mixed", 1),
    "pp2 vpp2, recompute block": (Layout(2, PP2 | VPP2, recompute=BLOCK), "mixed", 1),
    "cp2, packed, recompute full, all at once": (Layout(2, CP2, recompute=AT_ONCE, packed=True), "mixed", 1),
}
EXPERT_LAYOUTS: dict[str, tuple[Layout, str | None, int]] = {
    "ep2": (Layout(2, EP2), "mixed", 1),
    "ep2 etp1 tp2 sp, two rows": (Layout(2, EP2 | TP2 | SP | {"expert_tensor_parallel_size": 1}), "mixed", 2),
    "ep2 pp2 vpp2 dp2, overlaps, recompute full": (Layout(4, EP2 | PP2 | VPP2 | OVERLAPS, recompute=FULL), "mixed", 1),
    "cp2 ep2, packed": (Layout(2, CP2 | EP2, packed=True), "mixed", 1),
}


def with_whole_rows(layout: Layout) -> Layout:
    """Context-parallel ranks that exchange heads for tokens."""
    return (
        replace(layout, parallel=layout.parallel | {"cp_comm_type": "a2a"})
        if CP2.items() <= layout.parallel.items()
        else layout
    )


OF_FAMILY: dict[str, dict[str, tuple[Layout, str | None, int]]] = {
    "qwen2_vl": LAYOUTS,
    "qwen2_5_vl": LAYOUTS | {name: each for name, each in MORE_LAYOUTS.items() if "recompute" not in name},
    "qwen3_vl": LAYOUTS | MORE_LAYOUTS,
    "qwen3_vl_moe": LAYOUTS | EXPERT_LAYOUTS,
    "qwen3_5": LAYOUTS,
    "qwen3_5_moe": LAYOUTS | EXPERT_LAYOUTS,
    "mistral3": LAYOUTS | {name: each for name, each in MORE_LAYOUTS.items() if "recompute" not in name},
    # Their tokens see those behind them, too, which takes whole rows.
    "gemma3": {
        name.replace("cp2 a2a", "cp2"): (with_whole_rows(layout), *rest)
        for name, (layout, *rest) in (LAYOUTS | MORE_LAYOUTS).items()
    },
    # In layers with a window.
    "gemma4": {name: (with_whole_rows(layout), *rest) for name, (layout, *rest) in LAYOUTS.items()}
    | {"packed": MORE_LAYOUTS["packed"]},
    "internvl": LAYOUTS | {name: each for name, each in MORE_LAYOUTS.items() if "recompute" not in name},
}


# These take no video.
OF_IMAGES = ("mistral3", "gemma3", "gemma4", "internvl")


def contents_of(family: str) -> list[str]:
    return [content for content in CONTENTS if family not in OF_IMAGES or content != "a video"]


def cases() -> list[tuple[str, str, str]]:
    """Every family in its layouts, with contents that take turns."""
    found = []
    for turn, (family, layouts) in enumerate(OF_FAMILY.items()):
        contents = islice(cycle(contents_of(family)), turn, None)
        found += [(family, name, content or next(contents)) for name, (_, content, _) in layouts.items()]
    return found


def samples_of(model: Path, content: str, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Sample]:
    vision, media = load_architecture(model).vision, [*CONTENTS[content]] * (len(lengths) // len(LENGTHS))
    assert vision is not None
    if not vision.has_videos:
        media = [[each for each in row if each.kind == "image"] for row in media]
    m = vision.spatial_merge_size
    media = [
        [replace(each, grid=(each.grid[0], each.grid[1] // 2 * m, each.grid[2] // 2 * m)) for each in row]
        for row in media
    ]
    if vision.square is not None:
        side = vision.square // vision.patch_size
        tiles = {TALL.seed: 3} if vision.tiles else {}
        media = [[replace(each, grid=(tiles.get(each.seed, 1), side, side)) for each in row] for row in media]
    return random_samples(301, lengths, seed, media=media, vision=vision)


@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout", "content"), cases())
def test_family_agrees(pool, model_dir, reference, table, tmp_path, family, layout, content):
    model = model_dir(family, num_hidden_layers=NUM_LAYERS)
    # In four rows fp32 rounds a layer's eight decays, whose gradients nearly cancel, by as much as is tolerated.
    samples = samples_of(model, content, MORE_LENGTHS if family == "qwen3_5_moe" else LENGTHS)
    # Before an encoder, gradients of a decoder with gated delta nets are rounded by half of what is tolerated, in
    # Transformers as in the engine: the truth is Transformers in fp64.
    truth = reference(model, samples, dtype="float64" if family.startswith("qwen3_5") else "float32")
    chosen, _, rows = OF_FAMILY[family][layout]
    found = differences(pool, model, chosen, samples, truth, tmp_path, rows)
    assert not failures(found)
    table.add(family, f"{layout}; {content}", found)


@pytest.mark.parametrize("layout", ["ep2 etp1 tp2 sp, two rows"])
def test_experts_beside_a_dense_feed_forward_agree(pool, model_dir, reference, table, tmp_path, layout):
    """As Gemma 4 of 26B has them."""
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40}
    model, (chosen, content, rows) = model_dir("gemma4", **experts), EXPERT_LAYOUTS[layout]
    samples = samples_of(model, content or "mixed")
    found = differences(pool, model, chosen, samples, reference(model, samples), tmp_path, rows)
    assert not failures(found)
    table.add("gemma4, experts", f"{layout}; {content}", found)


def test_every_content_is_seen_in_every_family():
    seen = {(family, content) for family, _, content in cases()}
    assert seen == {(family, content) for family in OF_FAMILY for content in contents_of(family)}


@pytest.mark.covering
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "mistral3", "gemma4"])
@pytest.mark.parametrize("layout", ["tp2 sp", "dp2, overlaps", "pp2 vpp2", "cp2 tp2 sp, packed"])
def test_text_alone_agrees(pool, model_dir, reference, tmp_path, family, layout):
    """The encoder, which is trained, has a gradient of zeros; in Transformers it has none."""
    model = model_dir(family, num_hidden_layers=NUM_LAYERS)
    samples = random_samples(301, LENGTHS, vision=load_architecture(model).vision)
    found = differences(pool, model, LAYOUTS[layout][0], samples, reference(model, samples), tmp_path)
    of_encoder = [
        one
        for one in found
        if any(part in one.name for part in (".visual.", ".vision_tower.", "projector.", ".embed_vision."))
    ]
    assert of_encoder
    names = [one.name.replace("k_proj.*", "k_proj.weight") for one in of_encoder]
    assert all(not Results(tmp_path).gradient(name).any() for name in names)
    assert not failures([one for one in found if one not in of_encoder and one.name != WHOLE_GRADIENT])


# With two of eight experts, rounding sends 22 of the 316 tokens to another one in Transformers itself: its logits are
# 58 % off, a parameter's gradient 23 %, by chance. Where all experts are chosen nothing but rounding is compared.
ALL_CHOSEN = {"qwen3_5_moe": {"num_experts_per_tok": 8}}
# What a layer's eight decays, its logits, or one norm's weight or bias are off by in one batch is chance, too.
BATCHES = {"qwen2_vl": 2, "qwen3_5": 3, "qwen3_5_moe": 4, "internvl": 4, "gemma3": 4}


# The encoder of qwen3_vl is qwen3_vl_moe's, and every other layer there is dense; what gemma3 rounds as no other family
# here, its norms and the scale of its words, gemma4 has, too.
@pytest.mark.extended("qwen2_vl", "qwen2_5_vl", "internvl", "qwen3_5_moe", "qwen3_vl", "gemma3")
@pytest.mark.parametrize("family", OF_FAMILY)
def test_bf16_rounds_no_worse_than_transformers(pool, model_dir, reference, table, tmp_path, family):
    """As the proof of text models, tests/parity/test_parity.py."""
    chosen = ALL_CHOSEN.get(family, {})
    model, layout = model_dir(family, num_hidden_layers=NUM_LAYERS, **chosen), LAYOUTS["tp2 sp"][0]
    ours, stock = [], []
    for seed in range(BATCHES.get(family, 1)):
        samples, folder = samples_of(model, "mixed", MORE_LENGTHS, seed), tmp_path / str(seed)
        folder.mkdir()
        pool.run(2, measure_in_layout, model, layout.settings(precision={"bf16": True}), samples, folder)
        truth = reference(model, samples, "bfloat16")
        in_sixteen = reference(model, samples, "bfloat16", "bfloat16")
        ours.append(compare(Results(folder), truth, experts_together=True))
        stock.append(compare(in_sixteen, truth, experts_together=True))
    found = check_errors(together(ours), together(stock))
    assert not failures(found)
    table.add_sixteen_bits(family, "tp2 sp; mixed" + ", all experts" * bool(chosen), found)


def test_fp16_rounds_no_worse_than_transformers(pool, model_dir, reference, tmp_path):
    model = model_dir("qwen3_vl", num_hidden_layers=NUM_LAYERS)
    samples, layout = samples_of(model, "mixed", MORE_LENGTHS), LAYOUTS["cp2"][0]
    pool.run(2, measure_in_layout, model, layout.settings(precision={"fp16": True}), samples, tmp_path)
    truth = reference(model, samples, "float16")
    stock = compare(reference(model, samples, "float16", "float16"), truth)
    assert not failures(check_errors(compare(Results(tmp_path), truth), stock))


def log_probs(model: Path, settings: Settings, samples: list[Sample]) -> list[Tensor]:
    """On every rank: of each sample's labels, [s], from a model that is not trained; empty before the last stage."""
    coords = groups.build(settings.parallel, seed=0, timeout=60)
    loaded = load_model(model, settings, coords, trained=False)
    batches = shard_samples(samples, coords, settings.parallel, vision=loaded.architecture.vision)
    return [rows[0] for rows in step.token_log_probs(loaded.model, batches)]


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "cp2"])
def test_log_probs_agree(pool, model_dir, reference, layout):
    """As a reference model of preferences computes them."""
    model, (chosen, *_) = model_dir("qwen3_vl", num_hidden_layers=NUM_LAYERS), LAYOUTS[layout]
    samples = samples_of(model, "mixed")
    truth = reference(model, samples)
    *_, found = pool.run(2, log_probs, model, chosen.settings(), samples)
    assert len(found) == len(samples)
    for number, (sample, of_sample) in enumerate(zip(samples, found, strict=True)):
        labels = torch.tensor(sample.labels[1:])
        expected = -cross_entropy(truth.logits(number)[:-1], labels, reduction="none", ignore_index=IGNORE_INDEX)
        torch.testing.assert_close(of_sample[: len(labels)], expected, rtol=1e-4, atol=1e-5)


def checked_steps(model: Path, settings: Settings, steps: list[list[Sample]]) -> None:
    """On every rank: train, and compare copies of gradients and weights bit for bit."""
    assembly = assemble(model, settings)
    arguments = {"packed": settings.data.packing, "vision": assembly.architecture.vision}
    for number, samples in enumerate(steps, 1):
        batches = shard_samples(samples, assembly.coords, settings.parallel, **arguments)
        assert train_step(assembly, batches, learning_rate=1e-2, checked_step=number).updated


# In dp 2 and in cp 2 with tp 2 the same ranks have copies.
@pytest.mark.extended("tp2 pp2 dp2 sp, overlaps, fusions")
@pytest.mark.covering
@pytest.mark.parametrize(
    "layout", ["dp2, overlaps", "tp2 sp", "cp2 tp2 sp, packed", "tp2 pp2 dp2 sp, overlaps, fusions"]
)
def test_copies_stay_the_same(pool, model_dir, layout):
    """Gradients of an encoder whose pictures were dealt are the same on all ranks, and so are its weights; whatever
    micro-batches of a step have pictures."""
    model, (chosen, *_) = model_dir("qwen3_vl", num_hidden_layers=NUM_LAYERS), LAYOUTS[layout]
    text = random_samples(301, LENGTHS, vision=load_architecture(model).vision)
    steps = [samples_of(model, "mixed"), samples_of(model, "every other row"), text, samples_of(model, "a video")]
    pool.run(chosen.world_size, checked_steps, model, chosen.settings(), steps)
