"""Three optimizer steps with a part of the model frozen: what is frozen stays as it was, bit for bit, and what is
trained becomes what Transformers and torch.optim make of it with the same parameters frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, SEQUENCE_LAYOUTS, Layout
from safetensors.torch import load_file
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.save import save_weights
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine.model import gather_parameters
from megatune.training.train_step import train_step
from megatune.verify.measure import shard_samples
from megatune.verify.reference import checkpoint_tensors, compute_reference, load_reference_model
from megatune.verify.samples import Sample, random_samples

STEPS, ROWS, ACCUMULATION = 3, 8, 4
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


def trained_by_llamafactory(name: str, settings: FinetuningSettings) -> bool:
    """LLaMA-Factory's _setup_freeze_tuning (model/adapter.py) for a parameter of Transformers, by whole modules."""
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


def step_samples(index: int) -> list[Sample]:
    return random_samples(301, [17 + index, 5, 30, 12, 9, 25 - index, 21, 8], seed=index)


Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain_steps(model_dir) -> Iterator[Callable[..., tuple[Tensors, Tensors, set[str]]]]:
    """Weights before and after the steps by Transformers, and the names of those that are trained; computed once."""
    made: dict[Any, tuple[Tensors, Tensors, set[str]]] = {}

    def make(family: str, tied: bool, selection: str) -> tuple[Tensors, Tensors, set[str]]:
        key = family, tied, selection
        if key not in made:
            made[key] = _plain_steps(model_dir(family, tied=tied), FinetuningSettings(**SELECTIONS[selection]))
        return made[key]

    return make


def _plain_steps(model_dir: Path, selection: FinetuningSettings) -> tuple[Tensors, Tensors, set[str]]:
    model = load_reference_model(model_dir, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained_by_llamafactory(name, selection))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = checkpoint_tensors(model, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    before = _copy(model)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": ADAM["weight_decay"]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, ADAM["learning_rate"], (0.9, ADAM["adam_beta2"]), ADAM["adam_epsilon"])
    for index in range(STEPS):
        compute_reference(model, step_samples(index))
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
    save_weights(folder, assembly.parameters, assembly.architecture, assembly.place)
    parameters = [local.parameter for local in assembly.parameters]
    with_gradient = [one for one in parameters if hasattr(one, "main_grad")]
    assert with_gradient == [one for one in parameters if one.requires_grad]
    return sum(one.numel() for one in with_gradient)


def train(assembly: Assembly, settings: Settings, index: int, *, checked: bool = False) -> None:
    accumulation = min(ACCUMULATION, ROWS // assembly.place.dp_size)
    rows = ROWS // (accumulation * assembly.place.dp_size)
    packed = settings.data.packing
    batches = shard_samples(
        step_samples(index), assembly.place, settings.parallel, micro_batch_size=rows, packed=packed
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
    errors = {
        name: ((found[name] - after[name]).norm() / (after[name] - before[name]).norm()).item() for name in trained
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
    "dp2, whole optimizer, grad overlap": MORE_LAYOUTS["dp2, whole optimizer, grad overlap"],
    "tp2 pp2 vpp2 dp2 sp, overlaps, fusions": MORE_LAYOUTS["tp2 pp2 vpp2 dp2 sp, overlaps, fusions"],
    "cp2 p2p": SEQUENCE_LAYOUTS["cp2 p2p"],
    **{f"recompute {name}": Layout(1, recompute=recompute) for name, recompute in RECOMPUTED.items()},
    "pp2, recompute full": Layout(2, _PP2, recompute=FULL),
}
CASES = [
    *(("qwen3", True, "last layer and words", layout) for layout in DENSE),
    *(("qwen3", True, "last layer", layout) for layout in DENSE),
    *(("qwen3", True, "first layer", layout) for layout in ("pp2 vpp2", "tp2 pp2 vpp2 dp2 sp, overlaps, fusions")),
    *(("qwen2", False, "feed-forward of the last three", layout) for layout in DENSE if "recompute" in layout),
    *(("qwen2", False, "all layers", layout) for layout in DENSE if "recompute" in layout),
    *(("qwen2", False, selection, layout) for selection in SELECTIONS for layout in ("1", "pp2 vpp2")),
]


@pytest.mark.parametrize(("family", "tied", "selection", "layout"), CASES)
def test_frozen_weights_stay_and_the_others_are_trained(
    pool, model_dir, plain_steps, tmp_path, family, tied, selection, layout
):
    settings = settings_of(DENSE[layout], selection)
    pool.run(DENSE[layout].world_size, engine_steps, model_dir(family, tied=tied), settings, tmp_path)
    assert_frozen_and_trained(saved(tmp_path), *plain_steps(family, tied, selection))


EXPERTS = {
    **{name: EXPERT_LAYOUTS[name] for name in ("1", "ep2", "ep2 etp1 tp2 sp", "ep2 pp2 vpp2")},
    "ep2 pp2 dp4, overlaps, fusions": MORE_EXPERT_LAYOUTS["ep2 pp2 dp4, overlaps, fusions"],
    "recompute full": Layout(1, recompute=FULL),
}


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
