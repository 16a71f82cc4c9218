"""Adam's state on the host: master weights and averages are those of the device to the bit, and a resume goes on.

Here the device is a CPU, too: what is shown is that each piece comes, is updated and goes back in its turn, and that
nothing of the state is on the device. That copies and computing wait for each other as they must on a GPU is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bridging import assert_same_bits, save_all, tensors
from layouts import EXPERT_LAYOUTS, LAYOUTS, Layout

from megatune.bridge.assemble import Assembly, assemble, attach_optimizer, load_model, load_optimizer
from megatune.config.settings import Settings
from megatune.engine import adam
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import load_scalars, main_shards, scalars, step
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

HOST = {"optimizer_cpu_offload": True}
STEPS = 3
CASES = {"dense": ("qwen3", LAYOUTS["dp2"]), "experts": ("qwen3_moe", EXPERT_LAYOUTS["ep2"])}
BF16 = {"bf16": True}


def train(assembly: Assembly, settings: Settings, steps: range) -> None:
    for index in steps:
        samples = random_samples(301, [9 + index, 16, 12, 7], seed=index)
        measure_loss(assembly, shard_samples(samples, assembly.coords, settings.parallel))
        assert step(assembly.optimizer, 1e-3)[0]
    gather_parameters(assembly.model)


def whole(model: Path, settings: Settings, folder: Path) -> None:
    """On every rank: twice as many steps, at once; pieces are so small that most parameters have several."""
    adam.PIECE, before = 1024, adam.PIECE
    try:
        assembly = assemble(model, settings)
        train(assembly, settings, range(2 * STEPS))
        save_all(assembly, folder)
    finally:
        adam.PIECE = before


def halves(model: Path, settings: Settings, folder: Path, halfway: Path) -> None:
    """On every rank: the same, with a new model and optimizer in the middle."""
    assembly = assemble(model, settings)
    train(assembly, settings, range(STEPS))
    save_all(assembly, halfway)
    counters = scalars(assembly.optimizer)
    torch.distributed.barrier()
    resumed = attach_optimizer(load_model(halfway, settings, assembly.coords), settings)
    state = resumed.parameters, main_shards(resumed.optimizer), resumed.architecture, settings.finetuning
    load_optimizer(halfway, *state)
    load_scalars(resumed.optimizer, counters)
    train(resumed, settings, range(STEPS, 2 * STEPS))
    save_all(resumed, folder)


def folder(tmp_path: Path, model: Path, name: str) -> Path:
    (tmp_path / name / "training").mkdir(parents=True)
    (tmp_path / name / "config.json").write_text((model / "config.json").read_text())
    return tmp_path / name


@pytest.mark.covering
@pytest.mark.parametrize("precision", [{}, BF16, BF16 | {"accumulate_allreduce_grads_in_fp32": False}],
                         ids=["fp32", "bf16", "bf16 gradients"])  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_steps_and_a_resume_on_the_host_are_those_of_the_device(pool, model_dir, tmp_path, case, precision):
    family, layout = CASES[case]
    model = model_dir(family)
    places = {name: folder(tmp_path, model, name) for name in ("device", "host", "resumed", "halfway")}

    def run(target: Any, optimizer: dict[str, Any], *names: str) -> None:
        settings = layout.settings(optimizer, precision)
        pool.run(layout.world_size, target, model, settings, *(places[name] for name in names))

    run(whole, {}, "device")
    run(whole, HOST, "host")
    run(halves, HOST, "resumed", "halfway")
    for part in (".", "training"):
        expected = tensors(places["device"] / part)
        assert_same_bits(tensors(places["host"] / part), expected)
        assert_same_bits(tensors(places["resumed"] / part), expected)
        assert expected


def held(model: Path, settings: Settings) -> tuple[set[bool], set[bool]]:
    """On a rank: whether master weights are other memory than the model's, and whether the optimizer's parameters are
    the model's own."""
    assembly = assemble(model, settings)
    of_model = {local.parameter.untyped_storage().data_ptr() for local in assembly.parameters}
    masters = {
        shard.main.untyped_storage().data_ptr() in of_model for shard in main_shards(assembly.optimizer).values()
    }
    groups = (group for part in assembly.optimizer.chained_optimizers for group in part.optimizer.param_groups)
    return masters, {param.untyped_storage().data_ptr() in of_model for group in groups for param in group["params"]}


@pytest.mark.parametrize(("offload", "own"), [(HOST, True), ({}, False)], ids=["host", "device"])
def test_no_master_weight_is_made_on_the_device(pool, model_dir, offload, own):
    """Megatron-Core makes them there first, unless the optimizer says that it holds them."""
    for layout in (LAYOUTS["dp2"], Layout(1)):
        ranks = pool.run(layout.world_size, held, model_dir("qwen3"), layout.settings(offload, BF16))
        assert ranks == [({False}, {own})] * layout.world_size
