"""Optimizer steps from a Hugging Face checkpoint, saved, against the same steps by Transformers and torch.optim.

Several micro-batches a step, with uneven numbers of trained tokens. A difference is measured against the norm of the
tensor's update: at most 1e-3 with Adam, whose first step is the sign of the gradient and so magnifies rounding where
gradients vanish, at most 1e-5 with SGD.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, SEQUENCE_LAYOUTS, Layout
from safetensors.torch import load_file
from saving import save_weights
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.assemble import Assembly, assemble
from megatune.config.settings import Settings
from megatune.data.batches import Batch
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import step
from megatune.families import load_architecture
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.reference import checkpoint_tensors, compute_reference, load_reference_model
from megatune.verify.samples import Sample, random_media, random_samples

FAMILIES = ("llama", "qwen2", "qwen3")
ROWS = 4  # of a step, in twice as few micro-batches
# Where four would not do: with virtual stages and two data-parallel ranks there are more micro-batches than stages.
MANY_ROWS = 8

# fp32 rounds a weight w to within |w| · 6e-8. Learning rates are such that updates are large against that: about 1 % of
# a weight with Adam, of the weights' own size with SGD, whose tolerance is closer.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 0.5,
    },
    "sgd": {
        "optimizer": "sgd",
        "learning_rate": 10.0,
        "weight_decay": 0.01,
        "sgd_momentum": 0.9,
        "max_grad_norm": 1.0,
    },
}
# Gradients may vanish by chance: of tied qwen3's layers.3.self_attn.v_proj one has a gradient of 5.5e-11 (in fp64,
# with a root mean square of 1.8e-3), where fp32 rounds by 1e-9, in Transformers as in the engine. With an epsilon of
# 1e-8 rounding decides its first update, which alone makes up 4e-3 of the tensor's; an epsilon above the rounding keeps
# such elements out of it.
OPTIMIZERS["adam, larger epsilon"] = OPTIMIZERS["adam"] | {"adam_epsilon": 1e-6}
OPTIMIZERS["adam, on the host"] = OPTIMIZERS["adam, larger epsilon"] | {"optimizer_cpu_offload": True}
# Five steps of the iteration multiply rounding by up to 3.4 each where singular values are small.
OPTIMIZERS["muon"] = OPTIMIZERS["adam, larger epsilon"] | {"optimizer": "muon", "muon_momentum": 0.9, "muon_scale": 0.3}
# What scales a router is near 1 and has a small gradient: by SGD's rate its update of 5e-3 (a norm, of weights with 8)
# is rounded by 4e-5, in Transformers as in the engine, and both are as far from fp64.
OPTIMIZERS["sgd, larger rate"] = OPTIMIZERS["sgd"] | {"learning_rate": 1000.0}
TOLERANCES = {name: 1e-5 if settings["optimizer"] == "sgd" else 1e-3 for name, settings in OPTIMIZERS.items()}


def step_samples(index: int, architecture: Architecture, rows: int = ROWS) -> list[Sample]:
    """The rows of one step, of lengths that no other step has; with pictures where the model takes any."""
    lengths, vision = [17 + index, 5, 30, 25 - index], architecture.vision
    if rows > ROWS:
        lengths = [17 + index, 5, 30, 12, 9, 25 - index, 21, 8]
    media = random_media(len(lengths), vision) if vision is not None else ()
    return random_samples(301, lengths, seed=index, media=media, vision=vision)


@pytest.fixture(scope="module")
def plain_steps(model_dir) -> Iterator[Any]:
    """Weights before and after steps by Transformers and torch.optim, computed once for each case."""
    made: dict[Any, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def make(
        family: str, tied: bool, optimizer: str, num_steps: int, rows: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        key = (family, tied, optimizer, num_steps, rows)
        if key not in made:
            made[key] = _plain_steps(model_dir(family, tied=tied), OPTIMIZERS[optimizer], num_steps, rows)
        return made[key]

    return make


def _plain_steps(
    model_dir: Path, settings: dict[str, Any], num_steps: int, rows: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = load_reference_model(model_dir, torch.float32)
    before = _checkpoint_copy(model)
    # Neither norms nor biases decay; those of experts are in one tensor.
    decays = {name: p.dim() > 1 and not name.endswith("_bias") for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays[name] is is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, settings["weight_decay"]), (False, 0.0))
    ]
    averages = {
        name: torch.zeros_like(p)
        for name, p in model.named_parameters()
        if settings["optimizer"] == "muon" and is_orthogonalized(name, p)
    }
    others = {p for name, p in model.named_parameters() if name not in averages}
    for group in groups:
        group["params"] = [one for one in group["params"] if one in others]
    if settings["optimizer"] != "sgd":
        betas = (settings["adam_beta1"], settings["adam_beta2"])
        optimizer = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["adam_epsilon"])
    else:
        optimizer = torch.optim.SGD(groups, settings["learning_rate"], settings["sgd_momentum"])
    for index in range(num_steps):
        compute_reference(model, step_samples(index, load_architecture(model_dir), rows))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        assert norm > settings["max_grad_norm"], "the step is to be clipped"
        optimizer.step()
        for name, average in averages.items():
            muon_step(name, model.get_parameter(name), average, settings)
        model.zero_grad()
    return before, _checkpoint_copy(model)


def is_orthogonalized(name: str, parameter: Tensor) -> bool:
    """Whether Muon has the parameter: a matrix, or experts', but no embedding, output layer or router."""
    others = (
        "embed_tokens.weight",
        "pos_embed.weight",
        "lm_head.weight",
        "mlp.gate.weight",
        "router.proj.weight",
        "shared_expert_gate.weight",
    )
    is_matrix = parameter.dim() == 2 or name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    return is_matrix and not name.endswith(others)


@torch.no_grad()
def muon_step(name: str, parameter: Tensor, average: Tensor, settings: dict[str, Any]) -> None:
    """Muon as torch.optim.Muon computes it, but in fp32, of one matrix or of each that Transformers has stacked."""
    momentum, rate = settings["muon_momentum"], settings["learning_rate"]
    average.mul_(momentum).add_(parameter.grad, alpha=1 - momentum)
    update = momentum * average + (1 - momentum) * parameter.grad
    parameter.mul_(1 - rate * settings["weight_decay"])
    for weights, matrix in zip(matrices_in(name, parameter), matrices_in(name, update), strict=True):
        scale = settings["muon_scale"] * max(matrix.shape) ** 0.5
        weights.sub_(orthogonalized(matrix), alpha=rate * scale)


def matrices_in(name: str, stacked: Tensor) -> list[Tensor]:
    """Views of the matrices of a parameter: experts are stacked, their gates above their ups."""
    if stacked.dim() == 2:
        return [stacked]
    return [one for expert in stacked for one in (expert.chunk(2) if name.endswith("gate_up_proj") else [expert])]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Keller Jordan's iteration: x ← a x + (b x xᵀ + c (x xᵀ)²) x, five times, from x of norm 1."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def _checkpoint_copy(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, named and cut as in the checkpoint."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model, parameters).items()}


def step_batches(index: int, assembly: Assembly, settings: Settings, rows: int = ROWS) -> list[Batch]:
    """This rank's micro-batches of a step: half as many as there are rows, but one where four data-parallel ranks share
    four rows."""
    accumulation = min(rows // 2, rows // assembly.coords.dp_size)
    size = rows // (accumulation * assembly.coords.dp_size)
    samples, vision = step_samples(index, assembly.architecture, rows), assembly.architecture.vision
    batches = shard_samples(samples, assembly.coords, settings.parallel, micro_batch_size=size, vision=vision)
    assert len(batches) == accumulation
    return batches


def engine_steps(model_dir: Path, settings: Settings, num_steps: int, rows: int, folder: Path) -> None:
    """On every rank."""
    assembly = assemble(model_dir, settings)
    for index in range(num_steps):
        measure_loss(assembly, step_batches(index, assembly, settings, rows))
        updated, _ = step(assembly.optimizer, settings.optimizer.learning_rate)
        assert updated
    gather_parameters(assembly.model)
    save_weights(folder, assembly.parameters, assembly.architecture, assembly.coords, form=assembly.form)


def saved(folder: Path) -> dict[str, Tensor]:
    """The trained tensors of a checkpoint: all but the bias by which experts are chosen, and scalars of layers."""
    buffers = ("e_score_correction_bias", "layer_scalar")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}


def update_errors(before: dict[str, Tensor], expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """‖found - expected‖ / ‖expected - before‖ of each tensor; of the keys of an encoder weight and bias are one, since
    the gradient of a bias of keys that are not turned is nothing but rounding."""
    assert found.keys() == expected.keys()
    norms: dict[str, tuple[float, float]] = {}
    for name, after in expected.items():
        together = re.sub(r"(vision_tower\..*\.k_proj)\.(weight|bias)$", r"\1", name)
        gap, moved = norms.get(together, (0.0, 0.0))
        change = (after - before[name]).norm().item()
        norms[together] = math.hypot(gap, (found[name] - after).norm().item()), math.hypot(moved, change)
    return {name: gap / moved if moved else math.nan for name, (gap, moved) in norms.items()}


def assert_same_steps(
    pool, plain_steps, model_dir, layout: Layout, family, tied, optimizer, num_steps, folder, rows: int = ROWS
) -> None:
    settings = layout.settings(optimizer=OPTIMIZERS[optimizer])
    pool.run(layout.world_size, engine_steps, model_dir(family, tied=tied), settings, num_steps, rows, folder)
    errors = update_errors(*plain_steps(family, tied, optimizer, num_steps, rows), saved(folder))
    # NaN is a failure, too.
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCES[optimizer]}


@pytest.mark.extended("llama")  # as qwen2 without biases
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        *(("qwen3", False, layout) for layout in LAYOUTS),
        ("llama", False, "tp2 pp2 dp2 sp"),
        *(("qwen2", True, layout) for layout in ("tp2 sp", "tp2 pp2 dp2 sp")),
    ],
)
def test_one_step_equals_plain_transformers(pool, plain_steps, model_dir, tmp_path, family, tied, layout, optimizer):
    # In few rows the biases of qwen2's keys have gradients that rounding decides about.
    rows = MANY_ROWS if family == "qwen2" else ROWS
    assert_same_steps(pool, plain_steps, model_dir, LAYOUTS[layout], family, tied, optimizer, 1, tmp_path, rows)


# Three steps below have these.
@pytest.mark.extended("tp2 pp2 dp2 sp, overlaps, fusions", "tp2 pp2 vpp2 dp2 sp, overlaps, fusions")
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
@pytest.mark.parametrize(
    "layout",
    ["tp4 sp", "dp2, no distributed optimizer, grad overlap", "tp2 pp2 dp2 sp, overlaps, fusions",
     "tp2 pp2 vpp2 dp2 sp, overlaps, fusions"],
)  # fmt: skip
def test_one_step_in_other_layouts(pool, plain_steps, model_dir, tmp_path, layout, optimizer):
    assert_same_steps(pool, plain_steps, model_dir, MORE_LAYOUTS[layout], "qwen3", False, optimizer, 1, tmp_path)


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "muon", "sgd"])
@pytest.mark.parametrize(
    "layout", ["1", "ep2", "ep2 allgather", "ep2 etp1 tp2 sp", "ep2 pp2", "ep4 dp4", "ep2 pp2 vpp2"]
)
def test_one_step_of_experts(pool, plain_steps, model_dir, tmp_path, layout, optimizer):
    assert_same_steps(pool, plain_steps, model_dir, EXPERT_LAYOUTS[layout], "qwen3_moe", False, optimizer, 1, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", LAYOUTS["1"]), ("qwen3", LAYOUTS["tp2 pp2 dp2 sp"]), ("qwen3_moe", EXPERT_LAYOUTS["ep2"])],
    ids=["one device", "dense", "experts"],
)  # fmt: skip
def test_one_step_on_the_host(pool, plain_steps, model_dir, tmp_path, family, layout):
    assert_same_steps(pool, plain_steps, model_dir, layout, family, False, "adam, on the host", 1, tmp_path)


@pytest.mark.extended("1", "ep2")
@pytest.mark.parametrize("layout", ["1", "ep2", "ep2 pp2", "ep4 dp4"])
def test_one_step_of_experts_with_the_usual_epsilon(pool, plain_steps, model_dir, tmp_path, layout):
    assert_same_steps(pool, plain_steps, model_dir, EXPERT_LAYOUTS[layout], "qwen3_moe", False, "adam", 1, tmp_path)


@pytest.mark.extended("mixtral")  # as qwen3_moe with every layer sparse
@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "optimizer", "num_steps"),
    [
        ("qwen2_moe", "adam, larger epsilon", 3),
        # After a third step at SGD's rate of 10, Transformers is 1.1e-5 from fp64, on some processors.
        ("qwen2_moe", "sgd", 2),
        ("mixtral", "adam, larger epsilon", 3),
        ("mixtral", "sgd", 3),
        ("deepseek_v3", "adam, larger epsilon", 3),
        # By SGD's rate of 10 the updates of its compressed heads' norms are rounded by 1.3e-5 in the first step, in
        # Transformers as in the engine; by a larger one a second step multiplies rounding.
        ("deepseek_v3", "sgd, larger rate", 1),
    ],
)
def test_steps_of_other_families_of_experts(pool, plain_steps, model_dir, tmp_path, family, optimizer, num_steps):
    layout = EXPERT_LAYOUTS["ep2 pp2"]
    assert_same_steps(pool, plain_steps, model_dir, layout, family, False, optimizer, num_steps, tmp_path)


@pytest.mark.extended("ep2 pp2", "sgd")
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
@pytest.mark.parametrize("layout", ["ep2 pp2", "ep2 etp2 tp2 sp"])
def test_a_step_of_experts_with_biases(pool, plain_steps, model_dir, tmp_path, layout, optimizer):
    """The gradient is clipped: its norm has each bias, and each head's sink, once."""
    chosen = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    assert_same_steps(pool, plain_steps, model_dir, chosen, "gpt_oss", False, optimizer, 1, tmp_path)


@pytest.mark.extended("gemma4_text", "adam, larger epsilon", "sgd, larger rate")  # Muon has Adam for what is no matrix
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "muon", "sgd, larger rate"])
@pytest.mark.parametrize(("family", "layout"), [("gemma4_text", "tp2 sp"), ("gemma4_text_moe", "ep2 etp2 tp2 sp")])
def test_a_step_of_heads_of_two_sizes(pool, plain_steps, model_dir, tmp_path, family, layout, optimizer):
    """A router's scales have a gradient on every tensor-parallel rank, and what scales a layer stays."""
    chosen = {**LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    # In few rows what scales a router has a gradient that nearly cancels.
    assert_same_steps(pool, plain_steps, model_dir, chosen, family, False, optimizer, 1, tmp_path, MANY_ROWS)


@pytest.mark.extended("cp2 pp2")
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("layout", ["cp2 p2p", "cp2 tp2 sp", "cp2 pp2"])
def test_one_step_under_context_parallelism(pool, plain_steps, model_dir, tmp_path, layout, optimizer):
    assert_same_steps(pool, plain_steps, model_dir, SEQUENCE_LAYOUTS[layout], "qwen3", False, optimizer, 1, tmp_path)


@pytest.mark.extended("adam, larger epsilon")  # with it the model with pictures below
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
def test_three_steps_of_experts_with_every_overlap(pool, plain_steps, model_dir, tmp_path, optimizer):
    layout = MORE_EXPERT_LAYOUTS["ep2 pp2 dp4, overlaps, fusions"]
    layout = replace(layout, world_size=4)  # the batch has four rows: dp 2
    assert_same_steps(pool, plain_steps, model_dir, layout, "qwen3_moe", False, optimizer, 3, tmp_path)


@pytest.mark.extended("tp2 pp2 dp2 sp")  # with overlaps below
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "muon", "sgd"])
@pytest.mark.parametrize("layout", ["tp2 sp", "tp2 pp2 dp2 sp", "tp2 pp2 vpp2"])
def test_three_steps_in_a_row(pool, plain_steps, model_dir, tmp_path, layout, optimizer):
    """Gradients start from zero at each step, and the optimizer goes on from its state."""
    assert_same_steps(pool, plain_steps, model_dir, LAYOUTS[layout], "qwen3", True, optimizer, 3, tmp_path)


@pytest.mark.extended("adam, larger epsilon")  # with it the model with pictures below
@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
def test_three_steps_with_every_overlap(pool, plain_steps, model_dir, tmp_path, optimizer):
    """Updated parameters arrive during the next forward pass."""
    layout = MORE_LAYOUTS["tp2 pp2 vpp2 dp2 sp, overlaps, fusions"]
    assert_same_steps(pool, plain_steps, model_dir, layout, "qwen3", True, optimizer, 3, tmp_path, MANY_ROWS)


# qwen3_vl is below, with overlaps, and beside its encoder the decoders of these are above.
@pytest.mark.extended("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl", "tp2 pp2 dp2 sp")
@pytest.mark.covering
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "dp2, no distributed optimizer, grad overlap", "tp2 pp2 dp2 sp"])
@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3", "gemma3", "internvl"],
)
def test_one_step_with_pictures(pool, plain_steps, model_dir, tmp_path, family, layout):
    """Encoder, mergers and decoder, under the names and arrangement of the checkpoint."""
    chosen = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    assert_same_steps(pool, plain_steps, model_dir, chosen, family, False, "adam, larger epsilon", 1, tmp_path)


@pytest.mark.extended("tp2 pp2 dp2 sp")
@pytest.mark.parametrize("layout", ["1", "tp2 pp2 dp2 sp"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_a_step_of_muon_with_pictures(pool, plain_steps, model_dir, tmp_path, family, layout):
    """Neither patches and positions of the encoder are orthogonalized, nor the convolution of a gated delta net."""
    assert_same_steps(pool, plain_steps, model_dir, LAYOUTS[layout], family, False, "muon", 1, tmp_path)


def test_three_steps_with_pictures_and_every_overlap(pool, plain_steps, model_dir, tmp_path):
    layout = MORE_LAYOUTS["tp2 pp2 dp2 sp, overlaps, fusions"]
    assert_same_steps(pool, plain_steps, model_dir, layout, "qwen3_vl", True, "adam, larger epsilon", 3, tmp_path)
