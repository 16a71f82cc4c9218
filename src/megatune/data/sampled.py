"""Estimate the document lengths of a run from a sample of its data, in seconds, without preparing or downloading it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Example, PreferencePair, texts
from megatune.data.encode import Encoder
from megatune.data.samples import RowReader, Sample, read_samples
from megatune.data.sources import datasets_of
from megatune.data.workers import encode_all

if TYPE_CHECKING:
    from megatune.config.settings import Settings

# Returns the number of tokens of each text.
TokenCounter = Callable[[Sequence[str]], Sequence[int]]

# Rows that are encoded: evenly spaced ones, and those with the longest texts.
_EVENLY, _LONGEST = 400, 16
_MOST_READ = 20_000  # rows that are read of each data set
# Assumed without a tokenizer. Today's tokenizers have about four bytes per token for English, and fewer for code.
BYTES_PER_TOKEN = 4
# Tokens that a template adds to a message, such as ChatML's <|im_start|>user and <|im_end|> with their line breaks.
_TEMPLATE_TOKENS = 5


@dataclass(slots=True)
class SampledLengths:
    """Document lengths of a sample of the data.

    Attributes:
        documents: length of each document in tokens, cut as in training.
        rows: number of rows read.
        encoded: how many of them were tokenized; 0 if lengths are estimated from bytes.
        is_whole: whether these are all rows.
        is_exact: whether the run's template was used.
        media, image_tokens, largest_picture: image and video tokens of the mean row, of the row with the most of them,
            and of the largest image or video.
    """

    documents: list[int] = field(default_factory=list)
    rows: int = 0
    encoded: int = 0
    is_whole: bool = True
    is_exact: bool = False
    media: float = 0.0
    image_tokens: int = 0
    largest_picture: int = 0

    @property
    def origin(self) -> str:
        """How the lengths were measured, for users."""
        rows = f"{'all' if self.is_whole else 'the first'} {self.rows:,} rows"
        if not self.encoded:
            return f"of {rows}, estimated with {BYTES_PER_TOKEN} bytes of text per token"
        chosen = f"of {rows}" if self.encoded == self.rows else f"of {self.encoded:,} of {rows}, the longest included"
        return chosen if self.is_exact else f"{chosen}, with about {_TEMPLATE_TOKENS} template tokens per message"


def first_remote_dataset(settings: Settings) -> str:
    """Return the first data set that is not in local files, or "".

    Raises:
        MegatuneError: as `datasets_of`.
    """
    here = {source.name for source in datasets_of(settings, hubs=False)}
    return next((name for name in settings.data.dataset if name not in here), "")


def text_counter(folder: Path) -> TokenCounter | None:
    """Return a function that counts tokens with tokenizer.json, without Transformers, which takes seconds to import;
    None if there is no readable tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises nothing more special
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(each.ids) for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def sampled_lengths(
    settings: Settings, count: TokenCounter | None = None, encoder: Encoder | None = None, *, seconds: float = 2.0
) -> SampledLengths:
    """Measure the lengths of rows of all training data sets.

    Args:
        count: None without a tokenizer.
        encoder: gives exact lengths, images and videos included, in place of `count`.
        seconds: time limit for reading; the rows read until then are encoded.

    Raises:
        MegatuneError: a data set or template is missing or cannot be read.
    """
    sources = datasets_of(settings)
    found = SampledLengths(is_exact=encoder is not None)
    rows = 0
    for source in sources:
        reader = RowReader.of(source, settings, media=encoder is not None and encoder.vision is not None)
        read = _read(reader, settings, seconds / len(sources), found)
        if encoder is None:
            _count_texts([example for _, example in read], settings, count, found)
        else:
            rows += _encode(read, settings, reader, encoder, found)
    found.media /= max(rows, 1)
    return found


def _read(reader: RowReader, settings: Settings, seconds: float, found: SampledLengths) -> list[tuple[Sample, Example]]:
    """Return the first rows that can be trained on."""
    deadline, read = time.monotonic() + seconds, []
    for sample, example in reader.examples(read_samples(reader.source, settings)):
        read += [] if isinstance(example, RowError) else [(sample, example)]
        if len(read) >= _MOST_READ or time.monotonic() > deadline:
            found.is_whole = False
            break
    found.rows += len(read)
    return read


def _count_texts(
    examples: Sequence[Example], settings: Settings, count: TokenCounter | None, found: SampledLengths
) -> None:
    """Add the lengths of rows, estimated from their texts."""
    cutoff, is_text = settings.data.cutoff_len, settings.run.stage == "pt"
    chosen = examples if count is None else [examples[place] for place in _chosen(examples)]
    documents = [list(texts(each)) for example in chosen for each in _documents(example)]
    if count is None:
        lengths = [[len(text.encode()) // BYTES_PER_TOKEN for text in document] for document in documents]
    else:
        found.encoded += len(chosen)
        counted = iter(count([text for document in documents for text in document]))
        lengths = [[next(counted) for _ in document] for document in documents]
    for each in lengths:
        added = 1 if is_text else _TEMPLATE_TOKENS * sum(map(bool, each))
        found.documents += _pieces(sum(each) + added, cutoff, is_text)


def _encode(
    read: Sequence[tuple[Sample, Example]],
    settings: Settings,
    reader: RowReader,
    encoder: Encoder,
    found: SampledLengths,
) -> int:
    """Add the lengths of some of these rows, encoded as in training; return the number of rows encoded."""
    cutoff, is_text = settings.data.cutoff_len, settings.run.stage == "pt"
    chosen = [read[place][0] for place in _chosen([example for _, example in read])]
    found.encoded += len(chosen)
    rows = 0
    for _, encoded in encode_all(encoder, reader, chosen):
        if isinstance(encoded, RowError):
            continue
        rows += 1
        media = [item.num_tokens for document in encoded.documents for item in document.media]
        found.media += sum(media)
        found.image_tokens = max(found.image_tokens, sum(media))
        found.largest_picture = max(found.largest_picture, *media, 0)
        for document in encoded.documents:
            found.documents += _pieces(len(document.input_ids), cutoff, is_text)
    return rows


def _chosen(examples: Sequence[Example]) -> Sequence[int]:
    if len(examples) <= _EVENLY + _LONGEST:
        return range(len(examples))
    sizes = [max(sum(map(len, texts(each))) for each in _documents(example)) for example in examples]
    longest = sorted(range(len(examples)), key=sizes.__getitem__)[-_LONGEST:]
    evenly = (place * len(examples) // _EVENLY for place in range(_EVENLY))
    return sorted({*evenly, *longest})


def _documents(example: Example) -> tuple[Example, ...]:
    return (example.chosen, example.rejected) if isinstance(example, PreferencePair) else (example,)


def _pieces(length: int, cutoff: int, is_text: bool) -> Iterator[int]:
    """Yield the lengths of the documents that cutoff_len leaves of one document."""
    if not is_text:
        yield min(length, cutoff)
        return
    yield from [cutoff] * (length // cutoff)
    if length % cutoff:
        yield length % cutoff
