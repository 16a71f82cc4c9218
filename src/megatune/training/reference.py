"""The reference model of preference training.

Its log-probabilities of all answers are computed once, before training, and cached next to the rows:

    ROWS/PART/reference-KEY.npy    fp32 [documents], in the order of `TokenRows.spans`

KEY is a digest of the reference's weights and configuration, the rows and the dtype. For streamed rows, the trained
model without its adapters computes them before each step.
"""

from __future__ import annotations

import gc
import io
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.assemble import LoadedModel, load_model
from megatune.config.rules import check
from megatune.config.settings import Settings
from megatune.data.batches import Batch, DocumentValues
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.data.rows import TokenRows
from megatune.engine import device, groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.layers.adapter import without_adapters
from megatune.engine.model import Chunk
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_sums
from megatune.engine.step import ObjectiveOutput, evaluate
from megatune.errors import ExitCode, Finding, MegatuneError, with_article
from megatune.families import load_architecture
from megatune.families.peft_config import read_peft_config
from megatune.hub.models import MAIN
from megatune.launch.context import RankContext
from megatune.objectives.choose import make_objective
from megatune.objectives.preference import REFERENCE
from megatune.progress import Progress
from megatune.training.agreement import fetched_on_node
from megatune.training.feed import Feed
from megatune.training.loaders import Loaders, without_unreadable
from megatune.training.resume import digest_base
from megatune.training.storage.files import sync

_FORMAT = 2  # version of the file format


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference model.

    Attributes:
        model_dir, settings: to load its model.
        digest: of its weights.
        computation: what its configuration, and those of merged adapters, determine besides the weights.
        is_loaded: the trained model, when loaded and without its adapters, is the reference.
        is_start: training starts from the reference, so that the first step has margins of 0. False with ld_alpha,
            which weights the tokens of the policy only.
    """

    context: RankContext
    model_dir: Path
    settings: Settings
    digest: str
    computation: str
    is_loaded: bool
    is_start: bool

    @property
    def architecture(self) -> Architecture:
        """The architecture of the reference model."""
        return load_architecture(self.model_dir)

    def added(self, feed: Feed, loaders: Loaders, load: Callable[[], LoadedModel]) -> tuple[Feed, LoadedModel]:
        """Load the trained model, and add the reference's log-probabilities to all prepared rows. Collective.

        Values that no earlier run cached are computed: by the reference model before the trained one is loaded, or by
        the trained model before its optimizer is created.

        Args:
            feed: the prepared rows; for streamed ones see `of_step`.
            load: loads the trained model.

        Raises:
            MegatuneError: NOT_FINITE, if the reference overflows; and any error of loading it.
        """
        steps = feed.rows
        if not isinstance(steps, PreparedSteps):
            line = "log-probabilities of the reference: of the model without its adapters, before each step"
            return replace(feed, lines=[*feed.lines, line]), load()
        companions = None if feed.companions is None else feed.companions.rows
        optional = (feed.evaluation, companions, feed.companions_evaluation)
        parts = [steps.rows, *(rows for rows in optional if rows is not None)]
        missing = [rows for rows in parts if groups.sum_over_ranks(int(not self._is_cached(rows)))]
        kept = {rows.digest: self._path(rows) for rows in parts}
        began = time.monotonic()
        if missing and not self.is_loaded:
            with _same_random_numbers():
                kept |= self._compute_separately(missing, loaders)
        loaded = load()
        if missing and self.is_loaded:
            with _same_random_numbers(), without_adapters(loaded.model):
                kept |= self._compute(loaded.model, missing, loaders)
        how = f"computed in {time.monotonic() - began:.1f} s" if missing else "computed by an earlier run"
        line = f"log-probabilities of the reference: {how}, in {kept[steps.rows.digest].parent.parent}"

        def added(rows: TokenRows) -> TokenRows:
            return rows.with_column(REFERENCE, kept[rows.digest])

        with_values = replace(
            feed,
            rows=replace(steps, rows=added(steps.rows)),
            evaluation=feed.evaluation and added(feed.evaluation),
            companions=feed.companions and replace(feed.companions, rows=added(feed.companions.rows)),
            companions_evaluation=feed.companions_evaluation and added(feed.companions_evaluation),
            lines=[*feed.lines, line],
        )
        return with_values, loaded

    def of_step(self, model: list[Chunk], batches: Sequence[Batch]) -> list[Batch]:
        """Add the log-probabilities of the model without its adapters to micro-batches. Collective.

        Ranks before the last pipeline stage do not need them.
        """
        with without_adapters(model):
            found = step_log_probs(model, batches)
        if not found:
            return list(batches)
        return [
            replace(batch, extras={**batch.extras, REFERENCE: DocumentValues(values)})
            for batch, values in zip(batches, found, strict=True)
        ]

    def _path(self, rows: TokenRows) -> Path:
        own = f"{self.digest} {self.computation}"
        key = f"{_FORMAT} {own} {rows.digest} {self.settings.precision.params_dtype}"
        return rows.directory.absolute() / f"reference-{xxhash.xxh3_128_hexdigest(key.encode())}.npy"

    def _is_cached(self, rows: TokenRows) -> bool:
        with suppress(OSError, ValueError):
            values = np.load(self._path(rows), mmap_mode="r", allow_pickle=False)
            return values.shape == (len(rows.spans),) and values.dtype == np.float32
        return False

    def _compute_separately(self, parts: Sequence[TokenRows], loaders: Loaders) -> dict[str, Path]:
        self.context.beat("load the reference", 0, limit=self.settings.run.ddp_timeout)
        other = load_model(self.model_dir, self.settings, loaders.coords, trained=False)
        with without_adapters(other.model):
            kept = self._compute(other.model, parts, loaders)
        del other
        gc.collect()
        torch.cuda.empty_cache()
        return kept

    def _compute(self, model: list[Chunk], parts: Sequence[TokenRows], loaders: Loaders) -> dict[str, Path]:
        """Compute and cache the values of some parts; return their files by the digests of the parts."""
        refuse, has_media = self.settings.data.on_bad_row == "error", loaders.vision is not None

        def readable(batches: list[Batch]) -> list[Batch]:
            return without_unreadable(batches, loaders.coords, refuse=refuse)[0] if has_media else batches

        kept = {}
        for rows in parts:
            values = row_log_probs(
                model,
                *loaders.grouped(rows),
                loaders.coords,
                readable=readable,
                on_step=lambda index: self.context.beat(f"reference batch {index}", 0),
            )
            if not np.isfinite(values).all():
                number = int((~np.isfinite(values)).sum())
                what = f"the reference gives {number} of {len(values)} answers no finite log-probability"
                why = f"{self.model_dir} overflows in {self.settings.precision.params_dtype}, or holds damaged weights"
                raise MegatuneError(Finding(what, why=why, fix="write bf16: true"), ExitCode.NOT_FINITE)
            kept[rows.digest] = self._cache(rows, values)
        return kept

    def _cache(self, rows: TokenRows, values: np.ndarray) -> Path:
        """Write the values in one process of each machine; return the file on every rank. Collective."""
        written = ""
        if self.context.local_rank == 0:
            path = self._path(rows)
            try:
                _write(path, values)
            except OSError as error:  # rows of another user may be read-only
                folder = self.context.run_dir / f"rows-{self.context.node_rank}" / rows.directory.name
                print(f"cannot write {path}: {error.strerror}; written to {folder}, for this run only", flush=True)
                path = folder.absolute() / path.name
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, values)
            written = str(path)
        # The ranks of a machine are consecutive.
        return Path(groups.all_gather_object(written)[self.context.rank - self.context.local_rank])


def open_reference(
    context: RankContext, settings: Settings, source: Path, base: str, resumed: Path | None
) -> Reference | None:
    """Return the reference of a run, None if its loss has none. Collective.

    Args:
        source: the folder of the initial model.
        base: digest of the adapters' base model; "" without adapters.
        resumed: the checkpoint that the run resumes from.

    Raises:
        MegatuneError: INPUT, if ref_model cannot be used; SETTINGS, if it does not fit the layout.
    """
    if not make_objective(settings).has_reference:
        return None
    preference, finetuning = settings.preference, settings.finetuning
    has_adapters = finetuning.finetuning_type == "lora"
    continues = finetuning.continues_adapter  # with its fully trained modules
    if preference.ref_model is not None:
        model_dir = fetched_on_node(context, "ref_model", preference.ref_model, MAIN, settings)
        _check_fits(context, settings, load_architecture(source), model_dir)
        chain, is_loaded, is_start = list(preference.ref_model_adapters), False, False
        digest = ""
    else:
        chain = finetuning.adapter_name_or_path[: -1 if continues else None] if has_adapters else []
        model_dir, digest, is_start = source, base, not continues
        is_loaded = resumed is None
        if has_adapters:
            is_loaded = not (finetuning.additional_target and (continues or resumed is not None))
    changes: dict[str, Any] = {"adapter_name_or_path": chain, "create_new_adapter": True, "additional_target": []}
    if chain or has_adapters:
        changes["finetuning_type"] = "lora"
    own = settings.model_copy(update={"finetuning": finetuning.model_copy(update=changes)})
    is_start = is_start and preference.ld_alpha is None
    weights = digest or digest_base(context, model_dir, own)
    return Reference(context, model_dir, own, weights, _computation(model_dir, chain), is_loaded, is_start)


def _computation(model_dir: Path, adapters: Sequence[str]) -> str:
    """Describe what config.json and the configurations of merged adapters determine: equal weights with another
    `rope_scaling` or `lora_alpha` are another reference."""
    own = [replace(read_peft_config(Path(each)), base_model_name_or_path=None) for each in adapters]
    return repr((load_architecture(model_dir), own))


def _check_fits(context: RankContext, settings: Settings, architecture: Architecture, model_dir: Path) -> None:
    """Check that the reference fits the layout, and preprocesses images and videos as the trained model does."""
    own = load_architecture(model_dir)
    findings = [replace(each, where=f"ref_model: {model_dir}") for each in check(settings, own, context.world_size)]
    if own.model_type != architecture.model_type and (own.vision is not None or architecture.vision is not None):
        trained = with_article(architecture.model_type)
        what = f"ref_model is {with_article(own.model_type)}, and the model that is trained {trained}"
        why = "rows hold images and videos in the form that the trained model reads"
        findings.append(Finding(what, str(model_dir), why, f"name {trained}"))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the RNG state, so that training is the same whether the values are computed or cached."""
    state = device.rng_state()
    try:
        yield
    finally:
        device.set_rng_state(state)


def _write(path: Path, values: np.ndarray) -> None:
    """Write an .npy file atomically; other runs and machines may write the same one."""
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        partial.write_bytes(content.getvalue())
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


class _LogProbs:
    """An objective without a loss or metrics that collects the log-probabilities of documents.

    They are summed as in the pair losses, so that equal policy and reference models give bitwise equal values.
    """

    metric_names = ()

    def __init__(self) -> None:
        self.of_micro_batches: list[Tensor] = []

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        sums = sequence_sums(-token_losses.double(), batch.sequences)
        self.of_micro_batches.append(sums.to(token_losses.dtype))
        return ObjectiveOutput(token_losses.new_zeros(()), replicated=True)


def step_log_probs(model: list[Chunk], batches: Sequence[Batch]) -> list[Tensor]:
    """Return log p(labels) of each document of each micro-batch, fp32 [D]; none before the last pipeline stage.
    Collective.

    Args:
        model: run in eval mode.
        batches: this data-parallel rank's micro-batches of a step.
    """
    found = _LogProbs()
    evaluate(model, [batches], found)
    return found.of_micro_batches


def row_log_probs(
    model: list[Chunk],
    steps: PreparedSteps,
    loader: StepLoader,
    coords: RankCoordinates,
    *,
    readable: Callable[[list[Batch]], list[Batch]],
    on_step: Callable[[int], None],
) -> np.ndarray:
    """Compute log p(labels) of every document of all rows: fp32 [documents], on every rank. Collective.

    Args:
        steps, loader: yield each row once.
        readable: masks sequences with unreadable images and videos in a step's micro-batches.
        on_step: called before each step, with its number.
    """
    values = torch.zeros(len(steps.rows.spans), dtype=torch.float32, device=device.current())
    found = _LogProbs()
    # Tensor- and context-parallel ranks hold the same values.
    keeps = coords.is_last_stage and coords.tp_rank == coords.cp_rank == 0
    progress = Progress("reference", len(steps.rows), "rows", shows=coords.rank == 0)

    def batches() -> Iterator[list[Batch]]:
        for step, of_step in loader:
            on_step(step)
            yield readable(of_step)
            # The batches that were yielded are computed by now.
            for rows, own in zip(loader.places(step), found.of_micro_batches, strict=False):
                numbers = steps.rows.document_numbers(steps.row_ids(step)[rows.start : rows.stop])
                if keeps:  # documents after those of the rows are padding
                    values[device.send(torch.from_numpy(numbers))] = own[: len(numbers)]
            found.of_micro_batches.clear()
            progress.to(min((step + 1) * steps.global_batch_size, len(steps.rows)))

    with progress:
        evaluate(model, batches(), found)
    groups.all_reduce(values)
    return values.cpu().numpy()
