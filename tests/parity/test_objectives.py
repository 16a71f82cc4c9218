"""Objectives that are no mean over tokens: sums per document, extras and metrics, in every kind of layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from computing import LENGTHS
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_SEQUENCE_LAYOUTS, SEQUENCE_LAYOUTS

from megatune.bridge.assemble import assemble
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import Settings, with_settings
from megatune.data.batches import Batch
from megatune.engine import groups, step
from megatune.engine.layers import cross_entropy
from megatune.engine.optimizer import main_shards
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_sums
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.choose import CrossEntropy, evaluation_objective, make_objective
from megatune.verify.measure import shard_samples
from megatune.verify.reference import checkpoint_tensors
from megatune.verify.samples import Sample, random_samples

SCALE = 0.02  # of the documents' log-probabilities, so that the sigmoid is not flat
ALL = {**LAYOUTS, **SEQUENCE_LAYOUTS, **MORE_SEQUENCE_LAYOUTS, **EXPERT_LAYOUTS}


@dataclass(frozen=True)
class DocumentWeights:
    """A weight for each document of a micro-batch: whole on every rank."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        return self.values.to(device)


@dataclass(frozen=True)
class TokenOffsets:
    """A number for each token [b, s]: cut as tokens are."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        return (self.values if tokens is None else self.values[:, tokens]).to(device)


def spans(batch: MicroBatch) -> list[tuple[int, slice]]:
    """Row and place of each document."""
    if batch.cu_seqlens is None:
        return [(row, slice(0, batch.input_ids.shape[1])) for row in range(len(batch.input_ids))]
    return [(0, slice(start, stop)) for start, stop in pairwise(batch.cu_seqlens.tolist())]


class DocumentLoss:
    """Σ over documents of weight · softplus(-SCALE · Σ over tokens of (log-probability - offset)), as preference losses
    are: not linear in what tokens contribute."""

    metric_names = ("log_prob", "never")

    def normalizer(self, batch: MicroBatch) -> torch.Tensor:
        return torch.tensor(sum(bool((batch.labels[row, span] >= 0).any()) for row, span in spans(batch)))

    def __call__(self, token_losses: torch.Tensor, batch: LocalBatch) -> ObjectiveOutput:
        trained = batch.labels >= 0
        sums = sequence_sums(-token_losses - batch.extras["offsets"] * trained, batch.sequences)
        weights = batch.extras["weights"]
        log_probs = sequence_sums(-token_losses.detach(), batch.sequences)
        return ObjectiveOutput(
            (weights * F.softplus(-SCALE * sums)).sum(),
            {"log_prob": (log_probs.sum(), (weights > 0).sum())},
            replicated=True,
        )


def weight(sample: Sample) -> float:
    return 1 + sample.input_ids[0] % 3


def with_extras(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """A weight for each document, by its sample, and an offset for each token, by its place in the document."""
    by_tokens = {sample.input_ids: sample for sample in samples}
    weights = []
    for (row, span), length in zip(spans(batch), batch.lengths, strict=True):
        tokens = tuple(batch.input_ids[row, span][:length].tolist())
        weights.append(weight(by_tokens[tokens]) if tokens else 0.0)
    offsets = batch.position_ids * 0.01
    return replace(batch, extras={"weights": DocumentWeights(torch.tensor(weights)), "offsets": TokenOffsets(offsets)})


def measure(
    model: Path, settings: Settings, samples: list[Sample], folder: Path, chunk_bytes: int = cross_entropy.CHUNK_BYTES
) -> tuple[float, dict[str, float]]:
    """On every rank: loss and metrics; gradients are written."""
    cross_entropy.CHUNK_BYTES, usual = chunk_bytes, cross_entropy.CHUNK_BYTES
    assembly = assemble(model, settings)
    batches = shard_samples(
        samples, assembly.coords, settings.parallel, micro_batch_size=2, packed=settings.data.packing
    )
    batches = [with_extras(batch, samples) for batch in batches]
    objective = make_objective(settings)
    if type(objective) is CrossEntropy:  # the settings ask for nothing
        objective = DocumentLoss()
    totals = step.forward_backward(assembly.model, batches, objective)
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    cross_entropy.CHUNK_BYTES = usual
    return totals.loss, totals.metrics


@cache
def expected(model: Path, samples: tuple[Sample, ...]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, mean log-probability of a document, and gradients, of Transformers."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = log_prob = 0.0
    for sample in samples:
        output = reference(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        trained = labels >= 0
        log_probs = output.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        offsets = torch.arange(len(labels)) * 0.01
        loss = weight(sample) * F.softplus(-SCALE * ((log_probs - offsets) * trained).sum()) / len(samples)
        loss.backward()
        total, log_prob = total + loss.item(), log_prob + (log_probs * trained).sum().item() / len(samples)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return total, log_prob, checkpoint_tensors(reference, gradients)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(
            ("qwen3", layout)
            for layout in ("1", "tp2 sp", "pp2 vpp2", "dp2", "packed", "cp2 p2p", "cp2, packed", "cp2 pp2")
        ),
        ("qwen3_moe", "cp2 ep2, packed"),
    ],
)
def test_sums_of_documents_have_the_gradients_of_transformers(pool, model_dir, tmp_path, family, layout):
    model, samples = model_dir(family), random_samples(301, LENGTHS)
    loss, log_prob, gradients = expected(model, tuple(samples))
    answers = pool.run(ALL[layout].world_size, measure, model, ALL[layout].settings(), samples, tmp_path)
    for found, metrics in answers:
        assert found == pytest.approx(loss, rel=1e-6)
        assert metrics.keys() - {"expert_load"} == {"log_prob"}  # of experts their routers report
        assert metrics["log_prob"] == pytest.approx(log_prob, rel=1e-6)
    assert_same_gradients(tmp_path, gradients)


def assert_same_gradients(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Those that `measure` wrote, of every parameter, within 1e-5 of its norm."""
    found = SafetensorsFolder(folder, "gradient")
    assert found.names() == {f"grad/{name}" for name in expected}
    for name, gradient in expected.items():
        ours = found.whole(f"grad/{name}")
        assert (ours - gradient).norm() <= 1e-5 * gradient.norm(), name


def by_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Σ p · -log p, p a constant: use_dft_loss."""
    chosen = logits.log_softmax(-1).gather(1, labels[:, None])
    return -(chosen.exp().detach() * chosen).sum()


def by_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Σ (H / 3)^1.5 · -log p, H the entropy of the 20 likeliest tokens alone, a constant: use_eaft_loss."""
    log_probs = logits.detach().topk(20).values.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return ((entropies / 3) ** 1.5 * F.cross_entropy(logits, labels, reduction="none")).sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Transformers' label_smoothing_factor."""
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)({"logits": logits[None]}, labels[None], num_items_in_batch=1)


TOKEN_LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dft": (by_probability, {"use_dft_loss": True}),
    "eaft": (by_entropy, {"use_eaft_loss": True, "eaft_alpha": 1.5}),
    "smoothed": (smoothed, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "cp2, packed"])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_losses_of_tokens_have_the_gradients_of_the_formula(pool, model_dir, tmp_path, loss, layout):
    """Summed over all trained tokens, and divided by their number; in chunks, of a vocabulary that rows pad."""
    from transformers import AutoModelForCausalLM

    model, samples = model_dir("qwen3"), random_samples(301, LENGTHS)
    formula, changes = TOKEN_LOSSES[loss]
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = sum(label >= 0 for sample in samples for label in sample.labels[1:])
    total = 0.0
    for sample in samples:
        logits = reference(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        value = formula(logits[labels >= 0], labels[labels >= 0]) / trained
        value.backward()
        total += value.item()
    settings = with_settings(ALL[layout].settings(), {f"finetuning.{name}": each for name, each in changes.items()})
    answers = pool.run(ALL[layout].world_size, measure, model, settings, samples, tmp_path, 5 * 301 * 4)
    assert [loss for loss, _ in answers] == pytest.approx([total] * ALL[layout].world_size, rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_same_gradients(tmp_path, checkpoint_tensors(reference, gradients))


def accuracies(model: Path, settings: Settings, samples: list[Sample]) -> tuple[float, float]:
    """On every rank: loss and accuracy of an evaluation."""
    assembly = assemble(model, settings)
    batches = shard_samples(
        samples, assembly.coords, settings.parallel, micro_batch_size=2, packed=settings.data.packing
    )
    totals = step.evaluate(assembly.model, [batches], evaluation_objective(make_objective(settings), settings))
    return totals.loss, totals.metrics["accuracy"]


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "dp2", "cp2, packed"])
@pytest.mark.parametrize("loss", [{}, {"finetuning.label_smoothing_factor": 0.1}], ids=["", "smoothed"])
def test_accuracy_is_that_of_texts(pool, model_dir, layout, loss):
    """As LLaMA-Factory's: of each text the share of trained labels that the model holds for the likeliest tokens."""
    from transformers import AutoModelForCausalLM

    model, samples, expected = model_dir("qwen3"), [], []
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for number, sample in enumerate(random_samples(301, LENGTHS)):
        likeliest = reference(input_ids=torch.tensor([sample.input_ids])).logits[0].argmax(-1).tolist()
        labels = [
            likeliest[place - 1] if label >= 0 and place % (number + 2) == 0 else label
            for place, label in enumerate(sample.labels)
        ]
        samples.append(replace(sample, labels=tuple(labels)))
        trained = [place for place, label in enumerate(labels) if place and label >= 0]
        expected.append(sum(labels[place] == likeliest[place - 1] for place in trained) / len(trained))
    settings = with_settings(ALL[layout].settings(), {"evaluation.compute_accuracy": True, **loss})
    found = pool.run(ALL[layout].world_size, accuracies, model, settings, samples)
    assert 0.2 < sum(expected) / len(expected) < 0.8
    assert len({*expected}) > 2
    assert [accuracy for _, accuracy in found] == pytest.approx([sum(expected) / len(expected)] * len(found), rel=1e-6)
    plain = pool.run(ALL[layout].world_size, losses_of, model, with_settings(settings, loss), samples)
    assert [value for value, _ in found] == pytest.approx(plain, rel=1e-6)


def losses_of(model: Path, settings: Settings, samples: list[Sample]) -> float:
    """On every rank: the loss alone."""
    assembly = assemble(model, settings)
    batches = shard_samples(
        samples, assembly.coords, settings.parallel, micro_batch_size=2, packed=settings.data.packing
    )
    return step.evaluate(assembly.model, [batches], make_objective(settings)).loss


def log_probs(model: Path, settings: Settings, samples: list[Sample]) -> list[torch.Tensor]:
    """On every rank: log-probabilities of each document's labels; none before the last stage."""
    assembly = assemble(model, settings)
    whole = shard_samples(
        samples, replace(assembly.coords, dp_rank=0, dp_size=1), settings.parallel, packed=settings.data.packing
    )
    found = []
    for batch, rows in zip(whole, step.token_log_probs(assembly.model, whole), strict=False):
        for (row, span), length in zip(spans(batch), batch.lengths, strict=True):
            if length:
                found.append(rows[row, span][: length - 1].clone())
    return found


@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "cp2, packed"])
def test_log_probs_of_given_tokens_are_those_of_transformers(pool, model_dir, reference, layout):
    model, samples = model_dir("qwen3"), random_samples(301, LENGTHS)
    expected = []
    numbers = reference(model, samples)
    for sample, logits in zip(samples, map(numbers.logits, range(len(samples))), strict=True):
        labels = torch.tensor(sample.labels[1:])
        chosen = logits[:-1].float().log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        expected.append(chosen * (labels >= 0))
    answers = pool.run(ALL[layout].world_size, log_probs, model, ALL[layout].settings(), samples)
    assert any(answers)
    for found in filter(None, answers):
        assert len(found) == len(samples)
        for ours in found:
            assert min((ours - one).abs().max() if ours.shape == one.shape else 9.0 for one in expected) < 1e-5
