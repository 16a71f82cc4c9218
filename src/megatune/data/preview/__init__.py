"""Rows as the model will see them, before anything is trained."""

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


# Samples that are read at most: enough to fill packed rows as they will be, and to show what is wrong with bad ones.
MOST_PACKED = 1000
MOST_READ = 10_000


@dataclass(frozen=True, slots=True)
class RowDocument:
    """One document of a row.

    Attributes:
        where: file and line of its sample; "" where only prepared rows are left of it.
        start: tokens of its text before it, where a long text is cut into several documents.
        length: tokens of the sample before truncation; 0 where nothing is cut away, or it is not known.
        desirable: whether the answer is one that is wanted; None but in stage kto.
        margin: by how much its pair's chosen answer is better; 0 where nothing says it.
        label: of stage cls, what a loss compares with.
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
        name: its data set, "" where a row has samples of several.
        number: counted from 1, of the usable rows of its data set, or of all packed ones.
        documents: one; two of a pair, chosen and rejected; or all of a packed row.
    """

    name: str
    number: int
    documents: tuple[RowDocument, ...]

    @property
    def pairs(self) -> list[tuple[RowDocument, RowDocument]]:
        """The documents of a row of pairs: chosen and rejected ones."""
        return list(zip(self.documents[::2], self.documents[1::2], strict=True))


@dataclass(slots=True)
class Preview:
    """What is shown.

    Attributes:
        read: rows of files that were read for it.
        total: rows that were made of them; those of the longest data set, where each has rows of its own.
        bad: those of them that cannot be trained on, with their places.
        unfilled: placeholders in the rows that no setting fills.
        notes: what makes the rows, and how those shown were chosen.
    """

    arrangement: Arrangement
    rows: list[PreviewRow] = field(default_factory=list)
    read: int = 0
    total: int = 0
    bad: list[tuple[str, RowError]] = field(default_factory=list)
    unfilled: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def load_model_input(settings: Settings) -> tuple[PreTrainedTokenizerBase, VisionInput | None]:
    """Load what makes the rows of a model: its tokenizer, and what makes pictures into tokens, None without vision.

    Raises:
        MegatuneError: what a hub refuses the model with, or files that are missing or cannot be read.
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
    """Encode as few samples as the wanted rows need, and pack them where the run will.

    Args:
        vision: what makes pictures into tokens; None for a language model.
        wanted: numbers of rows, from 1, of each data set; of packed rows, which mix the data sets, of all together.
        evaluation: show the rows that the run evaluates on.

    Raises:
        MegatuneError: settings that do not fit the data (exit code 64), no row to show (65), a missing file (66).
    """
    data = settings.data
    if evaluation and data.val_size and data.streaming:
        why = f"a stream holds out the first {data.val_size:g} samples that mix_strategy draws"
        fix = "leave out --eval: without it, the first rows of each data set are shown"
        raise MegatuneError(Finding("--eval with streaming: true", why=why, fix=fix), ExitCode.SETTINGS)
    if evaluation and not data.val_size and not data.eval_dataset:
        finding = Finding("--eval: nothing is evaluated on", fix="set val_size or eval_dataset")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    encoder = make_encoder(settings, tokenizer, vision)
    if evaluation and data.val_size:
        preview = _held_out(settings, tokenizer, vision, wanted)
    else:
        sources = datasets_of(settings, evaluation=evaluation)
        preview = (_packed if settings.packing else _single)(settings, sources, encoder, wanted)
    preview.notes[:0] = _makers(settings, encoder)
    if data.val_size and not evaluation:
        note = f"val_size {data.val_size:g}: some of these rows are held out of training; --eval shows them"
        preview.notes.append(note)
    if not preview.rows:
        raise _no_rows(preview, wanted)
    return preview


def _single(settings: Settings, sources: Sequence[DatasetSource], encoder: Encoder, wanted: range) -> Preview:
    """Take the wanted rows of every data set."""
    preview = Preview("pairs" if settings.run.stage in PAIR_STAGES else "single")
    for source in sources:
        number = 0
        for documents in islice(_usable(settings, source, encoder, preview), MOST_READ):
            for row in _arranged(documents, settings):
                number += 1
                if number in wanted:
                    preview.rows.append(PreviewRow(source.name, number, row))
            preview.total = max(preview.total, number)
            if number >= wanted.stop - 1:
                break
    return preview


def _packed(settings: Settings, sources: Sequence[DatasetSource], encoder: Encoder, wanted: range) -> Preview:
    """Pack the first samples of every data set, as all will be packed."""
    run = settings.run
    preview = Preview("packed_pairs" if run.stage in PAIR_STAGES else "packed")
    samples: list[tuple[RowDocument, ...]] = []
    most = max(1, MOST_PACKED // len(sources))
    is_cut_off = False
    for source in sources:
        usable = _usable(settings, source, encoder, preview)
        samples += islice(usable, most)
        is_cut_off = is_cut_off or next(usable, None) is not None
    rows = _arranged([*chain.from_iterable(samples)], settings)
    preview.total = len(rows)
    # In an order of training: in that of packing, the first rows are those that the longest samples fill alone.
    order = epoch_order(len(rows), run.seed, 0, not settings.data.disable_shuffling)
    preview.rows = [PreviewRow("", number, rows[i]) for number, i in enumerate(order, 1) if number in wanted]
    first = "the first " if is_cut_off else ""
    what = counted(len(samples), "pair" if run.stage in PAIR_STAGES else "sample")
    preview.notes.append(f"packed from {first}{what} into {counted(len(rows), 'row')}")
    if is_cut_off:
        preview.notes.append("a run packs all samples together, so its rows differ")
    return preview


def _arranged(documents: Sequence[RowDocument], settings: Settings) -> list[tuple[RowDocument, ...]]:
    """Make rows of the documents of samples, as the run makes them; a long text becomes several documents."""
    ends = np.cumsum([0, *(len(each.document.input_ids) for each in documents)])
    spans, borders, _ = RowShape.of(settings).arranged(np.stack([ends[:-1], ends[1:]], axis=1))
    made = []
    for start, stop in spans.tolist():
        number = int(np.searchsorted(ends, start, side="right")) - 1
        whole, first = documents[number], int(ends[number])
        if stop - start < len(whole.document.input_ids):
            place = slice(start - first, stop - first)
            cut = Document(whole.document.input_ids[place], whole.document.labels[place])
            whole = replace(whole, document=cut, start=start - first, length=0)
        made.append(whole)
    return [tuple(made[start:stop]) for start, stop in pairwise(borders.tolist())]


def _usable(
    settings: Settings, source: DatasetSource, encoder: Encoder, preview: Preview
) -> Iterator[tuple[RowDocument, ...]]:
    """Encode samples and yield the documents of those that can be trained on; the others are noted in the preview."""
    samples = islice(read_samples(source, settings), MOST_READ)
    reader = RowReader.of(source, settings, pictures=encoder.vision is not None)
    for sample, encoded in encode_all(encoder, reader, samples):
        preview.read += 1
        # What has no value is shown as it is written; a run would end with it.
        preview.unfilled.update(sample.metadata.missing)
        if isinstance(encoded, RowError):
            preview.bad.append((sample.row.where, encoded))
        else:
            tags = encoded.length, sample.metadata.desirable, encoded.margin, encoded.label
            yield tuple(RowDocument(sample.row.where, each, 0, *tags) for each in encoded.documents)


def _held_out(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None, wanted: range
) -> Preview:
    """Prepare all rows, once and for the run too: which ones val_size holds out is known when all are read."""
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


def _makers(settings: Settings, encoder: Encoder) -> Iterator[str]:
    data, stage = settings.data, settings.run.stage
    name = data.template or "of the tokenizer"
    if data.swift_version and encoder.template is not None:
        name = f"{encoder.template.name} of ms-swift {data.swift_version}"
    template = "" if stage == "pt" else f", template {name}"
    yield f"stage {stage}{template}, cutoff_len {data.cutoff_len:,}" + (", packing" if settings.packing else "")
    names = (("{{name}}", data.model_name), ("{{author}}", data.model_author))
    if filled := [(placeholder, value) for placeholder, value in names if value is not None]:
        said = ((placeholder, value if isinstance(value, str) else " or ".join(value)) for placeholder, value in filled)
        yield ", ".join(f"{placeholder} is {value}" for placeholder, value in said)
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
