"""What an operator asks of a GPU: the host waits for it once, also for what recomputation finds again, and it has a
kernel that adds in one order."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS
from settings_gradients import measure_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from megatune.bridge.assemble import assemble
from megatune.engine import device, optimizer, step
from megatune.engine.layers import cross_entropy
from megatune.engine.layers.moe import dispatcher
from megatune.engine.layers.moe.dispatcher import caching_host_values, host_values
from megatune.objectives.choose import CrossEntropy
from megatune.verify.measure import shard_samples
from megatune.verify.samples import random_samples


@pytest.fixture
def asked(monkeypatch):
    """How often a tensor's values were asked for."""
    counts: list[int] = []
    usual = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (counts.append(tensor.numel()), usual(tensor))[1])
    return counts


def test_a_second_run_takes_the_answers_of_the_first(asked):
    run = caching_host_values(lambda values: (host_values(values), host_values(values.sum())))
    assert run(torch.tensor([1, 2])) == run(torch.tensor([3, 4])) == ([1, 2], 3)
    assert asked == [2, 1]
    assert host_values(torch.tensor([5])) == [5]  # outside nothing is kept
    assert caching_host_values(host_values)(torch.tensor([6])) == [6]
    assert asked == [2, 1, 1, 1]


def test_runs_inside_of_runs_have_answers_of_their_own(asked):
    def outer(values):
        inner = caching_host_values(host_values)
        return host_values(values[0]), inner(values), inner(values), host_values(values[1])

    run = caching_host_values(outer)
    assert run(torch.tensor([1, 2])) == (1, [1, 2], [1, 2], 2)
    assert run(torch.tensor([1, 2])) == (1, [1, 2], [1, 2], 2)
    assert asked == [1, 2, 1, 2]


def waits_of_dispatchers(model, settings):
    """On a rank: how often dispatchers wait for the device in a forward and backward pass, and the gradients."""
    waits: list[int] = []
    usual = dispatcher.Tensor.tolist
    # Whatever else asks a tensor for its values is not in this module.
    dispatcher.Tensor.tolist = lambda tensor: (_is_asked_here() and waits.append(1), usual(tensor))[1]
    try:
        _, gradients, _ = measure_gradients(model, settings, cross_entropy.CHUNK_BYTES)
    finally:
        dispatcher.Tensor.tolist = usual
    return len(waits), gradients


def _is_asked_here() -> bool:
    return sys._getframe(2).f_code is dispatcher._cached.__code__


def copies_of_counts(model, settings) -> list[bool]:
    """On a rank: of each copy of the experts' counts to the host, whether it began in the backward pass."""
    found: list[bool] = []
    usual = device.HostCopy

    def begun(counts):
        found.append(torch._C._current_graph_task_id() != -1)
        return usual(counts)

    device.HostCopy = begun
    try:
        waits_of_a_step(model, settings)
    finally:
        device.HostCopy = usual
    return found


RECOMPUTE = pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["full", "moe"],
)


@RECOMPUTE
def test_counts_for_gradients_are_on_their_way_in_the_forward_pass(pool, model_dir, recompute):
    fused = replace(EXPERT_LAYOUTS["ep2"], performance={"gradient_accumulation_fusion": True}, recompute=recompute)
    for begun in pool.run(fused.world_size, copies_of_counts, model_dir("qwen3_moe"), fused.settings()):
        assert begun
        assert not any(begun)


@RECOMPUTE
def test_recomputed_experts_wait_as_often_as_others(pool, model_dir, recompute):
    model, layout = model_dir("qwen3_moe"), EXPERT_LAYOUTS["ep2"]
    (waits, plain), (again, recomputed) = (
        pool.run(layout.world_size, waits_of_dispatchers, model, replace(layout, recompute=each).settings())[0]
        for each in ({}, recompute)
    )
    assert again == waits > 0
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in plain.items())


# Of labels before they are sent, and of the CPU's random numbers.
HOST_ONLY = ("sequences.py:local_batch", "random.py:fork")


class Waits(TorchDispatchMode):
    """Where operators ask for a value of a tensor, or for as many elements as its values say: a GPU's host waits."""

    asked = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(name.startswith(each) for each in self.asked) and "output_size" not in (kwargs or {}):
            places = [f"{one.filename}:{one.name}" for one in traceback.extract_stack()]
            if not any(host in place for place in places for host in HOST_ONLY):
                self.found.append(next(place for place in reversed(places) if "megatune/engine" in place))
        return func(*args, **(kwargs or {}))


def waits_of_a_step(model, settings) -> tuple[list[str], list[str]]:
    """On a rank: waits of the forward and backward passes, and of the update."""
    assembly = assemble(model, settings)
    batches = shard_samples(random_samples(301, [9, 16, 12, 7]), assembly.coords, settings.parallel)
    found = []
    for run in (
        lambda: step.forward_backward(assembly.model, batches, CrossEntropy()),
        lambda: optimizer.step(assembly.optimizer, 1e-3),
    ):
        with Waits() as waits:
            run()
        found.append(waits.found)
    return found[0], found[1]


class Refused(TorchDispatchMode):
    """Operators of which torch has no deterministic kernel for GPUs, by `torch.use_deterministic_algorithms`."""

    names = (
        *("put_", "histc", "median", "nll_loss", "scatter_reduce", "adaptive_avg_pool", "avg_pool3d", "grid_sampler"),
        *("upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear", "reflection_pad"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(name.startswith(each) for each in self.names) or (name == "cumsum" and args[0].is_floating_point()):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def refused_operators(model, settings) -> list[str]:
    """On a rank: operators of a step that deterministic_mode would refuse on a GPU, which is asked to be so."""
    usual, asked = device.set_deterministic, []
    device.set_deterministic = asked.append
    try:
        assembly = assemble(model, settings)
    finally:
        device.set_deterministic = usual
    assert asked == [True]
    assert all(chunk.config.deterministic_mode for chunk in assembly.model)  # of Megatron-Core's embedding
    batches = shard_samples(random_samples(301, [9, 16, 12, 7]), assembly.coords, settings.parallel)
    with Refused() as refused:
        step.forward_backward(assembly.model, batches, CrossEntropy())
        optimizer.step(assembly.optimizer, 1e-3)
    return refused.found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_every_operator_of_a_step_has_a_deterministic_kernel(pool, model_dir, family):
    chosen = replace(LAYOUTS["1"], performance={"deterministic_mode": True})
    assert pool.run(1, refused_operators, model_dir(family), chosen.settings()) == [[]]


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "tp2 sp"), ("qwen3_moe", "ep2")])
def test_a_step_lets_the_host_wait_once_for_its_norm(pool, model_dir, family, layout):
    """What `host_values` asks for of experts is counted above."""
    chosen = {**LAYOUTS, **EXPERT_LAYOUTS}[layout]
    for passes, update in pool.run(chosen.world_size, waits_of_a_step, model_dir(family), chosen.settings()):
        assert passes == [], "\n".join(passes)
        assert [each.rpartition(":")[2] for each in update] == ["step"]
