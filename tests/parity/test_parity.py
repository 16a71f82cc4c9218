"""Logits, loss and every parameter's gradient against Transformers: every dense family, every layout.

Tolerances are those of megatune.verify.results. With MEGATUNE_WRITE_PARITY=1 the worst errors are written
to docs/parity.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from computing import LENGTHS, MORE_LENGTHS, differences, failures, measure_in_layout, parameter_names
from layouts import FAMILY_LAYOUTS, LAYOUTS, MORE_LAYOUTS

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.data.rows import IGNORE_INDEX
from megatune.engine.optimizer import load_scalars, scalars
from megatune.engine.optimizer import step as optimizer_step
from megatune.verify.measure import measure_loss, shard_samples
from megatune.verify.reference import compute_reference, load_reference_model
from megatune.verify.results import Results, check_errors, compare
from megatune.verify.samples import FP16_LOSS_SCALE, Sample, random_samples

FAMILIES = ("llama", "qwen2", "qwen3")


CASES = [
    *(("qwen3", tied, layout) for tied in (False, True) for layout in LAYOUTS),
    *((family, False, layout) for family in FAMILIES if family != "qwen3" for layout in FAMILY_LAYOUTS),
    *((family, True, "pp2 vpp2") for family in FAMILIES if family != "qwen3"),
]


@pytest.mark.covering
@pytest.mark.parametrize(("family", "tied", "layout"), CASES)
def test_family_agrees(pool, model_dir, reference, table, tmp_path, family, tied, layout):
    model = model_dir(family, tied=tied)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    # As many gradients as Transformers has parameters: none is left out.
    assert len(found) - 3 == len(parameter_names(model))
    assert not failures(found)
    table.add(f"{family}, {'tied' if tied else 'untied'}", layout, found)


@pytest.mark.extended("tp4")  # where a rank has no real vocabulary, below
@pytest.mark.covering
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_other_layouts_agree(pool, model_dir, reference, table, tmp_path, layout):
    model = model_dir("qwen3")
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, MORE_LAYOUTS[layout], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add("qwen3, untied", layout, found)


@pytest.mark.extended("llama")  # as qwen2 without biases
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_key_value_heads_shared_by_ranks_agree(pool, model_dir, reference, table, tmp_path, family):
    """tp 4 with 2 key/value heads: a rank's rows of the qkv weight begin inside a group, biases too."""
    model = model_dir(family)
    samples = random_samples(301, LENGTHS)
    found = differences(pool, model, MORE_LAYOUTS["tp4 sp"], samples, reference(model, samples), tmp_path)
    assert not failures(found)
    table.add(f"{family}, untied", "tp4 sp", found)


@pytest.mark.extended(True)  # tied ones are padded alike, and have one matrix less
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_rank_without_real_vocabulary_agrees(pool, model_dir, reference, tmp_path, tied):
    """130 tokens are padded to 256: with tp 4 the third rank holds two real rows and the last one none."""
    model = model_dir("qwen2", tied=tied, vocab_size=130)
    samples = random_samples(130, LENGTHS)
    found = differences(pool, model, MORE_LAYOUTS["tp4"], samples, reference(model, samples), tmp_path)
    assert not failures(found)


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2 pp2 vpp2"])
def test_rows_of_one_micro_batch_agree(pool, model_dir, reference, tmp_path, layout):
    """Several rows of different lengths in a micro-batch: padding takes no part."""
    model = model_dir("llama")
    samples = random_samples(301, LENGTHS)
    truth = reference(model, samples)
    assert not failures(differences(pool, model, LAYOUTS[layout], samples, truth, tmp_path, micro_batch_size=2))


@pytest.mark.extended("tp2 pp2 dp2 sp")
@pytest.mark.parametrize("layout", ["dp2", "tp2 pp2 dp2 sp"])
def test_data_parallel_rank_without_trained_tokens_agrees(pool, model_dir, reference, tmp_path, layout):
    model = model_dir("qwen3")
    samples = random_samples(301, LENGTHS)
    for index in range(1, len(samples), 2):  # with dp 2 and rows one by one, all of the second rank's
        tokens = samples[index].input_ids
        samples[index] = Sample(tokens, (IGNORE_INDEX,) * len(tokens))
    assert not failures(differences(pool, model, LAYOUTS[layout], samples, reference(model, samples), tmp_path))


# 16 bits. Errors are measured against fp32 with the same, rounded, weights; ours may be at most 1.5 times (a single
# parameter: 2 times) those that Transformers makes in the same dtype; megatune.verify.results says why. An absolute
# bound would say less: bf16 has 8 bits of mantissa, 0.4 % a rounding, and how they add up depends on the model.


@pytest.mark.extended("tp2 pp2 dp2 sp")  # fp16 has it below
@pytest.mark.covering
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2", "tp2 pp2 dp2 sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_rounds_no_worse_than_transformers(pool, model_dir, reference, table, tmp_path, family, layout):
    model = model_dir(family)
    samples = random_samples(301, MORE_LENGTHS)
    settings = LAYOUTS[layout].settings(precision={"bf16": True})
    pool.run(LAYOUTS[layout].world_size, measure_in_layout, model, settings, samples, tmp_path)
    truth = reference(model, samples, "bfloat16")
    stock = compare(reference(model, samples, "bfloat16", "bfloat16"), truth)
    found = check_errors(compare(Results(tmp_path), truth), stock)
    assert not failures(found)
    table.add_sixteen_bits(family, layout, found)


@pytest.mark.parametrize("layout", ["1", "tp2 pp2 dp2 sp"])
def test_fp16_rounds_no_worse_than_transformers(pool, model_dir, reference, tmp_path, layout):
    model = model_dir("qwen3")
    samples = random_samples(301, LENGTHS)
    settings = LAYOUTS[layout].settings(precision={"fp16": True})
    pool.run(LAYOUTS[layout].world_size, measure_in_layout, model, settings, samples, tmp_path)
    truth = reference(model, samples, "float16")
    stock = compare(reference(model, samples, "float16", "float16"), truth)
    assert not failures(check_errors(compare(Results(tmp_path), truth), stock))


def step_with_loss_scales(model: Path, settings: Settings, samples: list[Sample], loss_scales: list[float]) -> list:
    """A step at each scale: whether it updated, its gradient norm, the scale after it, and whether weights moved."""
    assembly = assemble(model, settings)
    batches = shard_samples(samples, assembly.coords, settings.parallel)
    answers = []
    for loss_scale in loss_scales:
        load_scalars(assembly.optimizer, {**scalars(assembly.optimizer), "loss_scale": loss_scale})
        before = [local.parameter.detach().clone() for local in assembly.parameters]
        measure_loss(assembly, batches)
        updated, grad_norm = optimizer_step(assembly.optimizer, 1e-3)
        moved = any(not torch.equal(a, b.parameter) for a, b in zip(before, assembly.parameters, strict=True))
        answers.append((updated, grad_norm, scalars(assembly.optimizer)["loss_scale"], moved))
    return answers


@pytest.mark.parametrize("layout", ["1", "tp2 pp2 dp2 sp"])
def test_fp16_unscales_gradients_and_skips_a_step_that_overflows(pool, model_dir, layout):
    model = model_dir("qwen3")
    samples = random_samples(301, LENGTHS)
    settings = LAYOUTS[layout].settings(precision={"fp16": True})
    # The middle one is far above fp16's largest number, 65504. Megatron-Core lowers the scale after two overflows.
    scales = [FP16_LOSS_SCALE, 2.0**32, 2.0**32]
    truth = compute_reference(load_reference_model(model, torch.float16).float(), samples)
    expected = math.sqrt(sum(gradient.double().square().sum().item() for gradient in truth.gradients.values()))
    for well, overflow, again in pool.run(
        LAYOUTS[layout].world_size, step_with_loss_scales, model, settings, samples, scales
    ):
        updated, grad_norm, scale, moved = well
        assert (updated, scale, moved) == (True, FP16_LOSS_SCALE, True)
        # fp16 keeps 11 bits, and errors of many elements average out in a norm.
        assert grad_norm == pytest.approx(expected, rel=2**-8)
        assert (overflow[0], overflow[1], overflow[3]) == (False, math.inf, False)
        assert (again[0], again[3]) == (False, False)
        assert again[2] == 2.0**31
