"""Two optimizer steps with a part of the model frozen: what is frozen stays as it was, bit for bit, and what is
trained becomes what Transformers and torch.optim make of it with the same parameters frozen, each part at its own
learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, SEQUENCE_LAYOUTS, Layout
from safetensors.torch import load_file
from saving import save_weights
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import PrecisionSettings, Settings
from megatune.encoders import Vision
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import load_scalars, scalars, step
from megatune.engine.step import forward_backward
from megatune.families import load_architecture
from megatune.objectives.choose import CrossEntropy
from megatune.training.train_step import train_step
from megatune.verify.measure import shard_samples
from megatune.verify.reference import checkpoint_tensors, compute_reference, load_reference_model
from megatune.verify.samples import Sample, SampleMedia, random_samples

STEPS, ROWS, ACCUMULATION = 2, 4, 2
NUM_LAYERS = 4
# As in the proofs of whole updates (tests/parity/test_one_step.py): an epsilon above fp32's rounding.
ADAM = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 1.0}
TOLERANCE = 1e-3  # of the norm of a tensor's update

FREEZE = {"finetuning_type": "freeze"}
SELECTIONS: dict[str, dict[str, Any]] = {
    "last layer": FREEZE | {"freeze_trainable_layers": 1},
    "first layer": FREEZE | {"freeze_trainable_layers": -1},
    "feed-forward of the last three": FREEZE | {"freeze_trainable_layers": 3, "freeze_trainable_modules": ["mlp"]},
    "second and fourth": FREEZE | {"freeze_trainable_layers": 2, "use_llama_pro": True},
    "all layers": FREEZE | {"freeze_trainable_layers": 4},
    "norms of a layer, and the last": FREEZE
    | {"freeze_trainable_layers": 1, "freeze_trainable_modules": ["input_layernorm"], "freeze_extra_modules": ["norm"]},
    "last layer and words": FREEZE | {"freeze_trainable_layers": 1, "freeze_extra_modules": ["embed_tokens"]},
    "output layer alone": FREEZE | {"freeze_trainable_layers": 0, "freeze_extra_modules": ["lm_head"]},
}
OF_LAYERS = tuple(SELECTIONS)
# The eighth combination trains nothing, and is refused.
SWITCHES = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
COMBINATIONS = [values for values in product((False, True), repeat=3) if not all(values)]
SELECTIONS |= {
    f"frozen: {', '.join(name for name, is_frozen in zip(SWITCHES, values, strict=True) if is_frozen) or 'nothing'}":
    dict(zip(SWITCHES, values, strict=True))
    for values in COMBINATIONS
}  # fmt: skip
OF_PICTURES = list(SELECTIONS)[-len(COMBINATIONS) :]
SELECTIONS |= {
    "deepstack mergers alone": dict.fromkeys(SWITCHES, True) | {"freeze_deepstack_mergers": False},
    "all but deepstack mergers": dict.fromkeys(SWITCHES, False) | {"freeze_deepstack_mergers": True},
    "last layer, encoder and mergers": FREEZE | {"freeze_trainable_layers": 1} | dict.fromkeys(SWITCHES[:2], False),
}
RATES = {"vision_lr": 3e-4, "merger_lr": 2e-3}


def trained_by_llamafactory(name: str, settings: FinetuningSettings) -> bool:
    """LLaMA-Factory's _setup_full_tuning and _setup_freeze_tuning (model/adapter.py) for a parameter, by whole
    modules."""
    if (part := part_of(name)) != "language":
        deepstack = settings.freeze_deepstack_mergers
        frozen = {
            "tower": settings.freeze_vision_tower,
            "projector": settings.freeze_multi_modal_projector,
            "deepstack": settings.freeze_vision_tower if deepstack is None else deepstack,
        }
        return not frozen[part]
    if settings.finetuning_type == "full" or settings.freeze_language_model:
        return not settings.freeze_language_model
    count = settings.freeze_trainable_layers
    if settings.use_llama_pro:
        stride = NUM_LAYERS // count
        layers = range(stride - 1, NUM_LAYERS + stride - 1, stride)
    elif count > 0:
        layers = range(max(0, NUM_LAYERS - count), NUM_LAYERS)
    else:
        layers = range(min(-count, NUM_LAYERS))
    if (inside := re.search(r"layers\.(\d+)\.(\w+)", name)) is None:
        return name.split(".")[-2] in settings.freeze_extra_modules
    asked = settings.freeze_trainable_modules
    return int(inside[1]) in layers and (asked == ["all"] or inside[2] in asked)


_PROJECTORS = ("multi_modal_projector.", "embed_vision.")


def part_of(name: str) -> str:
    if not any(part in name for part in ("visual.", "vision_tower.", *_PROJECTORS)):
        return "language"
    is_projector = any(part in name for part in (".merger.", *_PROJECTORS))
    return "deepstack" if "deepstack" in name else "projector" if is_projector else "tower"


def step_samples(index: int, vision: Vision | None = None) -> list[Sample]:
    """Rows; of a vision-language model two images, none, a video if it takes any, and text alone."""
    lengths = [17 + index, 5, 30, 25 - index]
    side = vision.spatial_merge_size if vision is not None else 2
    sizes = ((1, 2 * side, 3 * side), (1, side, side))
    images = [SampleMedia("image", grid, seed=index + 10 * number) for number, grid in enumerate(sizes)]
    video = SampleMedia("video", (2, 4, 4), seed=index + 20, seconds_per_grid=1.0)
    videos = [video] if vision is not None and vision.has_videos else []
    if vision is not None and vision.square is not None:
        side = vision.square // vision.patch_size
        images = [replace(each, grid=(1, side, side)) for each in images]
    # With seeds from 0 or 1 gradients of InternVL's biases nearly cancel: an update by Adam is then of their rounding,
    # in Transformers' fp32, too (4e-4 from fp64). With these the worst family is at a quarter of what is tolerated.
    return random_samples(301, lengths, seed=index + 5, media=(images, (), videos), vision=vision)


Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain_steps(model_dir) -> Iterator[Callable[..., tuple[Tensors, Tensors, set[str]]]]:
    """Weights before and after the steps by Transformers, and the names of those that are trained; computed once."""
    made: dict[Any, tuple[Tensors, Tensors, set[str]]] = {}

    def make(family: str, tied: bool, selection: str, **rates: float) -> tuple[Tensors, Tensors, set[str]]:
        key = family, tied, selection, *rates.items()
        if key not in made:
            made[key] = _plain_steps(model_dir(family, tied=tied), FinetuningSettings(**SELECTIONS[selection]), rates)
        return made[key]

    return make


def _plain_steps(
    model_dir: Path, selection: FinetuningSettings, rates: dict[str, float]
) -> tuple[Tensors, Tensors, set[str]]:
    model = load_reference_model(model_dir, torch.float32)
    vision = load_architecture(model_dir).vision
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained_by_llamafactory(name, selection))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = checkpoint_tensors(model, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    before = _copy(model)
    rate_of = {"tower": "vision_lr", "projector": "merger_lr", "deepstack": "merger_lr", "language": "learning_rate"}
    groups = [
        {
            "params": [parameter],
            "weight_decay": ADAM["weight_decay"] if parameter.dim() > 1 else 0.0,
            "lr": (ADAM | rates).get(rate_of[part_of(name)], ADAM["learning_rate"]),
        }
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, ADAM["learning_rate"], (0.9, ADAM["adam_beta2"]), ADAM["adam_epsilon"])
    for index in range(STEPS):
        compute_reference(model, step_samples(index, vision))
        torch.nn.utils.clip_grad_norm_(trained, ADAM["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return before, _copy(model), set(names)


def _copy(model: torch.nn.Module) -> Tensors:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model, parameters).items()}


def engine_steps(model_dir: Path, settings: Settings, folder: Path) -> int:
    """On every rank: train, with gradients and weights compared between copies, save, and count the elements that have
    a gradient."""
    assembly = assemble(model_dir, settings)
    for index in range(STEPS):
        train(assembly, settings, index, checked=True)
    gather_parameters(assembly.model)
    save_weights(folder, assembly.parameters, assembly.architecture, assembly.coords, form=assembly.form)
    parameters = [local.parameter for local in assembly.parameters]
    with_gradient = [one for one in parameters if hasattr(one, "main_grad")]
    assert with_gradient == [one for one in parameters if one.requires_grad]
    return sum(one.numel() for one in with_gradient)


def train(assembly: Assembly, settings: Settings, index: int, *, checked: bool = False) -> None:
    accumulation = min(ACCUMULATION, ROWS // assembly.coords.dp_size)
    rows = ROWS // (accumulation * assembly.coords.dp_size)
    vision = assembly.architecture.vision
    batches = shard_samples(
        step_samples(index, vision), assembly.coords, settings.parallel, micro_batch_size=rows, vision=vision
    )
    rate = settings.optimizer.learning_rate
    assert train_step(assembly, batches, learning_rate=rate, checked_step=index + 1 if checked else None).updated


def saved(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def settings_of(layout: Layout, selection: str, **optimizer: Any) -> Settings:
    update = {"finetuning": FinetuningSettings(**SELECTIONS[selection])}
    return layout.settings(optimizer=ADAM | optimizer).model_copy(update=update)


def assert_frozen_and_trained(found: Tensors, before: Tensors, after: Tensors, trained: set[str]) -> None:
    moved = {name for name in before if not torch.equal(found[name], before[name])}
    assert moved == trained
    # The gradient of a bias of keys that are not turned is nothing but rounding.
    compared = [name for name in trained if not (".vision_tower." in f".{name}" and name.endswith("k_proj.bias"))]
    errors = {
        name: ((found[name] - after[name]).norm() / (after[name] - before[name]).norm()).item() for name in compared
    }
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCE}


_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_PP2 = LAYOUTS["pp2"].parallel
FULL = {"recompute_granularity": "full"}
RECOMPUTED = {
    "full": FULL,
    "full, 2 layers": FULL | {"recompute_num_layers": 2},
    "full, block": FULL | {"recompute_method": "block", "recompute_num_layers": 3},
    "norms and feed-forward": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
}
DENSE = {
    **{name: LAYOUTS[name] for name in ("1", "tp2 sp", "pp2 vpp2", "tp2 pp2 dp2 sp")},
    "pp4": MORE_LAYOUTS["pp4"],
    "dp2, overlaps": Layout(2, _OVERLAPS),
    "dp2, no distributed optimizer, grad overlap": MORE_LAYOUTS["dp2, no distributed optimizer, grad overlap"],
    "tp2 pp2 vpp2 dp2 sp, overlaps, fusions": MORE_LAYOUTS["tp2 pp2 vpp2 dp2 sp, overlaps, fusions"],
    "cp2 p2p": SEQUENCE_LAYOUTS["cp2 p2p"],
    **{f"recompute {name}": Layout(1, recompute=recompute) for name, recompute in RECOMPUTED.items()},
    "pp2, recompute full": Layout(2, _PP2, recompute=FULL),
}
CASES = [
    *(("qwen3", True, "last layer and words", layout) for layout in DENSE),
    *(("qwen3", True, "last layer", layout) for layout in DENSE if "pp" in layout or "recompute" in layout),
    *(("qwen3", True, "first layer", layout) for layout in ("pp2 vpp2", "tp2 pp2 vpp2 dp2 sp, overlaps, fusions")),
    *(("qwen2", False, "feed-forward of the last three", layout) for layout in DENSE if "recompute" in layout),
    *(("qwen2", False, selection, "pp2 vpp2") for selection in OF_LAYERS),
]


@pytest.mark.covering
@pytest.mark.parametrize(("family", "tied", "selection", "layout"), CASES)
def test_frozen_weights_stay_and_the_others_are_trained(
    pool, model_dir, plain_steps, tmp_path, family, tied, selection, layout
):
    settings = settings_of(DENSE[layout], selection)
    pool.run(DENSE[layout].world_size, engine_steps, model_dir(family, tied=tied), settings, tmp_path)
    assert_frozen_and_trained(saved(tmp_path), *plain_steps(family, tied, selection))


def layer_passes(model_dir: Path, settings: Settings) -> dict[int, set[tuple[bool, bool]]]:
    """On every rank: of passes through each layer, by its number from 0, whether autograd looked on and whether what
    went in had a gradient."""
    assembly = assemble(model_dir, settings)
    seen: dict[int, set[tuple[bool, bool]]] = {}

    def note(layer: Any, arguments: Any, named: dict[str, Any]) -> None:
        passes = seen.setdefault(layer.layer_number - 1, set())
        passes.add((torch.is_grad_enabled(), named["hidden_states"].requires_grad))

    for chunk in assembly.model:
        for layer in chunk.module.decoder.layers:
            layer.register_forward_pre_hook(note, with_kwargs=True)
    batches = shard_samples(random_samples(301, [12, 12]), assembly.coords, settings.parallel)
    forward_backward(assembly.model, batches, CrossEntropy())
    return seen


_NO_INPUT, _INPUT = {(True, False)}, {(True, True)}
_RECOMPUTED = {(False, True), (True, True)}


@pytest.mark.parametrize(
    ("layout", "selection", "expected"),
    [
        ("1", "last layer", [_NO_INPUT] * 4),
        ("1", "second and fourth", [_NO_INPUT, _NO_INPUT, _INPUT, _INPUT]),
        # What a stage receives has no gradient either.
        ("pp2", "last layer", [_NO_INPUT] * 4),
        ("pp4", "second and fourth", [_NO_INPUT, _NO_INPUT, _INPUT, _INPUT]),
        ("recompute full", "last layer", [_NO_INPUT] * 3 + [_RECOMPUTED]),
        ("recompute full, 2 layers", "last layer", [_NO_INPUT] * 2 + [_RECOMPUTED] * 2),
        ("recompute full, 2 layers", "second and fourth", [_RECOMPUTED] * 4),
        ("pp2, recompute full", "second and fourth", [_NO_INPUT] + [_RECOMPUTED] * 3),
    ],
)
def test_layers_before_the_first_trained_one_take_no_part_in_the_backward_pass(
    pool, model_dir, layout, selection, expected
):
    chosen = DENSE.get(layout) or LAYOUTS[layout]
    settings = settings_of(chosen, selection)
    answers = pool.run(chosen.world_size, layer_passes, model_dir("qwen2"), settings)
    assert {layer: passes for answer in answers for layer, passes in answer.items()} == dict(enumerate(expected))


EXPERTS = {
    **{name: EXPERT_LAYOUTS[name] for name in ("1", "ep2", "ep2 etp1 tp2 sp", "ep2 pp2 vpp2")},
    "ep2 pp2 dp4, overlaps, fusions": MORE_EXPERT_LAYOUTS["ep2 pp2 dp4, overlaps, fusions"],
    "recompute full": Layout(1, recompute=FULL),
}


@pytest.mark.covering
@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize(
    ("family", "selection"),
    [
        ("qwen3_moe", "last layer"),
        ("qwen3_moe", "feed-forward of the last three"),
        ("deepseek_v3", "second and fourth"),
    ],
)
def test_experts_are_frozen_and_trained(pool, model_dir, plain_steps, tmp_path, family, selection, layout):
    settings = settings_of(EXPERTS[layout], selection)
    pool.run(EXPERTS[layout].world_size, engine_steps, model_dir(family), settings, tmp_path)
    found = saved(tmp_path)
    before, after, trained = plain_steps(family, False, selection)
    assert_frozen_and_trained({name: found[name] for name in before}, before, after, trained)


def scaled_steps(model_dir: Path, settings: Settings) -> tuple[bool, float, bool, float]:
    """On every rank: whether a step in fp16 in which one rank's gradient overflows updated, the loss scale after it,
    whether the next one did, and its norm."""
    assembly = assemble(model_dir, settings)
    start = {"loss_scale": 2.0**12, "hysteresis_tracker": 1, "growth_tracker": 5}
    load_scalars(assembly.optimizer, scalars(assembly.optimizer) | start)
    batches = shard_samples(random_samples(301, [12] * 4), assembly.coords, settings.parallel)
    forward_backward(assembly.model, batches, CrossEntropy())
    if assembly.coords.rank == assembly.coords.world_size - 1:
        trained = next(local.parameter for local in assembly.parameters if local.parameter.requires_grad)
        trained.main_grad.view(-1)[-1] = math.inf
    updated, _ = step(assembly.optimizer, 1e-4)
    scale = scalars(assembly.optimizer)["loss_scale"]
    forward_backward(assembly.model, batches, CrossEntropy())
    return updated, scale, *step(assembly.optimizer, 1e-4)


@pytest.mark.parametrize("layout", [MORE_LAYOUTS["pp4"], Layout(4, _PP2), EXPERT_LAYOUTS["ep2 pp2"]])
def test_stages_without_trained_weights_follow_the_loss_scale(pool, model_dir, layout):
    settings = settings_of(layout, "last layer").model_copy(update={"precision": PrecisionSettings(fp16=True)})
    found = pool.run(
        4,
        scaled_steps,
        model_dir("qwen3_moe" if "expert_model_parallel_size" in layout.parallel else "qwen3"),
        settings,
    )
    assert found == [found[0]] * 4
    assert found[0][:3] == (False, 2.0**11, True)
    assert 0 < found[0][3] < math.inf


def biases(model_dir: Path, settings: Settings) -> dict[int, bool]:
    """On every rank: whether the bias that a layer's experts are chosen by has moved in two steps."""
    assembly = assemble(model_dir, settings)
    held = {local.layer: local.parameter for local in assembly.parameters if local.weight.is_buffer}
    before = {layer: bias.clone() for layer, bias in held.items()}
    for index in range(2):
        train(assembly, settings, index)
    return {layer: not torch.equal(bias, before[layer]) for layer, bias in held.items()}


def test_routers_of_frozen_layers_keep_their_bias(pool, model_dir):
    layout = Layout(2, EXPERT_LAYOUTS["ep2"].parallel, experts={"moe_router_bias_update_rate": 0.01})
    settings = settings_of(layout, "second and fourth")
    assert pool.run(2, biases, model_dir("deepseek_v3"), settings) == [{1: True, 2: False, 3: True}] * 2


PICTURES = {
    **{name: LAYOUTS[name] for name in ("1", "tp2 sp", "pp2")},
    "tp2 pp2 dp2 sp, overlaps, fusions": MORE_LAYOUTS["tp2 pp2 dp2 sp, overlaps, fusions"],
    "cp2 p2p": SEQUENCE_LAYOUTS["cp2 p2p"],
    "recompute full": Layout(1, recompute=FULL),
}
PICTURE_CASES = [
    *(("qwen3_vl", selection, "tp2 pp2 dp2 sp, overlaps, fusions") for selection in OF_PICTURES[::2]),
    *(("qwen3_vl", selection, "tp2 sp") for selection in OF_PICTURES[1::2]),
    *(("qwen3_vl", selection, layout) for selection in (OF_PICTURES[0], OF_PICTURES[-1])
      for layout in ("1", "cp2 p2p", "recompute full")),
    *(("qwen2_vl", selection, "tp2 sp") for selection in OF_PICTURES[2::2]),
    *(("qwen2_5_vl", selection, "tp2 sp") for selection in OF_PICTURES[1::2]),
    *((family, selection, "tp2 sp") for family in ("mistral3", "gemma3", "gemma4", "internvl")
      for selection in OF_PICTURES[3::3]),
    # tests/parity/test_one_step.py and test_vision.py have these families with nothing frozen.
    *(pytest.param(family, OF_PICTURES[0], "tp2 sp", marks=pytest.mark.extended)
      for family in ("qwen2_vl", "mistral3", "gemma3", "gemma4", "internvl")),
    *(("qwen3_vl", selection, layout) for selection in list(SELECTIONS)[-3:]
      for layout in ("tp2 pp2 dp2 sp, overlaps, fusions", "recompute full")),
    # What is trained on the first stage has its gradient through the frozen second one.
    ("qwen3_vl", "deepstack mergers alone", "pp2"),
]  # fmt: skip


@pytest.mark.extended("tp2 pp2 dp2 sp, overlaps, fusions")  # text alone has as many ranks above
@pytest.mark.covering
@pytest.mark.parametrize(("family", "selection", "layout"), PICTURE_CASES)
def test_parts_of_vision_language_models(pool, model_dir, plain_steps, tmp_path, family, selection, layout):
    settings = settings_of(PICTURES[layout], selection)
    pool.run(PICTURES[layout].world_size, engine_steps, model_dir(family), settings, tmp_path)
    assert_frozen_and_trained(saved(tmp_path), *plain_steps(family, False, selection))


@pytest.mark.extended(OF_PICTURES[0], OF_PICTURES[6])  # where experts are frozen they hand a gradient on, too
@pytest.mark.parametrize("selection", OF_PICTURES[::3])
def test_parts_of_a_vision_language_model_with_experts(pool, model_dir, plain_steps, tmp_path, selection):
    settings = settings_of(EXPERT_LAYOUTS["ep2"], selection)
    pool.run(2, engine_steps, model_dir("qwen3_vl_moe"), settings, tmp_path)
    assert_frozen_and_trained(saved(tmp_path), *plain_steps("qwen3_vl_moe", False, selection))


@pytest.mark.extended("tp2 pp2 dp2 sp, overlaps, fusions")  # stages alone differ in what they hold
@pytest.mark.parametrize("layout", ["1", "pp2", "tp2 pp2 dp2 sp, overlaps, fusions"])
def test_parts_have_learning_rates_of_their_own(pool, model_dir, plain_steps, tmp_path, layout):
    """On a stage without an encoder, too, all ranks have the same groups of parameters."""
    settings = settings_of(PICTURES[layout], "frozen: nothing", **RATES)
    pool.run(PICTURES[layout].world_size, engine_steps, model_dir("qwen3_vl"), settings, tmp_path)
    assert_frozen_and_trained(saved(tmp_path), *plain_steps("qwen3_vl", False, "frozen: nothing", **RATES))
