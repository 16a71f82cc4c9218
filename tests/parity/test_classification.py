"""Classifiers against Transformers' ...ForSequenceClassification, with its own loss of labels: loss, accuracy and the
gradient of every weight, the scores' included, for each problem type and in every kind of layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs_kit import Expected, gradient_errors, gradients_of
from test_lora import finetuning
from test_preference import EVERY, check
from transformers import AutoModelForSequenceClassification

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.peft_model import AppliedAdapter, apply_adapter
from megatune.bridge.shard_files import save_gradients
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.batches import Batch, Collator, ExtraColumn
from megatune.data.rows import LABEL
from megatune.engine import groups, step
from megatune.engine.layers import cross_entropy
from megatune.engine.optimizer import main_shards
from megatune.families import load_architecture
from megatune.objectives.choose import make_objective
from megatune.objectives.classification import Classification
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.measure import _document
from megatune.verify.samples import Sample, random_samples

LENGTHS = (9, 14, 3, 8, 5, 17, 2, 11, 6)
PACKED_ROWS = ((0, 1, 2), (3,), (4, 5), (6, 8), (7,))
# The problem type, scores, and what rows are labelled with.
LABELS: dict[str, tuple[str, int, list[Any]]] = {
    "classes": ("single_label_classification", 3, [0, 2, 1, 1, 0, 2, 2, 0, 1]),
    "several classes": (
        "multi_label_classification", 4,
        [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1],
         [1, 1, 0, 0], [0, 1, 1, 0]],
    ),
    "a number": ("regression", 1, [0.5, -1.25, 2.0, 0.0, 3.5, -0.75, 1.0, 0.25, -2.0]),
    "two numbers": (
        "regression", 2,
        [[0.5, 1.0], [-1.25, 0.0], [2.0, -2.0], [0.0, 0.5], [3.5, 1.5], [-0.75, -1.0], [1.0, 1.0], [0.25, -0.25],
         [-2.0, 0.75]],
    ),
}  # fmt: skip
CASES: list[tuple[str, str, str, int]] = [
    *(
        ("qwen3", "classes", layout, size)
        for layout, size in (
            ("1", 4), ("tp2 sp", 1), ("tp2", 2), ("pp2 vpp2", 2), ("dp2, overlaps", 1), ("cp2 p2p", 1), ("packed", 1),
            ("cp2, packed", 2), ("tp2 pp2 dp2 sp", 1),
        )
    ),
    *(("qwen3", labels, layout, 2) for labels in ("several classes", "a number", "two numbers")
      for layout in ("1", "tp2 sp", "cp2, packed")),
    ("qwen3, tied", "classes", "tp2 sp", 1),
    ("llama", "classes", "tp2 sp", 1),
    ("qwen3_moe", "classes", "ep2", 1),
    ("qwen3_moe", "several classes", "cp2 ep2, packed", 1),
]  # fmt: skip
Truth = Callable[[str, str], tuple[Path, list[Sample], int, Expected]]


@dataclass(frozen=True)
class Case:
    """What all ranks compute: rows with the labels of a name in LABELS."""

    model: Path
    settings: Settings
    samples: list[Sample]
    labels: str
    micro_batch_size: int
    pad_token_id: int


def settings_of(layout: str, labels: str, **changes: Any) -> Settings:
    kind, count, _ = LABELS[labels]
    run = RunSettings(stage="cls", num_labels=count, problem_type=kind, ddp_timeout=30)
    return EVERY[layout].settings().model_copy(update={"run": run, **changes})


def shard_rows(case: Case, assembly: Assembly) -> list[Batch]:
    """This data-parallel rank's micro-batches, of one length; places beyond the rows hold padding."""
    coords, parallel, size = assembly.coords, case.settings.parallel, case.micro_batch_size
    packed, samples = case.settings.packing, case.samples
    rows = PACKED_ROWS if packed else [(number,) for number in range(len(samples))]
    collator = Collator(
        size, packed, parallel.sequence_multiple, parallel.document_multiple, case.pad_token_id, scores=True
    )
    round_size = coords.dp_size * (parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1)
    num_batches = math.ceil(len(rows) / (size * round_size)) * round_size
    numbers = [[number for row in rows[index * size :][:size] for number in row] for index in range(num_batches)]
    documents = [[_document(samples[number]) for number in each] for each in numbers]
    length = max(collator.length([len(document.input_ids) for document in each]) for each in documents)
    _, count, labels = LABELS[case.labels]
    width = 1 if isinstance(labels[0], int) else count

    def values(chosen: list[int]) -> ExtraColumn:
        found = np.array([labels[number] for number in chosen], np.float32)
        return ExtraColumn("document", found.reshape(len(chosen), width))

    batches = [collator(each, length, {LABEL: values(chosen)}) for each, chosen in zip(documents, numbers, strict=True)]
    return batches[coords.dp_rank :: coords.dp_size]


def compute(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """On every rank: loss and metrics; gradients are written."""
    assembly = assemble(case.model, case.settings)
    totals = step.forward_backward(assembly.model, shard_rows(case, assembly), make_objective(case.settings))
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return totals.loss, totals.metrics


def expect(model: Any, samples: list[Sample], name: str, adapter: AppliedAdapter | None = None) -> Expected:
    """Transformers' own loss of all rows at once, padded at the right."""
    kind, _, labels = LABELS[name]
    ids = torch.full((len(samples), max(LENGTHS)), model.config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        mask[row, : len(sample.input_ids)] = 1
    wanted = torch.tensor(labels, dtype=torch.long if kind == "single_label_classification" else torch.float32)
    model.zero_grad()
    model.config.problem_type = kind
    output = model(input_ids=ids, attention_mask=mask, labels=wanted)
    output.loss.backward()
    metrics = {}
    if kind == "single_label_classification":
        metrics["accuracy"] = (output.logits.argmax(-1) == wanted).float().mean().item()
    elif kind == "multi_label_classification":
        metrics["accuracy"] = ((output.logits.sigmoid() > 0.5) == (wanted > 0)).all(-1).float().mean().item()
    return Expected(output.loss.item(), metrics, gradients_of(model, adapter))


def load(folder: Path) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def truth(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A classifier, rows, the token that pads, which ends one of them, and what Transformers computes; made once."""
    made: dict[tuple[str, str], tuple[Path, list[Sample], int, Expected]] = {}

    def make(name: str, labels: str) -> tuple[Path, list[Sample], int, Expected]:
        if (name, labels) not in made:
            samples, folder = random_samples(301, LENGTHS, 1), tmp_path_factory.mktemp("classifier")
            pad = samples[0].input_ids[-1]
            torch.manual_seed(3)
            model = AutoModelForSequenceClassification.from_pretrained(
                model_dir(name.partition(",")[0], tied=", tied" in name), num_labels=LABELS[labels][1],
                dtype=torch.float32,
            )  # fmt: skip
            model.score.weight.data.normal_()
            model.config.pad_token_id = pad
            model.save_pretrained(folder)
            made[name, labels] = folder, samples, pad, expect(load(folder), samples, labels)
        return made[name, labels]

    return make


@pytest.mark.covering
@pytest.mark.parametrize(("name", "labels", "layout", "size"), CASES)
def test_classifiers_agree(
    pool: Any, truth: Truth, tmp_path: Path, name: str, labels: str, layout: str, size: int
) -> None:
    model, samples, pad, expected = truth(name, labels)
    case = Case(model, settings_of(layout, labels), samples, labels, size, pad)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


@pytest.mark.parametrize("layout", ["tp2 sp"])
def test_scores_are_trained_beside_adapters(pool: Any, truth: Truth, tmp_path: Path, layout: str) -> None:
    """Against peft, whose modules_to_save has them.."""
    model, samples, pad, _ = truth("qwen3", "classes")
    folder = tmp_path / "adapter"
    folder.mkdir()
    selection = finetuning("LoRA", folder)
    write_random_adapter(folder, model, load_architecture(model), selection, seed=7)
    applied = apply_adapter(load(model), folder, trained=True)
    expected = expect(applied.model.eval(), samples, "classes", applied)
    case = Case(model, settings_of(layout, "classes", finetuning=selection), samples, "classes", 2, pad)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


def first_scores(model: Path, settings: Settings) -> list[float]:
    """On every rank: the scores that training begins with, where it has them."""
    found = [each for each in assemble(model, settings).parameters if each.weight.engine.startswith("score")]
    return found[0].parameter.flatten().tolist() if found else []


def test_new_scores_are_the_same_in_every_layout(pool: Any, model_dir: Any) -> None:
    """Three of them, of a language model with tied embeddings."""
    model = model_dir("qwen3", tied=True)
    (alone,) = pool.run(1, first_scores, model, settings_of("1", "classes"))
    assert len(alone) == 3 * load_architecture(model).hidden_size
    assert torch.tensor(alone).std().item() == pytest.approx(load_architecture(model).initializer_range, rel=0.3)
    assert pool.run(2, first_scores, model, settings_of("tp2 sp", "classes")) == [alone, alone]
    assert pool.run(2, first_scores, model, settings_of("pp2 vpp2", "classes")) == [[], alone]


def without_mark(case: Case, folder: Path) -> Any:
    """On every rank: the scores' weight does not say that its gradients are parts of a sum."""
    own = cross_entropy.Score.__init__

    def unmarked(self: Any, *arguments: Any) -> None:
        own(self, *arguments)
        self.weight.sequence_parallel = False

    cross_entropy.Score.__init__ = unmarked
    try:
        return compute(case, folder)
    finally:
        cross_entropy.Score.__init__ = own


def test_a_fault_is_seen(pool: Any, truth: Truth, tmp_path: Path) -> None:
    """It leaves the loss as it is."""
    model, samples, pad, expected = truth("qwen3", "classes")
    case = Case(model, settings_of("tp2 sp", "classes"), samples, "classes", 1, pad)
    answers = pool.run(2, without_mark, case, tmp_path)
    assert answers[0][0] == pytest.approx(expected.loss, rel=1e-6)
    errors = gradient_errors(tmp_path, expected.gradients)
    assert {name for name, error in errors.items() if error > 0.1} == {"score.weight"}


def test_a_class_holds_where_it_is_likelier_than_not() -> None:
    """A score of 0.3 is a share of 0.57, and all classes of a row are to be right."""
    scores, labels = torch.tensor([[0.3, -0.2], [0.3, 0.2], [-0.1, -4.0]]), torch.tensor([[1.0, 0.0]] * 2 + [[0.0] * 2])
    _, correct = Classification("multi_label_classification", 2)._compared(scores, labels)
    assert correct.tolist() == [True, False, True]
