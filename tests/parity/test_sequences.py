"""Context parallelism and packed rows: numbers are those of Transformers, one sample at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from computing import LENGTHS, differences, failures
from layouts import EXPERT_LAYOUTS, FAMILY_SEQUENCE_LAYOUTS, MORE_SEQUENCE_LAYOUTS, SEQUENCE_LAYOUTS, Layout

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.samples import Sample, random_samples

# Grouped-query and latent attention, without and with experts, go through all.
CASES = [
    *((family, layout) for family in ("qwen3", "deepseek_v3") for layout in SEQUENCE_LAYOUTS),
    *(
        (family, layout)
        for family in ("llama", "qwen2", "qwen2_moe", "qwen3_moe", "mixtral")
        for layout in FAMILY_SEQUENCE_LAYOUTS
    ),
]


# Tests below and tests/parity/test_experts.py have these where sequences are cut; what they have of their own is not of
# attention.
@pytest.mark.extended("llama", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe")
@pytest.mark.covering
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_family_agrees(pool, model_dir, reference, table, tmp_path, family, layout):
    model = model_dir(family)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, SEQUENCE_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add(f"{family}, untied", layout, found)


@pytest.mark.extended("cp4 all_gather", "cp4 a2a")  # tests/engine/test_attention_context.py has them, on 8 ranks, too
@pytest.mark.covering
@pytest.mark.parametrize("layout", MORE_SEQUENCE_LAYOUTS)
def test_other_layouts_agree(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("qwen3", tied=True)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, MORE_SEQUENCE_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("qwen3, tied", layout, found)


@pytest.mark.parametrize("layout", ["packed", "cp2, packed", "tp2 sp, packed"])
def test_several_packed_rows_of_one_micro_batch_agree(pool, model_dir, reference, tmp_path, layout):
    model = model_dir("llama")
    samples = random_samples(301, LENGTHS)
    truth = reference(model, samples)
    assert not failures(differences(pool, model, SEQUENCE_LAYOUTS[layout], samples, truth, tmp_path, 2))


@pytest.mark.parametrize("layout", ["cp2 p2p", "cp2 all_gather", "cp2 a2a"])
def test_several_rows_cut_by_context_parallelism_agree(pool, model_dir, reference, tmp_path, layout):
    model = model_dir("qwen2")
    samples = random_samples(301, LENGTHS)
    truth = reference(model, samples)
    assert not failures(differences(pool, model, SEQUENCE_LAYOUTS[layout], samples, truth, tmp_path, 2))


def gradients(model: Path, settings: Settings, samples: list[Sample]) -> list[torch.Tensor]:
    """On every rank: the gradient of each parameter it holds."""
    assembly = assemble(model, settings)
    measure_loss(assembly, shard_samples(samples, assembly.coords, settings.parallel, packed=settings.data.packing))
    return [local.parameter.main_grad.clone() for local in assembly.parameters if local.parameter.requires_grad]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SEQUENCE_LAYOUTS["packed"], id="1"),
        pytest.param(SEQUENCE_LAYOUTS["cp2, packed"], id="cp2", marks=pytest.mark.extended),
        pytest.param(EXPERT_LAYOUTS["cp2 ep2, packed"], id="cp2 ep2"),
    ],
)
def test_a_document_does_not_feel_its_neighbours(pool, model_dir, layout: Layout):
    """Other tokens in all samples but one, none of them trained: the one's gradient stays."""
    model = model_dir("qwen3_moe" if layout.settings().parallel.expert_model_parallel_size > 1 else "qwen3")
    samples, others = random_samples(301, LENGTHS), random_samples(301, LENGTHS, seed=1)
    for index, (sample, other) in enumerate(zip(samples, others, strict=True)):
        if index != 2:
            samples[index] = Sample(sample.input_ids, (-100,) * len(sample.input_ids))
            others[index] = Sample(other.input_ids, (-100,) * len(other.input_ids))
    others[2] = samples[2]
    settings = layout.settings()
    one = pool.run(layout.world_size, gradients, model, settings, samples)
    other = pool.run(layout.world_size, gradients, model, settings, others)
    for mine, theirs in zip(one, other, strict=True):
        for expected, found in zip(mine, theirs, strict=True):
            assert (found - expected).norm() <= 1e-6 * expected.norm()
