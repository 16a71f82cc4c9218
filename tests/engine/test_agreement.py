"""Ranks that hold copies of the same numbers: one flipped bit is found, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, Layout

from megatune.bridge.assemble import Assembly, assemble
from megatune.config.settings import Settings
from megatune.engine.agreement import _CHUNK, check_scalars, digest
from megatune.engine.optimizer import main_shards
from megatune.errors import ExitCode, MegatuneError
from megatune.training.train_step import check_gradients, check_weights
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import Sample, random_samples

LENGTHS = (17, 5, 30, 12)
WHOLE_OPTIMIZER = Layout(2, {"use_distributed_optimizer": False})


def flip_lowest_bit(values: torch.Tensor, index: int = 0) -> None:
    bits = values.detach().view(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[index] ^= 1


def find(assembly: Assembly, name: str) -> Any:
    """The parameter of this rank that holds a Hugging Face tensor; None where it holds no part of it."""
    for local in assembly.parameters:
        if name in local.hf_shapes(assembly.architecture):
            return local.parameter
    return None


def check_after_flip(
    model: Path, settings: Settings, samples: list[Sample], rank: int, name: str, which: str
) -> tuple[str, int]:
    """Flip a bit of a weight or of its gradient on one rank; what every rank reports, and the exit code."""
    assembly = assemble(model, settings)
    measure_loss(assembly, shard_samples(samples, assembly.coords, settings.parallel))
    check_gradients(assembly, 3)
    check_weights(assembly, 3, loss=1.0)
    parameter = find(assembly, name) if assembly.coords.rank == rank else None
    if parameter is not None:
        flip_lowest_bit(parameter if which == "weight" else main_shards(assembly.optimizer)[parameter].grad)
    try:
        check_gradients(assembly, 3)
        check_weights(assembly, 3, loss=1.0)
    except MegatuneError as error:
        return str(error), error.exit_code
    return "", ExitCode.DONE


NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("layout", "rank", "name", "which", "said"),
    [
        (LAYOUTS["dp2"], 1, QUERY, "weight", "step 3: weights differ between data-parallel copies"),
        (LAYOUTS["tp2 sp"], 1, NORM, "weight", "step 3: weights differ between tensor-parallel copies"),
        (LAYOUTS["tp2 sp"], 0, NORM, "gradient", "step 3: gradients differ between tensor-parallel copies"),
        (LAYOUTS["pp2"], 1, EMBEDDING, "weight", "step 3: weights differ between pipeline-parallel copies"),
        (WHOLE_OPTIMIZER, 0, QUERY, "gradient", "step 3: gradients differ between data-parallel copies"),
    ],
    ids=["dp2", "tp2 sp", "tp2 sp gradient", "pp2 tied", "dp2 gradient"],
)
def test_flipped_bit_is_named(pool, model_dir, layout, rank, name, which, said):
    model = model_dir("qwen3", tied=True)
    arguments = (model, layout.settings(), random_samples(301, LENGTHS), rank, name, which)
    for text, code in pool.run(layout.world_size, check_after_flip, *arguments):
        assert said in text
        assert name in text
        assert "rank 1 and rank 0, by up to" in text
        assert "1 problem" not in text
        assert code == ExitCode.NOT_FINITE


@pytest.mark.parametrize(
    ("layout", "rank", "name", "said"),
    [
        ("ep2 dp4", 2, "model.layers.1.mlp.experts.0.down_proj.weight", "expert data-parallel copies"),
        ("ep2 dp4", 3, "model.layers.1.mlp.experts.7.up_proj.weight", "expert data-parallel copies"),
        ("ep2", 1, "model.layers.1.mlp.gate.weight", "step 3: weights differ between data-parallel copies"),
        ("etp1 tp2 sp", 1, "model.layers.1.mlp.experts.0.up_proj.weight", "expert data-parallel copies"),
    ],
)
def test_flipped_bit_among_experts_is_named(pool, model_dir, layout, rank, name, said):
    """Experts have copies where other experts are sharded elsewhere; their router has one on every rank."""
    chosen = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}[layout]
    arguments = (model_dir("qwen3_moe"), chosen.settings(), random_samples(301, LENGTHS), rank, name, "weight")
    for text, code in pool.run(chosen.world_size, check_after_flip, *arguments):
        assert said in text
        assert f"rank {rank} and rank" in text
        assert text.count("differ between") == 1
        assert code == ExitCode.NOT_FINITE


def test_the_one_among_many_is_named(pool, model_dir):
    """Four copies: the odd one out, with the ranks that agree; its tensor-parallel peers hold slices of their own."""
    layout = Layout(4, {"use_distributed_optimizer": False})
    arguments = (model_dir("qwen3"), layout.settings(), random_samples(301, LENGTHS), 2, QUERY, "weight")
    for text, _ in pool.run(4, check_after_flip, *arguments):
        assert f"{QUERY} (and 2 more in one tensor): rank 2 and ranks 0, 1, 3, by up to " in text
        assert text.count("differ between") == 1


@pytest.mark.extended("tp2 pp2 dp2 sp")  # no other layout but with copies, whose bits are flipped above
@pytest.mark.parametrize("layout", ["1", "tp2 pp2 dp2 sp", "tp2 pp2 vpp2"])
def test_slices_are_not_compared(pool, model_dir, layout):
    """A weight that tensor parallelism cuts has one copy here, or its data-parallel peer: no slice is held against
    another one. The check before the flip has passed in every layout of this file, too."""
    chosen = LAYOUTS[layout]
    arguments = (model_dir("qwen3", tied=True), chosen.settings(), random_samples(301, LENGTHS), 99, QUERY, "weight")
    assert pool.run(chosen.world_size, check_after_flip, *arguments) == [("", ExitCode.DONE)] * chosen.world_size


def compare_scalars(_: Any) -> str:
    rank = torch.distributed.get_rank()
    check_scalars("step 7", {"step": 7, "learning_rate": float("nan")})  # equal, if no number
    with pytest.raises(MegatuneError) as raised:
        check_scalars("step 7", {"step": 7 + rank, "learning_rate": 1e-3})
    return str(raised.value)


def test_scalars_that_differ_are_named(pool):
    for text in pool.run(2, compare_scalars, None):
        assert "step 7: step differs between ranks" in text
        assert "7 on rank 0; 8 on rank 1" in text
        assert "learning_rate" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [0, 1, -1])
def test_digest_changes_with_every_bit(dtype, index):
    values = torch.randn(_CHUNK + 3).to(dtype)
    before = digest(values)
    assert torch.equal(before, digest(values.clone()))
    flip_lowest_bit(values, index)
    assert not torch.equal(before, digest(values))
    assert digest(values[:0]).item() == 0


def test_digest_knows_the_order():
    assert not torch.equal(digest(torch.tensor([1.0, 2.0])), digest(torch.tensor([2.0, 1.0])))
