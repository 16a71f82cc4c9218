"""How long the rows of a plan are: those of its data where they are at hand, else what was stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.settings import Settings
from megatune.errors import MegatuneError
from megatune.plan.case import PlannedModel
from megatune.plan.rows import RowLengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.data.vision import VisionInput

_OTHERWISE = "--document_length and --longest_document say otherwise"
_MOST_HASHED = 10**9  # bytes of files up to which prepared rows are looked for: their name is one of what is in these


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """Rows to plan for.

    Attributes:
        lengths: None where each is taken to be cutoff_len long.
        most_pictures, largest_picture: as `Case.image_tokens` and `Case.largest_picture`.
        note: what was assumed.
    """

    lengths: RowLengths | None = None
    most_pictures: int | None = None
    largest_picture: int | None = None
    note: str = ""


def stated_rows(settings: Settings, mean: float | None, longest: int | None) -> PlannedRows:
    """Return rows of these lengths; what is not stated is as long as it may be."""
    cutoff = settings.data.cutoff_len
    longest = min(longest or cutoff, cutoff)
    mean = min(mean or longest, longest)
    if settings.packing or mean == longest == cutoff:
        return PlannedRows()
    return PlannedRows(lengths=RowLengths.stated(mean, longest, "as stated"))


def data_rows(settings: Settings, model: PlannedModel) -> PlannedRows:
    """Return rows of the data that settings name, as it is prepared, or from a sample of it."""
    from megatune.data.sampled import not_here, sampled_lengths

    whole = f"rows are taken to be {settings.data.cutoff_len:,} tokens long, cutoff_len"
    try:
        if missing := not_here(settings.data):
            return PlannedRows(note=f"{missing} is not in files here: {whole} ({_OTHERWISE})")
        tokenizer, vision = _input(settings)
        if tokenizer is None and model.architecture.vision is not None:
            return PlannedRows(note=f"no processor of pictures is at hand: {whole} ({_OTHERWISE})")
        if tokenizer is not None and (prepared := _prepared(settings, tokenizer, vision)) is not None:
            return prepared
        found = sampled_lengths(settings, tokenizer, vision)
    except MegatuneError as error:
        return PlannedRows(note=f"the data cannot be looked at ({error.findings[0].what}): {whole} ({_OTHERWISE})")
    if not found.documents:
        return PlannedRows(note=f"the data has no row to look at: {whole} ({_OTHERWISE})")
    weighted = sum(size * size for size in found.documents) / sum(found.documents)
    rows = found.documents
    if settings.packing:  # but for the last ones, rows are full
        rows = [min(settings.data.cutoff_len, sum(rows)) if found.is_whole else settings.data.cutoff_len]
    pictures = found.pictures if vision is not None else None
    return PlannedRows(
        lengths=RowLengths.of(rows, found.words, document=weighted, pictures=pictures),
        most_pictures=found.most_pictures if vision is not None else None,
        largest_picture=found.largest_picture if vision is not None else None,
    )


def _input(settings: Settings) -> tuple[PreTrainedTokenizerBase | None, VisionInput | None]:
    """Return the model's tokenizer and what makes its pictures into tokens, as far as they are here."""
    name = settings.model.model_name_or_path
    folder = None if name is None else Path(name).expanduser()
    if name is not None and folder is not None and not folder.is_dir():
        folder = _cached(name, settings.model.model_revision, settings.model.cache_dir)
    if folder is None or not any((folder / each).is_file() for each in ("tokenizer.json", "tokenizer_config.json")):
        return None, None
    from megatune.data.encode import load_tokenizer
    from megatune.data.vision import load_vision_input

    tokenizer = load_tokenizer(folder)
    return tokenizer, load_vision_input(folder, tokenizer, settings.data)


def _cached(name: str, revision: str, cache_dir: str | None) -> Path | None:
    """Return the folder of a hub's model whose tokenizer was fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _prepared(settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None) -> PlannedRows | None:
    """Return the rows that an earlier run prepared; None where there are none."""
    from megatune.data.cache.folder import cache_dir, is_whole
    from megatune.data.cache.key import prepared_key
    from megatune.data.prepare import open_prepared
    from megatune.data.sources import datasets_of
    from megatune.training.planned_rows import lengths_of

    if sum(file.stat().st_size for source in datasets_of(settings) for file in source.files) > _MOST_HASHED:
        return None
    key = prepared_key(settings, tokenizer, vision=vision).name
    named = settings.data.tokenized_path
    folder = Path(named).expanduser() if named else cache_dir() / "rows" / key
    if not is_whole(folder, key):
        return None
    prepared = open_prepared(folder)
    pictures = prepared.report.train.pictures
    return PlannedRows(
        lengths=lengths_of(prepared.train, pictures),
        most_pictures=pictures.of_row if vision is not None else None,
        largest_picture=pictures.largest if vision is not None else None,
    )
