"""Noise on word embeddings (neftune_noise_alpha): Transformers' own hook trains alike with the same random numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import LENGTHS
from layouts import LAYOUTS, MORE_SEQUENCE_LAYOUTS, SEQUENCE_LAYOUTS
from test_objectives import assert_same_gradients

from megatune.bridge.assemble import assemble
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import Settings, with_settings
from megatune.data.batches import TokenValues
from megatune.engine import groups, step
from megatune.engine.layers.noise import noise_keys
from megatune.engine.optimizer import main_shards
from megatune.engine.sequences import NOISE
from megatune.objectives.choose import CrossEntropy
from megatune.verify.measure import shard_samples
from megatune.verify.reference import checkpoint_tensors
from megatune.verify.samples import Sample, random_samples

ALL = {**LAYOUTS, **SEQUENCE_LAYOUTS, **MORE_SEQUENCE_LAYOUTS}
ALPHA, SEED, STEP = 5.0, 42, 7
MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """SplitMix64's number after a state, in integers that have no end."""
    number = (state + 0x9E3779B97F4A7C15) & MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def unit_noise(tokens: tuple[int, ...], h: int) -> torch.Tensor:
    """Numbers from -1 to 1 of a document, [tokens, h]."""
    text = sum(splitmix(splitmix(token) + place & MASK) for place, token in enumerate(tokens))
    document = splitmix(text + splitmix(splitmix(SEED) + STEP & MASK) & MASK)
    streams = [splitmix(document + place & MASK) for place in range(len(tokens))]
    numbers = [
        [splitmix(stream + channel * 0x9E3779B97F4A7C15 & MASK) >> 40 for channel in range(h)] for stream in streams
    ]
    found = torch.tensor(numbers)
    return torch.where(found < 2**23, found, found - 2**24) / 2**23


def measure(model: Path, settings: Settings, samples: list[Sample], folder: Path) -> float:
    """On every rank: the loss; gradients are written."""
    assembly = assemble(model, settings)
    batches = shard_samples(
        samples, assembly.coords, settings.parallel, micro_batch_size=2, packed=settings.data.packing
    )
    noisy = [replace(batch, extras={NOISE: TokenValues(noise_keys(batch, SEED, STEP))}) for batch in batches]
    totals = step.forward_backward(assembly.model, noisy, CrossEntropy())
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return totals.loss


def expected(model: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> tuple[float, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.neftune import activate_neftune

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    activate_neftune(reference, ALPHA)
    trained, total = sum(label >= 0 for sample in samples for label in sample.labels[1:]), 0.0
    for sample in samples:

        def drawn(zeros: torch.Tensor, low: Any, high: Any, tokens: tuple[int, ...] = sample.input_ids) -> torch.Tensor:
            assert low == -high
            return high * unit_noise(tokens, zeros.shape[-1]).expand_as(zeros)

        monkeypatch.setattr(torch.Tensor, "uniform_", drawn)
        logits = reference(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / trained
        loss.backward()
        total += loss.item()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return total, checkpoint_tensors(reference, gradients)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3", layout) for layout in ("1", "tp2 sp", "pp2 vpp2", "dp2", "packed", "cp2, packed", "cp2 pp2")),
        ("granite", "tp2"),  # its embeddings are multiplied after the noise
        ("gemma3_text", "packed"),  # and its own before
    ],
)
def test_noise_is_that_of_transformers(pool, model_dir, tmp_path, monkeypatch, family, layout):
    model, samples = model_dir(family), random_samples(301, LENGTHS)
    loss, gradients = expected(model, samples, monkeypatch)
    monkeypatch.undo()
    settings = with_settings(ALL[layout].settings(), {"finetuning.neftune_noise_alpha": ALPHA})
    answers = pool.run(ALL[layout].world_size, measure, model, settings, samples, tmp_path)
    assert answers == pytest.approx([loss] * ALL[layout].world_size, rel=1e-6)
    assert_same_gradients(tmp_path, gradients)


def test_noise_is_spread_evenly():
    noise = unit_noise(tuple(range(64)), 64)
    assert noise.abs().max() <= 1
    assert noise.mean().abs() < 0.03
    assert noise.var().item() == pytest.approx(1 / 3, rel=0.03)
    assert torch.histc(noise, 8, -1, 1).min() > 4096 / 8 * 0.8
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.6
