"""Preview the rows as the model will see them, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.groups.run import PAIR_STAGES
from megatune.config.model import open_changed
from megatune.config.values import counted
from megatune.data.bad_rows import RowError
from megatune.data.build import RowShape
from megatune.data.encode import Encoder, load_tokenizer, make_encoder
from megatune.data.order import epoch_order
from megatune.data.prepare import prepare
from megatune.data.rows import DESIRABLE, LABEL, MARGIN, Arrangement, Document
from megatune.data.samples import RowReader, read_samples
from megatune.data.sources import DatasetSource, datasets_of
from megatune.data.templates import stop_note
from megatune.data.vision import VisionInput, load_vision_input
from megatune.data.workers import encode_all
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings


# Maximum samples to read: enough to fill packed rows as in the run, and to show what is wrong with bad ones.
MAX_PACKED = 1000
MAX_READ = 10_000


@dataclass(frozen=True, slots=True)
class RowDocument:
    """One document of a row.

    Attributes:
        where: file and line of its sample; "" for prepared rows, which do not record it.
        start: tokens of its text before it, if a long text is cut into several documents.
        length: tokens of the sample before truncation; 0 if it is not truncated, or if this is not known.
        desirable: for stage kto, whether the answer is desirable; otherwise None.
        margin: how much better the chosen answer of its pair is; 0 if the row does not state it.
        label: for stage cls, the label for the loss.
    """

    where: str
    document: Document
    start: int = 0
    length: int = 0
    desirable: bool | None = None
    margin: float = 0.0
    label: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """One row.

    Attributes:
        name: its data set; "" if a row has samples of several.
        number: counted from 1 among the usable rows of its data set, or among all packed rows.
        documents: one; the two of a pair, chosen and rejected; or all of a packed row.
    """

    name: str
    number: int
    documents: tuple[RowDocument, ...]

    @property
    def pairs(self) -> list[tuple[RowDocument, RowDocument]]:
        """The documents of a row of pairs, as (chosen, rejected)."""
        return list(zip(self.documents[::2], self.documents[1::2], strict=True))


@dataclass(slots=True)
class Preview:
    """The result of `read_preview`.

    Attributes:
        read: rows of files that were read.
        total: rows that were built from them; that of the longest data set, if each has separate rows.
        bad: rows that cannot be trained on, with their locations.
        unfilled: placeholders in the rows that no setting fills.
        notes: how rows are built, and how the shown ones were chosen.
    """

    arrangement: Arrangement
    rows: list[PreviewRow] = field(default_factory=list)
    read: int = 0
    total: int = 0
    bad: list[tuple[str, RowError]] = field(default_factory=list)
    unfilled: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def load_model_input(settings: Settings) -> tuple[PreTrainedTokenizerBase, VisionInput | None]:
    """Load what builds the rows of a model: its tokenizer and its image and video input (None without vision).

    Raises:
        MegatuneError: the hub denies access to the model, or files are missing or cannot be read.
    """
    model = settings.model
    assert model.model_name_or_path is not None, "required by the rules of the data"
    folder = open_changed(settings, model.model_name_or_path, model.model_revision).tokenizer_dir()
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_vision_input(folder, tokenizer, settings.data)


def read_preview(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionInput | None = None,
    *,
    wanted: range,
    evaluation: bool = False,
) -> Preview:
    """Encode as few samples as the wanted rows need, and pack them if the run packs.

    Args:
        vision: converts images and videos to tokens; None for a language model.
        wanted: numbers of rows, from 1, in each data set; packed rows mix the data sets and are numbered together.
        evaluation: show the evaluation rows of the run.

    Raises:
        MegatuneError: settings that do not fit the data (exit code 64), no row to show (65), a missing file (66).
    """
    data = settings.data
    if evaluation and data.val_size and data.streaming:
        why = f"a stream holds out the first {data.val_size:g} samples that mix_strategy draws"
        fix = "remove --eval to show the first rows of each data set"
        raise MegatuneError(Finding("--eval with streaming: true", why=why, fix=fix), ExitCode.SETTINGS)
    if evaluation and not data.val_size and not data.eval_dataset:
        finding = Finding("--eval: the run has no evaluation rows", fix="set val_size or eval_dataset")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    encoder = make_encoder(settings, tokenizer, vision)
    if evaluation and data.val_size:
        preview = _held_out(settings, tokenizer, vision, wanted)
    else:
        sources = datasets_of(settings, evaluation=evaluation)
        preview = (_packed if settings.packing else _single)(settings, sources, encoder, wanted)
    preview.notes[:0] = _describe_encoder(settings, encoder)
    if data.val_size and not evaluation:
        note = f"val_size {data.val_size:g}: some of these rows are held out of training; --eval shows them"
        preview.notes.append(note)
    if not preview.rows:
        raise _no_rows(preview, wanted)
    return preview


def _single(settings: Settings, sources: Sequence[DatasetSource], encoder: Encoder, wanted: range) -> Preview:
    """Read the wanted rows of every data set."""
    preview = Preview("pairs" if settings.run.stage in PAIR_STAGES else "single")
    for source in sources:
        number = 0
        for documents in islice(_usable(settings, source, encoder, preview), MAX_READ):
            for row in _build_rows(documents, settings):
                number += 1
                if number in wanted:
                    preview.rows.append(PreviewRow(source.name, number, row))
            preview.total = max(preview.total, number)
            if number >= wanted.stop - 1:
                break
    return preview


def _packed(settings: Settings, sources: Sequence[DatasetSource], encoder: Encoder, wanted: range) -> Preview:
    """Pack the first samples of all data sets together."""
    run = settings.run
    preview = Preview("packed_pairs" if run.stage in PAIR_STAGES else "packed")
    samples: list[tuple[RowDocument, ...]] = []
    limit = max(1, MAX_PACKED // len(sources))
    is_truncated = False
    for source in sources:
        usable = _usable(settings, source, encoder, preview)
        samples += islice(usable, limit)
        is_truncated = is_truncated or next(usable, None) is not None
    rows = _build_rows([*chain.from_iterable(samples)], settings)
    preview.total = len(rows)
    # Show rows in an order of training: in the order of packing, the first rows each hold one of the longest samples.
    order = epoch_order(len(rows), run.seed, 0, not settings.data.disable_shuffling)
    preview.rows = [PreviewRow("", number, rows[i]) for number, i in enumerate(order, 1) if number in wanted]
    first = "the first " if is_truncated else ""
    what = counted(len(samples), "pair" if run.stage in PAIR_STAGES else "sample")
    preview.notes.append(f"packed from {first}{what} into {counted(len(rows), 'row')}")
    if is_truncated:
        preview.notes.append("a run packs all samples together, so its rows differ")
    return preview


def _build_rows(documents: Sequence[RowDocument], settings: Settings) -> list[tuple[RowDocument, ...]]:
    """Build rows from the documents of samples as the run does; a long text becomes several documents."""
    ends = np.cumsum([0, *(len(each.document.input_ids) for each in documents)])
    spans, borders, _ = RowShape.of(settings).arranged(np.stack([ends[:-1], ends[1:]], axis=1))
    rows = []
    for start, stop in spans.tolist():
        number = int(np.searchsorted(ends, start, side="right")) - 1
        whole, first = documents[number], int(ends[number])
        if stop - start < len(whole.document.input_ids):
            place = slice(start - first, stop - first)
            cut = Document(whole.document.input_ids[place], whole.document.labels[place])
            whole = replace(whole, document=cut, start=start - first, length=0)
        rows.append(whole)
    return [tuple(rows[start:stop]) for start, stop in pairwise(borders.tolist())]


def _usable(
    settings: Settings, source: DatasetSource, encoder: Encoder, preview: Preview
) -> Iterator[tuple[RowDocument, ...]]:
    """Encode samples and yield the documents of usable ones; record the others in the preview."""
    samples = islice(read_samples(source, settings), MAX_READ)
    reader = RowReader.of(source, settings, media=encoder.vision is not None)
    for sample, encoded in encode_all(encoder, reader, samples):
        preview.read += 1
        # A placeholder without a value is shown unchanged; a run would stop with an error.
        preview.unfilled.update(sample.metadata.missing)
        if isinstance(encoded, RowError):
            preview.bad.append((sample.row.where, encoded))
        else:
            tags = encoded.length, sample.metadata.desirable, encoded.margin, encoded.label
            yield tuple(RowDocument(sample.row.where, each, 0, *tags) for each in encoded.documents)


def _held_out(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None, wanted: range
) -> Preview:
    """Prepare all rows, which the run reuses: val_size can only be split off when all rows are read."""
    rows = prepare(settings, tokenizer, vision=vision).evaluation
    assert rows is not None
    preview = Preview(rows.arrangement, total=len(rows))
    preview.notes.append(f"held out: {len(rows):,} of the rows; prepared rows do not record their lines")
    for number in range(wanted.start, min(wanted.stop, len(rows) + 1)):
        extras = rows.extras([number - 1])
        desirable = bool(extras[DESIRABLE].values[0]) if DESIRABLE in extras else None
        margins = extras[MARGIN].values if MARGIN in extras else [0.0] * len(rows[number - 1])
        labels = map(tuple, extras[LABEL].values.tolist()) if LABEL in extras else [None] * len(rows[number - 1])
        documents = tuple(
            RowDocument("", each, desirable=desirable, margin=float(margin), label=label)
            for each, margin, label in zip(rows[number - 1], margins, labels, strict=True)
        )
        preview.rows.append(PreviewRow("", number, documents))
    return preview


def _describe_encoder(settings: Settings, encoder: Encoder) -> Iterator[str]:
    data, stage = settings.data, settings.run.stage
    name = data.template or "of the tokenizer"
    if data.swift_version and encoder.template is not None:
        name = f"{encoder.template.name} of ms-swift {data.swift_version}"
    template = "" if stage == "pt" else f", template {name}"
    yield f"stage {stage}{template}, cutoff_len {data.cutoff_len:,}" + (", packing" if settings.packing else "")
    names = (("{{name}}", data.model_name), ("{{author}}", data.model_author))
    if filled := [(name, value) for name, value in names if value is not None]:
        texts = ((name, value if isinstance(value, str) else " or ".join(value)) for name, value in filled)
        yield ", ".join(f"{name} is {value}" for name, value in texts)
    if encoder.template is not None and (note := stop_note(encoder.template, encoder.tokenizer)):
        yield f"note: {note}"


def _no_rows(preview: Preview, wanted: range) -> MegatuneError:
    if preview.total:
        what = f"--row {wanted.start} of {counted(preview.total, 'row')}"
        return MegatuneError(Finding(what, fix=f"--row {preview.total} or less"), ExitCode.SETTINGS)
    if not preview.bad:
        return MegatuneError(Finding("the data sets have no rows"), ExitCode.DATA)
    (where, first), what = preview.bad[0], f"0 usable of the first {preview.read:,} rows"
    return MegatuneError(Finding(what, where, str(first), "fix the rows, or columns and tags"), ExitCode.DATA)
