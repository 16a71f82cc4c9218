"""How long the rows of a plan are: those of its data where they are at hand, else what was stated; and the plan that is
made again once a run has its rows, before its weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.load import Loaded
from megatune.config.settings import Settings
from megatune.errors import MegatuneError
from megatune.plan.case import Case, PlannedModel
from megatune.plan.read_question import PlannedRows
from megatune.plan.rows import RowLengths
from megatune.plan.run.preflight import Preflight, with_rows

if TYPE_CHECKING:
    from megatune.data.encode import Encoder
    from megatune.data.pictures import PictureCounts
    from megatune.data.rows import TokenRows

_MOST = 100_000  # lengths that are summed up; of more, as many at equal distances
_OTHERWISE = "--document_length and --longest_document say otherwise"


def data_rows(settings: Settings, model: PlannedModel) -> PlannedRows:
    """Return rows of the data that settings name: as an earlier run had them, or from a sample of it."""
    from megatune.data.sampled import not_here, sampled_lengths, text_counter

    whole = f"rows are taken to be {settings.data.cutoff_len:,} tokens long, cutoff_len"
    try:
        if (prepared := _prepared(settings)) is not None:
            return prepared
        if missing := not_here(settings):
            return PlannedRows(note=f"{missing} is not in files here: {whole} ({_OTHERWISE})")
        folder = _model_folder(settings)
        if model.architecture.vision is None:
            found = sampled_lengths(settings, None if folder is None else text_counter(folder))
        elif folder is None:
            return PlannedRows(note=f"no processor of pictures is at hand: {whole} ({_OTHERWISE})")
        else:
            found = sampled_lengths(settings, encoder=_encoder(settings, folder))
    except MegatuneError as error:
        return PlannedRows(note=f"the data cannot be looked at ({error.findings[0].what}): {whole} ({_OTHERWISE})")
    if not found.documents:
        return PlannedRows(note=f"the data has no row to look at: {whole} ({_OTHERWISE})")
    weighted = sum(size * size for size in found.documents) / sum(found.documents)
    rows = found.documents
    if settings.packing:  # but for the last ones, rows are full
        rows = [min(settings.data.cutoff_len, sum(rows)) if found.is_whole else settings.data.cutoff_len]
    lengths = RowLengths.of(rows, found.words, document=weighted, pictures=found.pictures if found.is_exact else None)
    tokens = sum(found.documents) * found.rows / (found.encoded or found.rows) if found.is_whole else None
    if not found.is_exact:
        return PlannedRows(lengths=lengths, tokens=tokens)
    return PlannedRows(
        lengths=lengths,
        most_pictures=found.most_pictures,
        largest_picture=found.largest_picture or None,
        tokens=tokens,
    )


def _model_folder(settings: Settings) -> Path | None:
    """Return the folder with the model's tokenizer, as far as it is here."""
    name = settings.model.model_name_or_path
    folder = None if name is None else Path(name).expanduser()
    if name is not None and folder is not None and not folder.is_dir():
        folder = _cached(name, settings.model.model_revision, settings.model.cache_dir)
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def _encoder(settings: Settings, folder: Path) -> Encoder:
    from megatune.data.encode import load_tokenizer, make_encoder
    from megatune.data.vision import load_vision_input

    tokenizer = load_tokenizer(folder)
    return make_encoder(settings, tokenizer, load_vision_input(folder, tokenizer, settings.data))


def _cached(name: str, revision: str, cache_dir: str | None) -> Path | None:
    """Return the folder of a hub's model whose tokenizer was fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _prepared(settings: Settings) -> PlannedRows | None:
    """Return the rows that a run into the same folder noted, of the same model and data; None where there are none."""
    from megatune.plan.run.record import PLAN_NAME, read_records

    output = settings.run.output_dir
    if output is None or not (Path(output).expanduser() / PLAN_NAME).is_file():
        return None
    case = read_records(Path(output).expanduser())[-1].case
    same = all(getattr(case.settings, name) == getattr(settings, name) for name in ("data", "model"))
    if not same or case.lengths is None or case.settings.run.stage != settings.run.stage:
        return None
    lengths = replace(case.lengths, origin=f"of all rows, as {output} has them")
    return PlannedRows(lengths=lengths, most_pictures=case.image_tokens, largest_picture=case.largest_picture)


def lengths_of(rows: TokenRows, pictures: PictureCounts) -> RowLengths:
    """Sum up the lengths of rows, as the planner wants them: of answers where a row is a pair of them."""
    import numpy as np  # `megatune plan` does without

    spans = rows.spans
    documents = np.sort(spans[:, 1] - spans[:, 0])
    per_row = 2 if rows.is_pairs else 1
    lengths = np.sort(-(-rows.row_lengths() // per_row)) if rows.is_packed else documents
    if len(lengths) > _MOST:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MOST).astype(np.int64)]
    weighted = float(np.square(documents, dtype=np.float64).sum() / max(1, documents.sum()))
    return RowLengths.of(
        lengths.tolist(), "of all rows", document=weighted, pictures=pictures.tokens / len(rows) if len(rows) else 0.0
    )


def plan_rows(case: Case, lengths: RowLengths, pictures: PictureCounts, asked: Loaded | None) -> Preflight:
    """Plan a run for these rows.

    Args:
        asked: what the user wrote, in whose words advice is given.

    Raises:
        MegatuneError: SETTINGS, where it cannot fit.
    """
    seen = (pictures.of_row, pictures.largest) if case.model.architecture.vision is not None else None
    return with_rows(case, lengths, seen, loaded=asked)
