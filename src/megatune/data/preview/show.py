"""Show rows on a terminal, as HTML or as JSON: trained text is green, or between ⟦ and ⟧ without colors."""

from __future__ import annotations

import base64
import io
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatune.config.values import counted
from megatune.data.bad_rows import RowError
from megatune.data.conversation import PLACEHOLDERS
from megatune.data.media.images import open_image
from megatune.data.media.video import decode_frames
from megatune.data.media_table import DocumentMedia, unpacked
from megatune.data.preview import Preview, PreviewRow, RowDocument
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "⟦", "⟧"
_TRAINED, _SPECIAL, _HEADING, _WRONG = "green", "bold", "bold cyan", "red"
_EXAMPLES_PER_REASON = 3
_COLUMNS = 80  # of the narrowest line that shows two answers side by side
_PAGE_COLUMNS = 160  # of an HTML page
_SIDE = 160  # pixels of the longest side of a thumbnail
_MAX_FRAMES = 4  # of a video on an HTML page
_MAX_TOKENS = 8  # per character: an incomplete character after these is shown as it decodes
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"  # in emojis: invisible, and kept
_VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
# Marks the place of an image with this number until HTML is written, with characters that `visible` always escapes.
_IMAGES = "\N{PARAGRAPH SEPARATOR}{}\N{PARAGRAPH SEPARATOR}"
_PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>data preview</title><style>{stylesheet}
body {{ color: {foreground}; background: {background} }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body><pre>{code}</pre></body></html>
"""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of tokens that decode only together: mostly one token, or several that share a character.

    Attributes:
        start, stop: positions of the tokens in their document.
        text: as the tokenizer decodes it.
        special: one of the tokenizer's special tokens, such as <|im_end|>, not text.
        trained: the tokens count in the loss.
    """

    start: int
    stop: int
    text: str
    special: bool
    trained: bool


def show_preview(
    preview: Preview, tokenizer: PreTrainedTokenizerBase, console: Console, *, ids: bool = False, wraps: bool = False
) -> None:
    """Print rows, and the errors of bad rows.

    Args:
        console: colors are used if it supports them.
        ids: print a line for every token instead of text.
        wraps: break lines at the console's width; otherwise the terminal wraps them.
    """
    # If the width of lines is unknown, do not show columns, which would break lines.
    columns = (wraps or console.is_terminal) and not ids and console.width >= _COLUMNS
    page = _Page(tokenizer, ids, console.is_terminal and not console.no_color, columns)
    _print(page.lines(preview), console, wraps=wraps)


def write_page(preview: Preview, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the rows of a preview as a single HTML file, with thumbnails of images and videos.

    Raises:
        MegatuneError: the file cannot be written (exit code 73).
    """
    options: dict[str, Any] = {"force_terminal": True, "no_color": False, "width": _PAGE_COLUMNS}
    console = Console(file=io.StringIO(), record=True, **options)
    page = _Page(tokenizer, ids=False, colored=True, columns=True, with_thumbnails=True)
    _print(page.lines(preview), console, wraps=False)
    content = console.export_html(code_format=_PAGE)
    for number, images in enumerate(page.images):
        content = content.replace(_IMAGES.format(number), images)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        finding = Finding("cannot write the page", str(path), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error


def json_lines(preview: Preview, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield each row as JSON for other tools: ids, labels, text and location of its sample; for a pair, those of chosen
    and rejected; for a packed row, the list of its sequences.

    The location is null for prepared rows, which do not record it.
    """
    for row in preview.rows:
        written: list[dict[str, Any]] = []
        for each in row.documents:
            ids = each.document.input_ids.tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            labels = each.document.labels.tolist()
            written.append({"place": each.where or None, "ids": ids, "labels": labels, "text": text})
        if "pairs" in preview.arrangement:
            pairs = zip(row.pairs, written[::2], written[1::2], strict=True)
            written = [
                {"place": first.where or None, "chosen": chosen, "rejected": rejected}
                for (first, _), chosen, rejected in pairs
            ]
        named: dict[str, Any] = {"dataset": row.name or None, "row": row.number}
        named |= {"sequences": written} if preview.arrangement.startswith("packed") else written[0]
        yield json.dumps(named, ensure_ascii=False)


def _print(lines: Iterable[Text | Table], console: Console, *, wraps: bool) -> None:
    for line in lines:
        breaks = wraps or isinstance(line, Table)
        console.print(line, soft_wrap=not breaks, highlight=False, overflow="fold" if breaks else None)


class _Page:
    """The lines of a preview; `images` holds the thumbnails of each image or video as HTML, if requested."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ids: bool, colored: bool, columns: bool, with_thumbnails: bool = False
    ) -> None:
        self._tokenizer, self._ids, self._colored, self._columns = tokenizer, ids, colored, columns
        self._wrong = _WRONG if colored else ""
        self._with_thumbnails = with_thumbnails
        self.images: list[str] = []

    def lines(self, preview: Preview) -> Iterator[Text | Table]:
        for note in preview.notes:
            yield Text(note)
        for placeholder in sorted(preview.unfilled):
            setting = PLACEHOLDERS[placeholder]
            yield Text(f"{placeholder} is in the data, but {setting} is not set: training would fail", self._wrong)
        if self._ids:
            yield Text(f"label {IGNORE_INDEX}: not trained")
        elif self._colored:
            yield Text.assemble(("trained", _TRAINED), " context ", ("special token", _SPECIAL))
        else:
            yield Text(f"{_OPEN}trained{_CLOSE} context")
        for row in preview.rows:
            yield Text("")
            yield self._heading(f"── {title(row, preview)} ──")
            if preview.arrangement == "pairs":
                yield from self._pair(*row.documents)
            elif preview.arrangement == "packed_pairs":
                for number, (chosen, rejected) in enumerate(row.pairs, 1):
                    sizes = (f"{len(each.document.input_ids):,}" for each in (chosen, rejected))
                    yield self._heading(f"╌╌ pair {number}{_of(chosen)}: {' and '.join(sizes)} tokens ╌╌")
                    yield from self._pair(chosen, rejected)
            elif preview.arrangement == "packed":
                yield from self._packed_row(row)
            else:
                yield from self._media(row.documents[0].document)
                yield self._render(row.documents[0].document)
        if preview.bad:
            yield Text("")
            yield from self._bad(preview)

    def _heading(self, text: str) -> Text:
        return Text(text, style=_HEADING if self._colored else "")

    def _packed_row(self, row: PreviewRow) -> Iterator[Text]:
        """Show the documents of a packed row, and where they join."""
        for number, each in enumerate(row.documents, 1):
            size = len(each.document.input_ids)
            place = f"positions 0 to {size - 1:,}{_start(each)}"
            yield self._heading(f"╌╌ sample {number}{_of(each)}: {counted(size, 'token')}, {place} ╌╌")
            yield from self._media(each.document)
            yield self._render(each.document)

    def _pair(self, chosen: RowDocument, rejected: RowDocument) -> Iterator[Text | Table]:
        """Show the shared prompt of both answers once, then the rest of each, side by side or one after the other."""
        shared = shared_prompt(chosen.document, rejected.document)
        yield from self._media(chosen.document)
        if shared:
            yield self._heading(f"╌╌ prompt of both: {counted(shared, 'token')} ╌╌")
            yield self._render(chosen.document, stop=shared)
        answers = []
        for name, document in (("chosen", chosen.document), ("rejected", rejected.document)):
            size = counted(len(document.input_ids) - shared, "token")
            heading = self._heading(f"╌╌ {name}: {size}, {_num_trained(document):,} trained ╌╌")
            answers.append((heading, self._render(document, start=shared)))
        if self._columns:
            table = Table.grid(padding=(0, 3), expand=True)
            for _ in answers:
                table.add_column(ratio=1, overflow="fold")
            for parts in zip(*answers, strict=True):
                table.add_row(*parts)
            yield table
            return
        for parts in answers:
            yield from parts

    def _media(self, document: Document) -> Iterator[Text]:
        for number, item in enumerate(document.media, 1):
            yield Text(visible(describe_media(number, item)))
            if self._with_thumbnails:
                try:
                    copies = [f'<img src="{each}" alt=""> ' for each in thumbnails(item)]
                except RowError as error:
                    yield Text(visible(str(error)), self._wrong)
                    continue
                yield Text(_IMAGES.format(len(self.images)))
                self.images.append("".join(copies))

    def _render(self, document: Document, start: int = 0, stop: int | None = None) -> Text:
        """Show the tokens `start` to `stop` of a document."""
        stop = len(document.input_ids) if stop is None else stop
        if not self._ids:
            return self._text(pieces(document, self._tokenizer, start, stop))
        texts = token_texts(document, self._tokenizer)
        return self._table((each for each in texts if start <= each.start < stop), document)

    def _text(self, texts: Iterable[tuple[str, bool, bool]]) -> Text:
        text = Text()
        for trained, group in groupby(texts, key=itemgetter(1)):
            marked = trained and not self._colored
            if marked:
                text.append(_OPEN)
            for piece, _, special in group:
                text.append(piece, self._style(trained, special))
            if marked:
                ends_line = text.plain.endswith("\n")
                if ends_line:  # close it before the line break
                    text.right_crop(1)
                text.append(_CLOSE + "\n" * ends_line)
        if text.plain.endswith("\n"):  # it is shown as ↵, and the line ends anyway
            text.right_crop(1)
        return text

    def _style(self, trained: bool, special: bool) -> str:
        styles = [_TRAINED] * trained + [_SPECIAL] * special
        return " ".join(styles) if self._colored else ""

    def _table(self, texts: Iterable[TokenText], document: Document) -> Text:
        """Write a line per token: position, id, label and text; for a character of several tokens also which part."""
        text = Text("position       id    label  token")
        for each in texts:
            size = each.stop - each.start
            shown = visible(each.text).replace("\n", "").replace("\t", "").replace(" ", "␣")
            for place in range(each.start, each.stop):
                token = int(document.input_ids[place])
                label = token if each.trained else IGNORE_INDEX
                part = f" ({place - each.start + 1} of {size})" if size > 1 else ""
                text.append(f"\n{place:8} {token:8} {label:8}  {shown}{part}", self._style(each.trained, each.special))
        return text

    def _bad(self, preview: Preview) -> Iterator[Text]:
        """List rows that cannot be trained on, by reason."""
        yield Text(f"{len(preview.bad):,} of the {preview.read:,} rows read cannot be trained on:", self._wrong)
        counts = Counter((error.code, error.reason) for _, error in preview.bad)
        for (code, reason), count in counts.most_common():
            yield Text(f"    {count:,} × {code}: {visible(reason)}")
            here = [(where, error) for where, error in preview.bad if (error.code, error.reason) == (code, reason)]
            for where, error in here[:_EXAMPLES_PER_REASON]:
                detail = f": {visible(error.detail)}" if error.detail else ""
                yield Text(f"        {where}{detail}")


def describe_media(number: int, item: DocumentMedia) -> str:
    """Describe image or video `number` of a document: name, size, patches and tokens."""
    source, measured = unpacked(item.packed)
    frames = f"{counted(len(measured.frames), 'frame')} of " if item.is_video else ""
    size = f"{frames}{' × '.join(map(str, measured.size))} pixels"
    patches = f"{' × '.join(map(str, item.grid[0 if item.is_video or item.grid[0] > 1 else 1 :]))} patches"
    return f"{source.kind} {number} ({source.name}): {size}, {patches}, {counted(item.num_tokens, 'token')}"


def thumbnails(item: DocumentMedia) -> Iterator[str]:
    """Yield thumbnails as data URLs: of an image, or of some frames of a video.

    Raises:
        RowError: it cannot be decoded.
    """
    source, measured = unpacked(item.packed)
    images: Iterable[Image.Image]
    chosen = sorted({place * (len(measured.frames) - 1) // (_MAX_FRAMES - 1) for place in range(_MAX_FRAMES)})
    if source.kind == "image":
        images = [open_image(source)]
    elif source.frames is not None:
        images = (open_image(source.frames[place]) for place in chosen)
    else:
        images = decode_frames(source, tuple(measured.frames[place] for place in chosen))
    for image in images:
        image.thumbnail((_SIDE, _SIDE))
        content = io.BytesIO()
        image.convert("RGB").save(content, "JPEG")
        yield f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def shared_prompt(chosen: Document, rejected: Document) -> int:
    """Count the leading tokens that are equal in both and not trained."""
    size = min(len(chosen.input_ids), len(rejected.input_ids))
    differ = chosen.input_ids[:size] != rejected.input_ids[:size]
    differ |= trained_tokens(chosen.labels)[:size] | trained_tokens(rejected.labels)[:size]
    return int(differ.argmax()) if differ.any() else size


def title(row: PreviewRow, preview: Preview) -> str:
    """Return the title of a row: where it is from, its tokens, and how many of them are trained."""
    sizes = [len(each.document.input_ids) for each in row.documents]
    trained = sum(_num_trained(each.document) for each in row.documents)
    first, name = row.documents[0], f"{row.name} " if row.name else ""
    if preview.arrangement in ("packed", "packed_pairs"):
        is_pairs = preview.arrangement == "packed_pairs"
        samples = counted(len(sizes) // 2, "pair") if is_pairs else counted(len(sizes), "sample")
        return f"row {row.number}: {samples}, {counted(sum(sizes), 'token')}, {trained:,} trained"
    # Tokens before truncation, if the row was truncated; for a pair, those of the longer document.
    whole = max(each.length for each in row.documents)
    cut = f", cut from {whole:,}" if whole > max(sizes) and not first.start else ""
    if preview.arrangement == "pairs":
        margin = f", margin {first.margin:g}" if first.margin else ""
        return f"{name}row {row.number}{_of(first)}: {sizes[0]:,} and {sizes[1]:,} tokens{cut}{margin}"
    tag = "" if first.desirable is None else f", {'' if first.desirable else 'un'}desirable"
    if first.label is not None:
        label = ", ".join(f"{value:g}" for value in first.label)
        return f"{name}row {row.number}{_of(first)}: {counted(sizes[0], 'token')}{cut}, label {label}"
    tokens = f"{counted(sizes[0], 'token')}, {trained:,} trained{cut}"
    return f"{name}row {row.number}{_of(first)}: {tokens}{_start(first)}{tag}"


def _start(each: RowDocument) -> str:
    return f", from token {each.start:,} of its text" if each.start else ""


def _of(each: RowDocument) -> str:
    return f" ({each.where})" if each.where else ""


def _num_trained(document: Document) -> int:
    return int(trained_tokens(document.labels).sum())


def pieces(
    document: Document, tokenizer: PreTrainedTokenizerBase, start: int, stop: int
) -> Iterator[tuple[str, bool, bool]]:
    """Yield the visible text of each run of alike tokens from `start` to `stop`, and whether they are trained, and
    special."""
    texts = (each for each in token_texts(document, tokenizer) if start <= each.start < stop)
    alike = groupby(_collapse_repeats(texts), key=lambda each: (each.trained, each.special))
    return (("".join(visible(each.text) for each in group), *marks) for marks, group in alike)


def token_texts(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[TokenText]:
    """Decode all of a document's tokens, in order."""
    ids, labelled = document.input_ids.tolist(), (document.labels != IGNORE_INDEX).tolist()
    added = {int(token): str(content) for token, content in tokenizer.added_tokens_decoder.items()}
    marks = {token: content for token, content in added.items() if content.strip()}  # some add runs of whitespace

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    trained = trained_tokens(document.labels).tolist()
    texts: list[TokenText] = []
    start = 0
    for stop in range(1, len(ids) + 1):
        # Decode each special token separately, and each run of text that is all labelled or all unlabelled.
        if stop < len(ids) and not {ids[stop], ids[stop - 1]} & marks.keys() and labelled[stop] == labelled[stop - 1]:
            continue
        if ids[start] in marks:
            texts.append(TokenText(start, stop, marks[ids[start]], True, trained[start]))
        else:
            for first, last, text in _characters(ids[start:stop], decode):
                texts.append(TokenText(start + first, start + last, text, False, trained[start + last - 1]))
        start = stop
    return texts


def _collapse_repeats(texts: Iterable[TokenText]) -> Iterator[TokenText]:
    """Replace a run of one special token, such as image pads, by one text with the number of repetitions."""
    for _, group in groupby(texts, key=lambda each: (each.text, each.trained) if each.special else each.start):
        first, *more = group
        yield first if not more else replace(first, stop=more[-1].stop, text=f"{first.text} × {len(more) + 1}")


def trained_tokens(labels: np.ndarray) -> np.ndarray:
    """Return which tokens count in the loss: bool [T]. The first token is never predicted."""
    trained = np.asarray(labels) != IGNORE_INDEX
    trained[:1] = False
    return trained


def visible(text: str) -> str:
    """Make the whitespace of a text visible, and escape control characters that a terminal would execute."""
    return "".join(_VISIBLE.get(character) or _escape(character) for character in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode symbol of this control character
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    return f"\\u{{{code:x}}}" if hidden else character


def _characters(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[int, int, str]]:
    """Group the tokens of a text so that each group decodes to whole characters and is as small as possible.

    The text of a group is what it adds to the group before it: some tokenizers write the space before a word with the
    word, but not at the beginning of a text.
    """
    before, start = 0, 0
    for stop in range(1, len(ids) + 1):
        context = decode(ids[before:start])
        text = decode(ids[before:stop])
        added = text[len(context) :] if text.startswith(context) else decode(ids[start:stop])
        if added.endswith(_UNDECODED) and stop - start < _MAX_TOKENS and stop < len(ids):
            continue
        yield start, stop, added
        before, start = start, stop
