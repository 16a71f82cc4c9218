"""How long a run's documents are, from a look at its data that takes seconds: nothing is prepared, fetched or kept."""

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

# Returns the tokens of each text.
Counter = Callable[[Sequence[str]], Sequence[int]]

# Rows that are encoded: at equal distances, and the longest by their text.
_EVENLY, _LONGEST = 400, 16
_MOST_READ = 20_000  # rows of a data set that are looked at
# Bytes of text in a token, where no tokenizer is at hand: an assumption. Tokenizers of today's models take about four
# of English, and fewer of code.
BYTES_OF_A_TOKEN = 4
# Tokens that a template writes around a message, as ChatML's <|im_start|>user and <|im_end|> with their line breaks.
_AROUND = 5


@dataclass(slots=True)
class SampledLengths:
    """What was seen.

    Attributes:
        documents: tokens of each encoded document, cut as training cuts it.
        rows: looked at.
        encoded: of those, with the tokenizer; 0 where texts were counted.
        is_whole: these are all rows.
        is_exact: with the template's own tokens, too.
        pictures, image_tokens, largest_picture: tokens of pictures of the mean row, of the row with most of them, and
            of the largest picture.
    """

    documents: list[int] = field(default_factory=list)
    rows: int = 0
    encoded: int = 0
    is_whole: bool = True
    is_exact: bool = False
    pictures: float = 0.0
    image_tokens: int = 0
    largest_picture: int = 0

    @property
    def words(self) -> str:
        """Say how this was found."""
        rows = f"{'all' if self.is_whole else 'the first'} {self.rows:,} rows"
        if not self.encoded:
            return f"of {rows}, estimated with {BYTES_OF_A_TOKEN} bytes of text a token"
        chosen = f"of {rows}" if self.encoded == self.rows else f"of {self.encoded:,} of {rows}, the longest among them"
        return chosen if self.is_exact else f"{chosen}, about {_AROUND} tokens of the template a message"


def not_here(settings: Settings) -> str:
    """Return the first data set that is not in files here, "" where all are.

    Raises:
        MegatuneError: as `datasets_of`.
    """
    here = {source.name for source in datasets_of(settings, hubs=False)}
    return next((name for name in settings.data.dataset if name not in here), "")


def text_counter(folder: Path) -> Counter | None:
    """Return what counts tokens with tokenizer.json, without Transformers, which takes seconds to import; None
    where there is none that can be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises nothing more special
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(each.ids) for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def sampled_lengths(
    settings: Settings, count: Counter | None = None, encoder: Encoder | None = None, *, seconds: float = 2.0
) -> SampledLengths:
    """Look at rows of all data sets that are trained on.

    Args:
        count: None where no tokenizer is at hand.
        encoder: for exact lengths, pictures included, in place of `count`.
        seconds: after which no more rows are read; those that were read are encoded.

    Raises:
        MegatuneError: a data set or template is not there, or cannot be read.
    """
    sources = datasets_of(settings)
    found = SampledLengths(is_exact=encoder is not None)
    rows = 0
    for source in sources:
        reader = RowReader.of(source, settings, pictures=encoder is not None and encoder.vision is not None)
        read = _read(reader, settings, seconds / len(sources), found)
        if encoder is None:
            _count_texts([example for _, example in read], settings, count, found)
        else:
            rows += _encode(read, settings, reader, encoder, found)
    found.pictures /= max(rows, 1)
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


def _count_texts(examples: Sequence[Example], settings: Settings, count: Counter | None, found: SampledLengths) -> None:
    """Add the lengths of rows, by their texts."""
    cutoff, is_text = settings.data.cutoff_len, settings.run.stage == "pt"
    chosen = examples if count is None else [examples[place] for place in _chosen(examples)]
    documents = [list(texts(each)) for example in chosen for each in _documents(example)]
    if count is None:
        lengths = [[len(text.encode()) // BYTES_OF_A_TOKEN for text in document] for document in documents]
    else:
        found.encoded += len(chosen)
        counted = iter(count([text for document in documents for text in document]))
        lengths = [[next(counted) for _ in document] for document in documents]
    for each in lengths:
        around = 1 if is_text else _AROUND * sum(map(bool, each))
        found.documents += _pieces(sum(each) + around, cutoff, is_text)


def _encode(
    read: Sequence[tuple[Sample, Example]],
    settings: Settings,
    reader: RowReader,
    encoder: Encoder,
    found: SampledLengths,
) -> int:
    """Add the lengths of some of these rows, encoded as training does; return how many there are."""
    cutoff, is_text = settings.data.cutoff_len, settings.run.stage == "pt"
    chosen = [read[place][0] for place in _chosen([example for _, example in read])]
    found.encoded += len(chosen)
    rows = 0
    for _, encoded in encode_all(encoder, reader, chosen):
        if isinstance(encoded, RowError):
            continue
        rows += 1
        pictures = [picture.num_tokens for document in encoded.documents for picture in document.pictures]
        found.pictures += sum(pictures)
        found.image_tokens = max(found.image_tokens, sum(pictures))
        found.largest_picture = max(found.largest_picture, *pictures, 0)
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
    """Yield what becomes of a document that may be longer than cutoff_len."""
    if not is_text:
        yield min(length, cutoff)
        return
    yield from [cutoff] * (length // cutoff)
    if length % cutoff:
        yield length % cutoff
