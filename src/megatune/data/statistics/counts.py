"""Statistics of a run's data: rows, lengths, tokens, padding and steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from megatune.data.order import steps_per_epoch
from megatune.data.report import DataReport, DatasetReport
from megatune.data.rows import Arrangement, TokenRows
from megatune.data.steps import PreparedSteps
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.hub.models import open_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings
    from megatune.data.prepare import Prepared

FILL_BINS = 20


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a run.

    Attributes:
        world_size: processes of the run.
        world_from: "num_processes", or "smallest" for as few as hold the model.
        data_parallel_size: replicas that share the rows of a step.
        global_batch_size: rows of a step.
        tokens_per_step: without padding, on average.
        total: steps of the run.
        epochs: passes over the rows in these steps.
        computed: tokens of the batches of epoch 0, padding included.
    """

    world_size: int
    world_from: str
    data_parallel_size: int
    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    per_epoch: int
    tokens_per_step: float
    total: int
    epochs: float
    computed: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What `megatune data stats` reports.

    Attributes:
        fill: int [FILL_BINS], in equal bins from 0 to 1: packed rows by how full they are, or, without packing, the
            steps of epoch 0 by the share of real tokens in their batches.
        dataset_tokens: tokens an epoch trains of each data set of `dataset`, copies included.
        tokenizer_size: tokens that the tokenizer knows.
        vocab_size: rows of the model's embedding; None where the model's config cannot be read.
        directory: the prepared rows.
    """

    stage: str
    template: str | None
    cutoff_len: int
    arrangement: Arrangement
    report: DataReport
    steps: Steps
    fill: tuple[int, ...]
    dataset_tokens: tuple[int, ...]
    tokenizer_size: int
    vocab_size: int | None
    directory: str

    @property
    def is_packed(self) -> bool:
        """Whether a row holds samples side by side."""
        return self.report.train.capacity is not None

    @property
    def padding_share(self) -> float:
        """Return the share of computed tokens that is padding, in epoch 0."""
        return 1 - self.report.train.tokens / self.steps.computed

    @property
    def largest_id(self) -> int:
        """Return the largest token id of all rows."""
        return max(part.largest_id for part in (self.report.train, self.report.evaluation) if part is not None)

    def to_json(self) -> str:
        """Return one JSON object, with the names of the attributes."""
        own: dict[str, Any] = TypeAdapter(Statistics).dump_python(self, mode="json")
        own |= {"padding_share": self.padding_share, "largest_id": self.largest_id}
        if self.is_packed:
            own["packing_efficiency"] = self.report.train.packing_efficiency
        return json.dumps(own, ensure_ascii=False, indent=2)


def describe(settings: Settings, tokenizer: PreTrainedTokenizerBase, prepared: Prepared) -> Statistics:
    """Count what is prepared, in the layout of the settings."""
    parallel, batch, run = settings.parallel, settings.batch, settings.run
    world_size = run.num_processes or parallel.smallest_world
    data_parallel_size = max(1, world_size // parallel.model_parallel_size)
    per_device, accumulation = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    global_batch_size = per_device * accumulation * data_parallel_size
    rows, tokens = prepared.train, prepared.report.train.tokens
    per_epoch = steps_per_epoch(len(rows), global_batch_size)
    optimizer = settings.optimizer
    total = optimizer.max_steps if optimizer.max_steps > 0 else ceil(optimizer.num_train_epochs * per_epoch)
    real, computed = step_tokens(settings, rows, data_parallel_size)
    capacity = prepared.report.train.capacity
    fill = real / computed if capacity is None else rows.row_lengths() / capacity
    counts, _ = np.histogram(np.minimum(fill, 1.0), bins=FILL_BINS, range=(0, 1))
    return Statistics(
        stage=run.stage,
        template=None if run.stage == "pt" else settings.data.template or "of the tokenizer",
        cutoff_len=settings.data.cutoff_len,
        arrangement=rows.arrangement,
        report=prepared.report,
        steps=Steps(
            world_size=world_size,
            world_from="num_processes" if run.num_processes else "smallest",
            data_parallel_size=data_parallel_size,
            micro_batch_size=per_device,
            accumulation=accumulation,
            global_batch_size=global_batch_size,
            per_epoch=per_epoch,
            tokens_per_step=tokens / per_epoch,
            total=total,
            epochs=total / per_epoch,
            computed=int(computed.sum()),
        ),
        fill=tuple(counts.tolist()),
        dataset_tokens=_tokens_by_dataset(rows, prepared.report.datasets[: len(settings.data.dataset)]),
        tokenizer_size=len(tokenizer),
        vocab_size=_vocab_size(settings),
        directory=str(prepared.directory),
    )


def step_tokens(settings: Settings, rows: TokenRows, data_parallel_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Count real tokens, and tokens with padding, of every step of epoch 0, over all ranks: int64 [steps] each.

    They are those of `data.batches.Collator`: packed rows of a micro-batch are joined, others padded to the longest
    document.
    """
    parallel, size = settings.parallel, settings.batch.per_device_train_batch_size
    micro_batches = settings.batch.gradient_accumulation_steps * data_parallel_size
    real, needed, documents = _row_sizes(rows, parallel.document_multiple)
    prepared = PreparedSteps.from_settings(rows, settings, size * micro_batches)
    steps = prepared.steps_per_epoch
    order = np.concatenate([prepared.row_ids(step) for step in range(steps)])
    filled = np.full(steps * micro_batches * size, -1)  # a short last batch leaves some slots without a row
    filled[: len(order)] = order
    slots = filled.reshape(steps, micro_batches, size)
    taken = np.where(slots < 0, 0, needed[slots])
    lengths = np.maximum(taken.sum(axis=2) if rows.is_packed else taken.max(axis=2), 1)  # [steps, micro_batches]
    multiple = parallel.sequence_multiple
    lengths = -(-lengths // multiple) * multiple
    if parallel.pipeline_model_parallel_size > 1:  # stages exchange one shape
        lengths[:] = lengths.max(axis=1, keepdims=True)
    sequences = 1 if rows.is_packed else size * documents
    return np.where(slots < 0, 0, real[slots]).sum(axis=(1, 2)), lengths.sum(axis=1) * sequences


def _row_sizes(rows: TokenRows, multiple: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return each row's tokens, and what it needs of a micro-batch's length; and documents a row, 1 where packed."""
    real = rows.row_lengths()
    if rows.arrangement == "pairs":
        return real, rows.batch_lengths(), 2
    if rows.is_packed and multiple > 1:
        padded = (int((-(-rows.document_lengths([row]) // multiple) * multiple).sum()) for row in range(len(rows)))
        return real, np.fromiter(padded, dtype=np.int64, count=len(rows)), 1
    return real, real, 1


def _tokens_by_dataset(rows: TokenRows, datasets: Sequence[DatasetReport]) -> tuple[int, ...]:
    """Sum tokens by data set: where a document is in tokens.bin tells its data set."""
    spans = rows.spans
    ends = np.cumsum([dataset.tokens for dataset in datasets])
    which = np.searchsorted(ends, spans[:, 0], side="right")
    tokens = np.bincount(which, weights=spans[:, 1] - spans[:, 0], minlength=len(datasets))
    return tuple(int(count) for count in tokens)


def _vocab_size(settings: Settings) -> int | None:
    model = settings.model
    assert model.model_name_or_path is not None
    try:
        folder = open_model(model.model_name_or_path, model.model_revision, model.cache_dir).config_dir()
        return load_architecture(folder).vocab_size
    except MegatuneError:
        return None


def refuse_streaming(settings: Settings) -> None:
    """Refuse streamed data (exit code 64), which is never prepared and so cannot be counted."""
    if settings.data.streaming:
        why = "it prepares and counts all rows, and streamed ones are read while training"
        fix = "write streaming=false, and max_samples=10000 for the first rows of each data set"
        raise MegatuneError(Finding("data stats with streaming: true", why=why, fix=fix), ExitCode.SETTINGS)
