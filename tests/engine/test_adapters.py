"""Adapters in the engine: off they are not there, ranks that hold copies agree, and faults of others are seen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, Layout
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from pool import RankPool

from megatune.bridge.assemble import Assembly, assemble, load_model
from megatune.bridge.parameters import LocalParameter
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine import model as building
from megatune.engine import patches, step
from megatune.engine.layers.adapter import Adapter, without_adapters
from megatune.engine.optimizer import main_shards
from megatune.engine.optimizer import step as optimizer_step
from megatune.errors import ExitCode, MegatuneError
from megatune.families.weights import Role
from megatune.training.train_step import check_gradients, check_weights
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import random_samples

LENGTHS = (17, 5, 30, 12)
ALL = {**LAYOUTS, **MORE_LAYOUTS, **MORE_EXPERT_LAYOUTS, "ep2": EXPERT_LAYOUTS["ep2"]}


def settings_of(layout: Layout, **finetuning: Any) -> Settings:
    lora = FinetuningSettings(finetuning_type="lora", **{"lora_rank": 4, **finetuning})
    # An epsilon above fp32's rounding, as in tests/parity/test_one_step.py.
    optimizer = {"learning_rate": 1e-3, "adam_epsilon": 1e-6, "max_grad_norm": 0.1}
    return layout.settings(optimizer).model_copy(update={"finetuning": lora})


def with_random_b(model: Path, settings: Settings) -> Assembly:
    """B starts at zero, where no gradient of A could be seen."""
    assembly = assemble(model, settings)
    for local in assembly.parameters:
        if local.weight.engine.endswith("lora_B"):
            # Every rank makes the whole matrix, and takes its part of it.
            fill(local, assembly, seed=sum(map(ord, local.weight.engine)) + local.layer)
    return assembly


def fill(local: LocalParameter, assembly: Assembly, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = local.weight, assembly.architecture
    whole = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in hf_shapes_of_all(*shapes, local.layer).items()
    }
    values = torch.zeros(local.parameter.numel())
    for row in local.rows(assembly.architecture):
        values[row.elements] = whole[row.name][row.box.slices].reshape(-1)
    shard = main_shards(assembly.optimizer).get(local.parameter)
    local.parameter.data.view(-1).copy_(values)
    if shard is not None:
        shard.main.copy_(local.parameter.data.view(-1)[shard.start : shard.stop])


def hf_shapes_of_all(weight: Any, architecture: Any, layer: int) -> dict[str, tuple[int, ...]]:
    from megatune.families.weights import hf_shapes

    return hf_shapes(weight, architecture, layer)


def batches_of(assembly: Assembly, settings: Settings, seed: int = 0) -> list[Any]:
    samples = random_samples(301, LENGTHS, seed=seed)
    return shard_samples(samples, assembly.coords, settings.parallel)


def off_and_base(model: Path, lora: Settings, full: Settings) -> tuple[list[torch.Tensor], ...]:
    """Logits of the model with its adapters on and off, and of the model alone."""
    adapted = with_random_b(model, lora)
    batches = batches_of(adapted, lora)
    on = step.logits(adapted.model, batches)
    with without_adapters(adapted.model):
        off = step.logits(adapted.model, batches)
    again = step.logits(adapted.model, batches)
    return on, off, again, step.logits(load_model(model, full, adapted.coords, trained=False).model, batches)


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "tp2 sp"), ("deepseek_v3", "1"), ("qwen3_moe", "ep2")])
def test_adapters_that_are_off_leave_the_base_bit_for_bit(
    pool: RankPool, model_dir: Any, family: str, layout: str
) -> None:
    chosen = ALL[layout]
    found = pool.run(chosen.world_size, off_and_base, model_dir(family), settings_of(chosen), chosen.settings())
    for on, off, again, base in found:
        for one, two, three, four in zip(on, off, again, base, strict=True):
            assert torch.equal(two, four)
            assert torch.equal(one, three)
            assert not torch.equal(one, two)


def train(assembly: Assembly, settings: Settings, steps: int = 2) -> list[float]:
    norms = []
    for index in range(steps):
        measure_loss(assembly, batches_of(assembly, settings, seed=index))
        check_gradients(assembly, index)
        updated, norm = optimizer_step(assembly.optimizer, settings.optimizer.learning_rate)
        assert updated
        check_weights(assembly, index, grad_norm=norm)
        norms.append(norm)
    return norms


def norms_of_steps(model: Path, settings: Settings) -> list[float]:
    return train(with_random_b(model, settings), settings)


# deepseek_v3 has adapters of experts, too; tests/parity/test_lora.py has the largest layout in clipped steps.
@pytest.mark.extended("qwen3_moe", "tp2 pp2 dp2 sp, overlaps, fusions")
@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "tp2"), ("qwen3", "tp2 sp"), ("qwen3", "tp2 pp2 dp2 sp, overlaps, fusions"),
        ("qwen3_moe", "ep2 etp2 tp2 sp"), ("qwen3_moe", "etp2"), ("deepseek_v3", "ep2 etp2 tp2 sp"),
    ],
)  # fmt: skip
def test_copies_stay_the_same_and_the_norm_counts_each_adapter_once(
    pool: RankPool, model_dir: Any, family: str, layout: str
) -> None:
    """After each of two clipped steps copies are equal bit for bit, and so is what every rank did with them."""
    (expected,) = pool.run(1, norms_of_steps, model_dir(family), settings_of(LAYOUTS["1"]))
    chosen = ALL[layout]
    for found in pool.run(chosen.world_size, norms_of_steps, model_dir(family), settings_of(chosen)):
        assert found == pytest.approx(expected, rel=1e-5)


def drifted(model: Path, settings: Settings, name: str) -> tuple[str, int]:
    """What every rank reports when one bit of an adapter has changed on rank 1."""
    assembly = with_random_b(model, settings)
    if assembly.coords.rank == 1:
        for local in assembly.parameters:
            if name in local.hf_shapes(assembly.architecture):
                local.parameter.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    try:
        check_weights(assembly, 3)
    except MegatuneError as error:
        return str(error), error.exit_code
    return "", ExitCode.DONE


@pytest.mark.parametrize(
    ("family", "layout", "name", "copies"),
    [
        ("qwen3", "tp2 sp", "model.layers.0.self_attn.q_proj.lora_A.weight", "tensor-parallel"),
        ("qwen3", "tp2", "model.layers.1.mlp.down_proj.lora_B.weight", "tensor-parallel"),
        ("qwen3_moe", "etp2", "model.layers.1.mlp.experts.0.gate_proj.lora_A.weight", "expert tensor-parallel"),
    ],
)
def test_a_copy_that_drifts_is_named(
    pool: RankPool, model_dir: Any, family: str, layout: str, name: str, copies: str
) -> None:
    chosen = ALL[layout]
    for text, code in pool.run(chosen.world_size, drifted, model_dir(family), settings_of(chosen), name):
        assert f"weights differ between {copies} copies" in text
        assert name in text
        assert code == ExitCode.NOT_FINITE


def unsummed(model: Path, settings: Settings) -> str:
    """Two steps in which the gradient of a replicated A is not summed over the parts of sequence parallelism: the
    fault that another project had for months (its pull request 173)."""
    built = Adapter.__init__

    def without_mark(self: Adapter, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        for parameter in self.parameters(recurse=False):
            parameter.__dict__.pop("sequence_parallel", None)

    Adapter.__init__ = without_mark  # type: ignore[method-assign]
    try:
        norms_of_steps(model, settings)
    except MegatuneError as error:
        return str(error)
    finally:
        Adapter.__init__ = built  # type: ignore[method-assign]
    return ""


def test_a_gradient_that_is_not_summed_is_seen(pool: RankPool, model_dir: Any) -> None:
    for text in pool.run(2, unsummed, model_dir("qwen3"), settings_of(ALL["tp2 sp"])):
        assert "step 0: gradients differ between tensor-parallel copies" in text
        assert "lora_A" in text


RECOMPUTED = Layout(1, recompute={"recompute_granularity": "full"})


def gradients(model: Path, settings: Settings, faulty: bool) -> dict[str, torch.Tensor]:
    """Of every adapter; faulty as Megatron-Core's own recomputation would find them."""
    freeze, checkpoint = building.freeze, tensor_parallel.checkpoint

    def freeze_alone(chunk: Any, *args: Any) -> None:
        freeze(chunk, *args)
        chunk.input_requires_grad = False

    patched = patches._checkpoint
    if faulty:
        building.freeze, patches._checkpoint = freeze_alone, random.checkpoint
    try:
        assembly = with_random_b(model, settings)
        measure_loss(assembly, batches_of(assembly, settings))
        shards = main_shards(assembly.optimizer)
        return {
            f"{local.weight.engine} {local.layer}": shards[local.parameter].grad.clone()
            for local in assembly.parameters
            if local.weight.role is Role.ADAPTER
        }
    finally:
        building.freeze, patches._checkpoint, tensor_parallel.checkpoint = freeze, patched, checkpoint


def test_recomputation_behind_frozen_words_keeps_gradients(pool: RankPool, model_dir: Any) -> None:
    """Recomputed layers get gradients only where an input of theirs has one, which frozen embeddings have not."""
    model = model_dir("qwen3")
    (plain,) = pool.run(1, gradients, model, settings_of(LAYOUTS["1"]), False)
    (recomputed,) = pool.run(1, gradients, model, settings_of(RECOMPUTED), False)
    (faulty,) = pool.run(1, gradients, model, settings_of(RECOMPUTED), True)
    assert all(values.norm() > 0 for values in plain.values())
    assert all(torch.equal(values, recomputed[name]) for name, values in plain.items())
    assert not any(values.norm() > 0 for values in faulty.values())


@contextmanager
def recorded(assembly: Assembly) -> Any:
    """What adapters drop of a tensor of ones, by engine name."""
    masks: dict[str, torch.Tensor] = {}
    names = {id(module): name for name, module in assembly.model[0].named_modules() if isinstance(module, Adapter)}
    drop = Adapter.dropped

    def dropped(self: Adapter, x: torch.Tensor) -> torch.Tensor:
        found = drop(self, x)
        masks[names[id(self)]] = drop_mask(x, found)
        return found

    Adapter.dropped = dropped  # type: ignore[method-assign]
    try:
        yield masks
    finally:
        Adapter.dropped = drop  # type: ignore[method-assign]


def drop_mask(x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (found == 0) & (x != 0)


def dropout_masks(model: Path, settings: Settings) -> list[dict[str, torch.Tensor]]:
    assembly = with_random_b(model, settings)
    steps = []
    for index in range(2):
        with recorded(assembly) as masks:
            measure_loss(assembly, batches_of(assembly, settings, seed=index)[:1])
        steps.append(masks)
    return steps


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp"])
def test_ranks_drop_the_same_of_the_same_inputs_only(pool: RankPool, model_dir: Any, layout: str) -> None:
    settings = settings_of(ALL[layout], lora_dropout=0.5)
    one, other = pool.run(2, dropout_masks, model_dir("qwen3"), settings)
    assert one[0].keys() == other[0].keys()
    assert one[0]
    for name, mask in one[0].items():
        assert 0.3 < mask.float().mean() < 0.7
        is_same = layout == "tp2" and ("linear_qkv" in name or "linear_fc1" in name)
        assert torch.equal(mask, other[0][name]) == is_same, name
    masks: Sequence[torch.Tensor] = list(one[0].values())
    assert not any(torch.equal(masks[0], mask) for mask in masks[1:] if mask.shape == masks[0].shape)
    # Another step drops other elements.
    assert not any(torch.equal(mask, one[1][name]) for name, mask in one[0].items() if mask.shape == one[1][name].shape)
