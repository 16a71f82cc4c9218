"""Models in steps: several on the same ranks, frozen or trained, with and without an optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bridging import assert_same_bits, save_all, tensors
from layouts import LAYOUTS, MORE_LAYOUTS, Layout
from live_bytes import LiveBytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatune.bridge.assemble import Assembly, LoadedModel, assemble, attach_optimizer, load_model
from megatune.bridge.export import export_weights
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.engine.optimizer import load_scalars, scalars, step
from megatune.engine.step import logits
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

ALL = {**LAYOUTS, **MORE_LAYOUTS}
SAMPLES = random_samples(301, (9, 16, 12, 7, 11, 5, 8, 10))


def gradients(loaded: LoadedModel) -> list[Tensor]:
    return [local.parameter.main_grad.clone() for local in loaded.parameters if local.parameter.requires_grad]


def train_beside(model: Path, reference: Path, settings: Settings) -> tuple[list[str], dict[str, Tensor]]:
    """On every rank: what goes wrong when a frozen model computes between the steps of a trained one, and the frozen
    model's weights at the end."""
    policy = assemble(model, settings)
    batches = shard_samples(SAMPLES, policy.coords, settings.parallel)
    losses, steps = [], []
    for _ in range(2):
        losses.append(measure_loss(policy, batches))
        steps.append(gradients(policy))
        assert step(policy.optimizer, 1e-2)[0]

    coords = policy.coords
    policy = attach_optimizer(load_model(model, settings, coords), settings)
    frozen = load_model(reference, settings, coords, trained=False)
    hooks = ("grad_sync_func", "no_sync_func", "param_sync_func", "grad_scale_func")
    wrong = [name for name in hooks if getattr(frozen.model[0].config, name) is not None]
    wrong += ["buffers" for chunk in frozen.model if chunk.buffers or chunk.expert_parallel_buffers]
    wrong += ["trained" for local in frozen.parameters if local.parameter.requires_grad]
    first = logits(frozen.model, batches)
    for loss, expected in zip(losses, steps, strict=True):
        if measure_loss(policy, batches) != loss:
            wrong.append("loss")
        seen = logits(frozen.model, batches)
        if not all(torch.equal(one, other) for one, other in zip(seen, first, strict=True)):
            wrong.append("logits of the frozen model")
        if not all(torch.equal(one, other) for one, other in zip(gradients(policy), expected, strict=True)):
            wrong.append("gradients")
        step(policy.optimizer, 1e-2)
    if any(output.requires_grad or not output.any() for output in first):
        wrong.append("a graph, or nothing computed")
    return wrong, dict(export_weights(frozen, [0]))


@pytest.mark.covering
@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("tp2 sp", "qwen3"),
        ("pp2", "llama"),
        ("pp2 vpp2", "qwen3_moe"),
        ("dp2, grad overlap", "qwen3"),
        ("tp2 pp2 dp2 sp, overlaps, fusions", "qwen3"),
    ],
)
def test_a_frozen_model_beside_a_trained_one(pool, model_dir, tmp_path, layout, reference):
    """Of other weights, or of another architecture: the trained one's losses and gradients are those it has alone."""
    other = tmp_path / "reference"
    other.mkdir()
    for file in model_dir(reference).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = {name: tensor * 0.9 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors")
    found = pool.run(ALL[layout].world_size, train_beside, model_dir("qwen3"), other, ALL[layout].settings())
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert_same_bits(found[0][1], weights)


def train_two(models: list[Path], settings: Settings) -> bool:
    """On every rank: whether two models trained in turn have the gradients that each has alone."""
    coords = build(settings.parallel, seed=0, timeout=30)
    batches = shard_samples(SAMPLES, coords, settings.parallel)

    def compute(assemblies: list) -> list[list[Tensor]]:
        found = []
        for _ in range(2):
            for assembly in assemblies:
                measure_loss(assembly, batches)
            found += [gradients(assembly) for assembly in assemblies]
            assert all(step(assembly.optimizer, 1e-2)[0] for assembly in assemblies)
        return found

    def fresh(index: int) -> Assembly:
        made = attach_optimizer(load_model(models[index], settings, coords), settings)
        load_scalars(made.optimizer, scalars(made.optimizer) | {"loss_scale": 2.0 ** (10 + index)})
        return made

    one, other = (compute([fresh(index)]) for index in range(2))
    both = compute([fresh(index) for index in range(2)])
    expected = [one[0], other[0], one[1], other[1]]
    return all(torch.equal(a, b) for x, y in zip(both, expected, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_trained_models(pool, model_dir, layout):
    """Each with a loss scale of its own."""
    models = [model_dir("qwen3"), model_dir("qwen2", tied=True)]
    settings = ALL[layout].settings(precision={"fp16": True})
    assert pool.run(2, train_two, models, settings) == [True, True]


def without_optimizer(model: Path, settings: Settings, folder: Path) -> bool:
    """On every rank: whether a model without an optimizer computes the gradients that it has with one."""
    assembly = assemble(model, settings)
    batches = shard_samples(SAMPLES, assembly.coords, settings.parallel)
    alone = load_model(model, settings, assembly.coords)
    loss = measure_loss(assembly, batches)
    same = measure_loss(alone, batches) == loss
    save_all(assembly, folder)
    return same and all(torch.equal(*pair) for pair in zip(gradients(alone), gradients(assembly), strict=True))


def test_a_model_without_optimizer(pool, model_dir, tmp_path):
    (tmp_path / "training").mkdir()
    assert all(pool.run(2, without_optimizer, model_dir("qwen3"), ALL["tp2 sp"].settings(), tmp_path))
    assert_same_bits(tensors(tmp_path), tensors(model_dir("qwen3")))


def loading_bytes(model: Path, settings: Settings, trained: bool) -> tuple[int, int]:
    """On every rank: the most bytes of tensors while a model is built and loaded, and bytes of its parameters."""
    coords = build(settings.parallel, seed=0, timeout=30)
    with LiveBytes() as found:
        loaded = load_model(model, settings, coords, trained=trained)
    return found.peak, sum(local.parameter.nbytes for local in loaded.parameters)


@pytest.mark.parametrize("layout", ["dp2", "pp2 vpp2 dp2"])
@pytest.mark.parametrize("trained", [True, False])
def test_parameters_are_in_memory_once(pool, model_dir, layout, trained):
    """Beside them are only the gradients' buffers, fp32, and a checkpoint's tensor that is being read."""
    model = model_dir("qwen3", vocab_size=1000)
    chosen = Layout(4, LAYOUTS["pp2 vpp2"].parallel) if layout == "pp2 vpp2 dp2" else LAYOUTS[layout]
    settings = chosen.settings(precision={"bf16": True})
    for peak, parameters in pool.run(chosen.world_size, loading_bytes, model, settings, trained):
        assert peak <= (3 if trained else 1) * parameters * 1.1 + 4 * 1000 * 64
