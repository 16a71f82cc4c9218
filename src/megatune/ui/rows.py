"""Rows of a run as the model sees them, as JSON values: trained and masked texts, images and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatune.data.bad_rows import RowError
from megatune.data.preview import Preview, PreviewRow, RowDocument, load_model_input, read_preview
from megatune.data.preview.show import describe_media, pieces, shared_prompt, thumbnails, title

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

MOST_ROWS = 20


def rows_of(settings: Settings, first: int, count: int, *, evaluation: bool = False) -> dict[str, Any]:
    """Return rows of a training run, numbered from 1 in each of its data sets.

    Raises:
        MegatuneError: the data or the model cannot be read; relative paths start at the server's working directory.
    """
    tokenizer, vision = load_model_input(settings)
    wanted = range(first, first + min(count, MOST_ROWS))
    found = read_preview(settings, tokenizer, vision, wanted=wanted, evaluation=evaluation)
    return {
        "notes": found.notes,
        "bad": [f"{where}: {error}" for where, error in found.bad[:MOST_ROWS]],
        "rows": [_row(row, found, tokenizer) for row in found.rows],
    }


def _row(row: PreviewRow, preview: Preview, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the title of a row and its parts: documents; for a pair the shared prompt, then both answers."""
    parts: list[dict[str, Any]] = []
    if "pairs" in preview.arrangement:
        for chosen, rejected in row.pairs:
            shared = shared_prompt(chosen.document, rejected.document)
            parts.append(_part("prompt", chosen, tokenizer, stop=shared))
            parts += [_part(name, each, tokenizer, start=shared, media=False) for name, each in
                      (("chosen", chosen), ("rejected", rejected))]  # fmt: skip
    else:
        parts = [_part("", each, tokenizer) for each in row.documents]
    return {"title": title(row, preview), "parts": parts}


def _part(
    name: str, row: RowDocument, tokenizer: PreTrainedTokenizerBase, start: int = 0, stop: int | None = None,
    *, media: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the tokens of a document from `start` to `stop`, as texts with whether they are trained and special."""
    stop = len(row.document.input_ids) if stop is None else stop
    shown = list(pieces(row.document, tokenizer, start, stop))
    images: list[dict[str, Any]] = []
    for number, item in enumerate(row.document.media if media else (), 1):
        try:
            images.append({"text": describe_media(number, item), "sources": list(thumbnails(item))})
        except RowError as error:
            images.append({"text": f"{describe_media(number, item)}: {error}", "sources": []})
    return {"name": name, "tokens": stop - start, "texts": shown, "images": images}
