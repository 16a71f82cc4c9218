"""Preference pairs of random tokens, what the engine computes of them in a layout, and what Transformers does.

Legend: P pairs; documents come chosen, rejected, chosen, rejected ...
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.peft_model import AppliedAdapter
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import Settings
from megatune.data.batches import Batch, Collator, DocumentValues, MediaShard
from megatune.data.rows import DESIRABLE, IGNORE_INDEX, MARGIN
from megatune.encoders import Vision
from megatune.engine import groups, step
from megatune.engine.layers.adapter import without_adapters
from megatune.engine.optimizer import main_shards
from megatune.objectives.kto import KTO
from megatune.objectives.pair_losses import PAIR_LOSSES, Pairs
from megatune.objectives.preference import REFERENCE, Preference, Reward
from megatune.training.reference import step_log_probs
from megatune.verify.measure import _document, _RandomPixels
from megatune.verify.reference import (
    _architecture,
    _arguments,
    _canonical_tensors,
    checkpoint_tensors,
)
from megatune.verify.samples import Sample, SampleMedia, random_samples

# Tokens of prompts, of chosen and of rejected answers.
PROMPTS, CHOSEN, REJECTED = (7, 3, 12, 5, 9, 4, 6), (9, 14, 3, 8, 5, 17, 2), (6, 11, 8, 2, 13, 4, 10)
PACKED_ROWS = ((0, 1, 2), (3,), (4, 5), (6,))


@dataclass(frozen=True)
class SamplePair:
    """Two answers to a prompt, which is not trained."""

    chosen: Sample
    rejected: Sample


def random_pairs(
    vocab_size: int,
    *,
    prompts: Sequence[int] = PROMPTS,
    media: Sequence[Sequence[SampleMedia]] = (),
    vision: Vision | None = None,
) -> list[SamplePair]:
    """Pictures are those of the first prompts."""
    options: dict[str, Any] = {"vision": vision}
    questions = random_samples(vocab_size, prompts, 1, media=media, **options)
    answers = [
        random_samples(vocab_size, lengths, seed, **options) for seed, lengths in enumerate((CHOSEN, REJECTED), 2)
    ]

    def document(prompt: Sample, answer: Sample) -> Sample:
        labels = (IGNORE_INDEX,) * len(prompt.input_ids) + answer.input_ids
        return Sample(prompt.input_ids + answer.input_ids, labels, prompt.media)

    return [
        SamplePair(document(prompt, chosen), document(prompt, rejected))
        for prompt, chosen, rejected in zip(questions, *answers, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The engine


@dataclass(frozen=True)
class Case:
    """What all ranks compute.

    Attributes:
        reference: log-probabilities of the documents; None where the engine is to compute them without its adapters.
        margins: of pairs, for a reward model.
    """

    model: Path
    settings: Settings
    pairs: Sequence[SamplePair]
    reference: Sequence[float] | None
    objective: Preference | Reward | KTO  # of KTO the chosen answers are the desirable ones
    micro_batch_size: int = 1
    ld_alpha: float | None = None
    pad_token_id: int = 0
    margins: Sequence[float] | None = None


def shard_pairs(case: Case, assembly: Assembly) -> list[Batch]:
    """This data-parallel rank's micro-batches, of one length; places beyond the rows hold padding."""
    coords, parallel, vision = assembly.coords, case.settings.parallel, assembly.architecture.vision
    rows = PACKED_ROWS if case.settings.packing else [(number,) for number in range(len(case.pairs))]
    inputs: Any = vision and SimpleNamespace(vision=vision, processor=_RandomPixels(vision))
    collator = Collator(
        case.micro_batch_size,
        case.settings.packing,
        parallel.sequence_multiple,
        parallel.document_multiple,
        case.pad_token_id,
        inputs,
        documents_per_row=2,
        ld_alpha=case.ld_alpha,
        scores=isinstance(case.objective, Reward),
    )
    round_size = coords.dp_size * (parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1)
    num_batches = math.ceil(len(rows) / (case.micro_batch_size * round_size)) * round_size
    numbers = [
        [number for row in rows[index * case.micro_batch_size :][: case.micro_batch_size] for number in row]
        for index in range(num_batches)
    ]
    documents = [
        [_document(each) for number in of_batch for each in (case.pairs[number].chosen, case.pairs[number].rejected)]
        for of_batch in numbers
    ]
    length = max(collator.length([len(document.input_ids) for document in of_batch]) for of_batch in documents)
    shard = MediaShard(coords.cp_rank * coords.tp_size + coords.tp_rank, coords.cp_size * coords.tp_size)
    batches = []
    for of_batch, chosen in zip(documents, numbers, strict=True):
        batch = collator(of_batch, length, shard=shard if coords.pp_rank == 0 else None)
        values = np.zeros(len(batch.lengths), np.float32)
        if case.reference is not None:
            values[: 2 * len(chosen)] = [case.reference[2 * number + side] for number in chosen for side in (0, 1)]
        batch = with_reference(batch, torch.from_numpy(values))
        if isinstance(case.objective, KTO):
            desirable = torch.arange(len(batch.lengths)) % 2 == 0
            batch = replace(batch, extras={**batch.extras, DESIRABLE: DocumentValues(desirable)})
        if case.margins is not None:
            of_documents = np.zeros(len(batch.lengths), np.float32)
            of_documents[: 2 * len(chosen)] = np.repeat([case.margins[number] for number in chosen], 2)
            extras = {**batch.extras, MARGIN: DocumentValues(torch.from_numpy(of_documents))}
            batch = replace(batch, extras=extras)
        batches.append(batch)
    return batches[coords.dp_rank :: coords.dp_size]


def with_reference(batch: Batch, values: Tensor) -> Batch:
    return replace(batch, extras={**batch.extras, REFERENCE: DocumentValues(values)})


def with_base(assembly: Assembly, batches: list[Batch]) -> list[Batch]:
    """The reference is the model without its adapters, as it is now."""
    with without_adapters(assembly.model):
        found = step_log_probs(assembly.model, batches)
    return [with_reference(*each) for each in zip(batches, found, strict=True)] if found else batches


def compute(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """On every rank: loss and metrics; gradients are written."""
    assembly = assemble(case.model, case.settings)
    batches = shard_pairs(case, assembly)
    if case.reference is None:
        batches = with_base(assembly, batches)
    totals = step.forward_backward(assembly.model, batches, case.objective)
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return totals.loss, totals.metrics


# ---------------------------------------------------------------------------------------------------------------------
# Transformers


@dataclass(frozen=True)
class Expected:
    """Loss, metrics and gradients, by Hugging Face names, of Transformers with autograd."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def answer_log_probs(model: Any, sample: Sample) -> Tensor:
    """Log-probabilities of the trained tokens of a document that is alone in its row, with gradient."""
    logits = model(**_arguments(sample, _architecture(model), torch.device("cpu"))).logits[0, :-1]
    labels = torch.tensor(sample.labels[1:])
    trained = labels != IGNORE_INDEX
    return logits[trained].log_softmax(-1).gather(1, labels[trained][:, None])[:, 0]


def documents_of(pairs: Sequence[SamplePair]) -> list[Sample]:
    return [each for pair in pairs for each in (pair.chosen, pair.rejected)]


@torch.no_grad()
def log_probs(model: Any, pairs: Sequence[SamplePair]) -> list[float]:
    """Of each document, rounded to fp32."""
    return [answer_log_probs(model, each).sum().item() for each in documents_of(pairs)]


def near(values: Sequence[float], seed: int = 0) -> list[float]:
    """Log-probabilities that a reference may have, at which losses are neither flat nor straight; fp32 in value."""
    generator = random.Random(seed)
    return [float(np.float32(value + generator.gauss(0, 2))) for value in values]


def expect(
    model: Any,
    pairs: Sequence[SamplePair],
    reference: Sequence[float],
    objective: Preference,
    *,
    ld_alpha: float | None = None,
    adapter: AppliedAdapter | None = None,
) -> Expected:
    """Differentiate the loss of all pairs at once."""
    model.zero_grad()
    tokens = [answer_log_probs(model, each) for each in documents_of(pairs)]
    whole = torch.stack([each.double().sum().float() for each in tokens]).view(-1, 2)  # as the engine does
    lengths = torch.tensor([len(each) for each in tokens], dtype=whole.dtype).view(-1, 2)
    sums = whole
    if ld_alpha is not None:
        kept = [int(each) for each in lengths.min(1).values.repeat_interleave(2)]
        parts = [each[:n].sum() + ld_alpha * each[n:].sum() for each, n in zip(tokens, kept, strict=True)]
        sums = torch.stack(parts).view(-1, 2)
    of_reference = torch.tensor(reference).view(-1, 2)
    columns = torch.cat((sums, of_reference, lengths, whole[:, :1]), 1).unbind(1)
    found, options = Pairs(*columns), objective.options
    loss = objective.likelihood * -(whole / lengths)[:, 0].mean()
    for name, weight in objective.losses.items():
        loss = loss + weight * PAIR_LOSSES[name](found, options).mean()
    loss.backward()
    gradients = gradients_of(model, adapter)
    return Expected(loss.item(), _metrics(objective, sums.detach(), of_reference, lengths), gradients)


def gradients_of(model: Any, adapter: AppliedAdapter | None) -> dict[str, Tensor]:
    architecture = _architecture(model)
    if adapter is not None:
        return adapter.gradients_of(architecture)
    named = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return _canonical_tensors(checkpoint_tensors(model, named), architecture)


def _metrics(objective: Preference, sums: Tensor, reference: Tensor, lengths: Tensor) -> dict[str, float]:
    rewards = objective.options.beta * (sums - reference if objective.has_reference else sums / lengths)
    (chosen, rejected), log_probs = rewards.mean(0).tolist(), sums.mean(0).tolist()
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).float().mean().item(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": log_probs[0],
        "logps/rejected": log_probs[1],
    }


def gradient_errors(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each tensor's gradient; infinite where one side has none."""
    found = SafetensorsFolder(folder, "gradient")
    names = {name.removeprefix("grad/") for name in found.names()}
    errors = {}
    for name in sorted(names | expected.keys()):
        if name not in names or name not in expected:
            errors[name] = math.inf
            continue
        truth = expected[name]
        gap = found.whole(f"grad/{name}") - truth
        errors[name] = (gap.norm() / truth.norm().clamp(min=torch.finfo(truth.dtype).tiny)).item()
    return errors
