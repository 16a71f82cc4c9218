"""Rows on a terminal or in a file: what is trained is green, or stands between ⟦ and ⟧ where there are no colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from megatune.data.bad_rows import RowError
from megatune.data.conversation import PLACEHOLDERS
from megatune.data.preview.pieces import Piece, pieces_of, trained_tokens, visible
from megatune.data.preview.rows import Part, Preview, PreviewRow
from megatune.data.rows import IGNORE_INDEX, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "⟦", "⟧"
_TRAINED, _SPECIAL, _HEADING, _WRONG = "green", "bold", "bold cyan", "red"
_PLACES_PER_REASON = 3


def show_preview(
    preview: Preview,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    *,
    ids: bool = False,
    wraps: bool = False,
) -> None:
    """Print rows, and what was wrong with others.

    Args:
        console: colours are used where it has some.
        ids: a line for every token instead of text.
        wraps: break lines at the console's width; otherwise that is the terminal's to do.
    """
    for line in _Page(tokenizer, ids, console.is_terminal and not console.no_color).lines(preview):
        console.print(line, soft_wrap=not wraps, highlight=False, overflow="fold" if wraps else None)


class _Page:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: bool, coloured: bool) -> None:
        self._tokenizer, self._ids, self._coloured = tokenizer, ids, coloured
        self._wrong = _WRONG if coloured else ""

    def lines(self, preview: Preview) -> Iterator[Text]:
        for note in preview.notes:
            yield Text(note)
        for placeholder in sorted(preview.unfilled):
            setting = PLACEHOLDERS[placeholder]
            yield Text(f"{placeholder} is in the data and {setting} is not set: a run is refused", self._wrong)
        yield self._legend()
        for row in preview.rows:
            yield Text("")
            yield self._heading(f"── {_title(row, preview)} ──")
            if preview.arrangement == "pairs":
                yield from self._pair(*row.parts)
            elif preview.arrangement == "packed":
                yield from self._joined(row)
            else:
                yield self._shown(row.parts[0].document)
        if preview.bad:
            yield Text("")
            yield from self._bad(preview)

    def _legend(self) -> Text:
        if self._ids:
            return Text(f"label {IGNORE_INDEX}: not trained")
        if not self._coloured:
            return Text(f"{_OPEN}trained{_CLOSE} context")
        return Text.assemble(("trained", _TRAINED), " context ", ("special token", _SPECIAL))

    def _heading(self, text: str) -> Text:
        return Text(text, style=_HEADING if self._coloured else "")

    def _joined(self, row: PreviewRow) -> Iterator[Text]:
        """The documents of a packed row, and where they join."""
        for number, part in enumerate(row.parts, 1):
            size = len(part.document.input_ids)
            goes_on = f", from token {part.start:,} of its text" if part.start else ""
            yield self._heading(
                f"╌╌ sample {number}{_of(part)}: {_tokens(size)}, positions 0 to {size - 1:,}{goes_on} ╌╌"
            )
            yield self._shown(part.document)

    def _pair(self, chosen: Part, rejected: Part) -> Iterator[Text]:
        """The prompt that both answers share, once, then what follows in each."""
        shared = shared_prompt(chosen.document, rejected.document)
        if shared:
            yield self._heading(f"╌╌ prompt of both: {_tokens(shared)} ╌╌")
            yield self._shown(chosen.document, stop=shared)
        for name, part in (("chosen", chosen), ("rejected", rejected)):
            size = len(part.document.input_ids) - shared
            yield self._heading(f"╌╌ {name}: {_tokens(size)}, {_num_trained(part.document):,} trained ╌╌")
            yield self._shown(part.document, start=shared)

    def _shown(self, document: Document, start: int = 0, stop: int | None = None) -> Text:
        """A document from one of its tokens to another."""
        stop = len(document.input_ids) if stop is None else stop
        pieces = [piece for piece in pieces_of(document, self._tokenizer) if start <= piece.start < stop]
        return self._table(pieces, document) if self._ids else self._text(pieces)

    def _text(self, pieces: Iterable[Piece]) -> Text:
        text = Text()
        for trained, group in groupby(pieces, key=lambda piece: piece.trained):
            if trained and not self._coloured:
                text.append(_OPEN)
            for style, alike in groupby(group, key=self._style):
                text.append("".join(visible(piece.text) for piece in alike), style)
            if trained and not self._coloured:
                _close(text)
        if text.plain.endswith("\n"):  # it shows as ↵, and the line ends anyway
            text.right_crop(1)
        return text

    def _style(self, piece: Piece) -> str:
        styles = [_TRAINED] * piece.trained + [_SPECIAL] * piece.special
        return " ".join(styles) if self._coloured else ""

    def _table(self, pieces: Iterable[Piece], document: Document) -> Text:
        """A line for every token: its position, id, label and text; of a character that several share, which part."""
        text = Text("position       id    label  token")
        for piece in pieces:
            size = piece.stop - piece.start
            for place in range(piece.start, piece.stop):
                token = int(document.input_ids[place])
                label = token if piece.trained else IGNORE_INDEX
                part = f" ({place - piece.start + 1} of {size})" if size > 1 else ""
                shown = visible(piece.text).replace("\n", "").replace("\t", "").replace(" ", "␣")
                text.append(f"\n{place:8} {token:8} {label:8}  {shown}{part}", self._style(piece))
        return text

    def _bad(self, preview: Preview) -> Iterator[Text]:
        """Rows that cannot be trained on, by their reasons."""
        yield Text(f"{len(preview.bad):,} of the {preview.read:,} rows read cannot be trained on:", self._wrong)
        counts = Counter((error.code, error.reason) for _, error in preview.bad)
        for (code, reason), count in counts.most_common():
            yield Text(f"    {count:,} × {code}: {visible(reason)}")
            here = [(where, error) for where, error in preview.bad if (error.code, error.reason) == (code, reason)]
            for where, error in here[:_PLACES_PER_REASON]:
                yield Text(f"        {where}{_detail(error)}")


def shared_prompt(chosen: Document, rejected: Document) -> int:
    """Tokens at the beginning of both that are the same and not trained."""
    size = min(len(chosen.input_ids), len(rejected.input_ids))
    differ = chosen.input_ids[:size] != rejected.input_ids[:size]
    differ |= trained_tokens(chosen.labels)[:size] | trained_tokens(rejected.labels)[:size]
    return int(differ.argmax()) if differ.any() else size


def _close(text: Text) -> None:
    """End a trained stretch, on the line that it ends on."""
    ends_line = text.plain.endswith("\n")
    if ends_line:
        text.right_crop(1)
    text.append(_CLOSE + "\n" * ends_line)


def _title(row: PreviewRow, preview: Preview) -> str:
    sizes = [len(part.document.input_ids) for part in row.parts]
    trained = sum(_num_trained(part.document) for part in row.parts)
    first, name = row.parts[0], f"{row.name} " if row.name else ""
    if preview.arrangement == "packed":
        samples = f"{len(sizes)} sample{'s' * (len(sizes) > 1)}"
        return f"row {row.number}: {samples}, {_tokens(sum(sizes))}, {trained:,} trained"
    if preview.arrangement == "pairs":
        return f"{name}row {row.number}{_of(first)}: {sizes[0]:,} and {sizes[1]:,} tokens{_cut(row.parts)}"
    place = f", from token {first.start:,} of its text" if first.start else ""
    return f"{name}row {row.number}{_of(first)}: {_tokens(sizes[0])}, {trained:,} trained{_cut(row.parts)}{place}"


def _cut(parts: Sequence[Part]) -> str:
    """What was cut away, if anything: `length` counts the tokens before; of a pair, those of the longer document."""
    whole = max(part.length for part in parts)
    longest = max(len(part.document.input_ids) for part in parts)
    return f", cut from {whole:,}" if whole > longest and not parts[0].start else ""


def _of(part: Part) -> str:
    return f" ({part.where})" if part.where else ""


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _num_trained(document: Document) -> int:
    return int(trained_tokens(document.labels).sum())


def _detail(error: RowError) -> str:
    return f": {visible(error.detail)}" if error.detail else ""
