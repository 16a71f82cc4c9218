"""Rows as a page of HTML with everything in one file: the text, what of it is trained, and small copies of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.data.preview.pictures import copies_or_fault, describe
from megatune.data.preview.rows import Preview, RowDocument
from megatune.data.preview.show import (
    TokenText,
    answer_title,
    collapsed,
    shared_prompt,
    title,
    token_texts,
    visible,
)
from megatune.data.rows import Document
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
h2 { font-size: 1.1em; border-bottom: 1px solid #ccc; margin-top: 2em }
h3 { font-size: 1em; color: #555 }
.row { display: flex; gap: 1.5em; align-items: flex-start }
.row > section { flex: 1; min-width: 0 }
pre { flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
figure { margin: 0 0 1em } figcaption { font-size: .85em; color: #555; max-width: 26em }
img { margin-right: 4px; vertical-align: top }
.trained { background: #c9f0cf } .special { color: #7a3e9d } .wrong { color: #b00020 }
"""


def write_page(preview: Preview, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the rows of a preview as a page.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    content = "\n".join(_page(preview, tokenizer))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        finding = Finding("cannot write the page", str(path), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error


def _page(preview: Preview, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>data preview</title>'
    yield f"<style>{_STYLE}</style></head>"
    yield '<body><p><span class="trained">trained</span> context <span class="special">special token</span></p>'
    yield from (f"<p>{escape(note)}</p>" for note in preview.notes)
    for row in preview.rows:
        yield f"<h2>{escape(title(row, preview))}</h2>"
        if preview.arrangement in ("pairs", "packed_pairs"):
            for number, (chosen, rejected) in enumerate(row.pairs, 1):
                if len(row.pairs) > 1:
                    yield _heading(f"pair {number}", chosen)
                yield from _pair(chosen.document, rejected.document, tokenizer)
            continue
        for number, each in enumerate(row.documents, 1):
            if len(row.documents) > 1:
                yield _heading(f"sample {number}", each)
            yield from _document(each.document, token_texts(each.document, tokenizer))
    for where, error in preview.bad:
        yield f'<p class="wrong">{escape(f"{where}: {error} [{error.code}]")}</p>'
    yield "</body></html>"


def _heading(name: str, each: RowDocument) -> str:
    return f"<h3>{escape(f'{name} ({each.where})' if each.where else name)}</h3>"


def _document(document: Document, texts: Sequence[TokenText]) -> Iterator[str]:
    """Write these texts of a document, and its pictures."""
    yield f'<div class="row">{_text(texts)}'
    if document.pictures:
        yield f"<div>{''.join(_figures(document))}</div>"
    yield "</div>"


def _pair(chosen: Document, rejected: Document, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Write the prompt that both answers share, with its pictures, once; below it both answers side by side."""
    shared = shared_prompt(chosen, rejected)
    if shared or chosen.pictures:
        yield from _document(chosen, [each for each in token_texts(chosen, tokenizer) if each.start < shared])
    yield '<div class="row">'
    for name, document in (("chosen", chosen), ("rejected", rejected)):
        texts = [each for each in token_texts(document, tokenizer) if each.start >= shared]
        yield f"<section><h3>{escape(answer_title(name, document, shared))}</h3>{_text(texts)}</section>"
    yield "</div>"


def _text(texts: Sequence[TokenText]) -> str:
    return f"<pre>{''.join(_spans(collapsed(texts)))}</pre>"


def _spans(texts: Iterator[TokenText]) -> Iterator[str]:
    for (trained, special), group in groupby(texts, key=lambda each: (each.trained, each.special)):
        classes = " ".join(["trained"] * trained + ["special"] * special)
        text = escape("".join(visible(each.text) for each in group))
        yield f'<span class="{classes}">{text}</span>' if classes else text


def _figures(document: Document) -> Iterator[str]:
    for number, picture in enumerate(document.pictures, 1):
        copies, fault = copies_or_fault(picture)
        images = "".join(f'<img src="{each}" alt="">' for each in copies)
        wrong = f'<span class="wrong">{escape(fault)}</span>' if fault else ""
        yield f"<figure>{images}{wrong}<figcaption>{escape(describe(number, picture))}</figcaption></figure>"
