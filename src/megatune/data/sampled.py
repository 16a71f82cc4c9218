"""How long a run's documents are, from a look at its data that takes seconds: nothing is prepared, fetched or kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Example, PreferencePair, texts
from megatune.data.encode import Encoder, make_encoder
from megatune.data.samples import Sample, read_samples, replacements
from megatune.data.sources import DATASET_INFO, ONLINE, REMOTE, DatasetSource, datasets_of
from megatune.data.sources.registry import parse_entry, parse_reference, read_registry
from megatune.data.workers import encode_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import DataSettings, Settings
    from megatune.data.vision import VisionInput

# Rows that are encoded: at equal distances, and the longest by their text.
_EVENLY, _LONGEST = 400, 16
_MOST_READ = 20_000  # rows of a data set that are looked at
# Bytes of text in a token, where no tokenizer is at hand: an assumption. Tokenizers of today's models take about four
# of English, and fewer of code.
BYTES_OF_A_TOKEN = 4


@dataclass(slots=True)
class SampledLengths:
    """What was seen.

    Attributes:
        documents: tokens of each encoded document, cut as training cuts it.
        rows: looked at.
        encoded: of those, with the tokenizer; 0 where texts were counted.
        is_whole: these are all rows.
        pictures, most_pictures, largest_picture: tokens of pictures of the mean row, of the row with most of them, and
            of the largest picture.
    """

    documents: list[int] = field(default_factory=list)
    rows: int = 0
    encoded: int = 0
    is_whole: bool = True
    pictures: float = 0.0
    most_pictures: int = 0
    largest_picture: int = 0

    @property
    def words(self) -> str:
        """Say how this was found."""
        rows = f"{'all' if self.is_whole else 'the first'} {self.rows:,} rows"
        if not self.encoded:
            return f"of {rows}, estimated with {BYTES_OF_A_TOKEN} bytes of text a token"
        return f"of {rows}" if self.encoded == self.rows else f"of {self.encoded:,} of {rows}, their longest among them"


def not_here(data: DataSettings) -> str:
    """Return the first data set that is not in files here, "" where all are."""
    if data.dataset_dir == ONLINE or data.dataset_dir.startswith(REMOTE):
        return next(iter(data.dataset), "")
    folder = Path(data.dataset_dir)
    path = folder / DATASET_INFO
    info = read_registry(path, str(path)) if path.exists() else {}

    def is_path(name: str) -> bool:
        return Path(name).exists() or (folder / name).exists()

    for text in data.dataset:
        reference = parse_reference(text, lambda name: name in info or is_path(name))
        entry = parse_entry(info[reference.name], reference.name) if reference.name in info else None
        if reference.hub or (entry is not None and entry.hub is not None) or not (entry or is_path(reference.name)):
            return text
    return ""


def sampled_lengths(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None,
    vision: VisionInput | None = None,
    *,
    seconds: float = 2.0,
) -> SampledLengths:
    """Look at rows of all data sets that are trained on.

    Args:
        tokenizer: None where none is at hand.
        seconds: after which no more rows are read; those that were read are encoded.

    Raises:
        MegatuneError: a data set or template is not there, or cannot be read.
    """
    sources = datasets_of(settings)
    encoder = make_encoder(settings, tokenizer, vision) if tokenizer is not None else None
    found = SampledLengths()
    weights = 0
    for source in sources:
        samples = _read(source, settings, vision is not None, seconds / len(sources), found)
        weights += _count(samples, settings, encoder, found)
    found.pictures /= max(weights, 1)
    return found


def _read(
    source: DatasetSource, settings: Settings, pictures: bool, seconds: float, found: SampledLengths
) -> list[Sample]:
    """Return the first rows that can be trained on."""
    data, deadline, samples = settings.data, time.monotonic() + seconds, []
    rows = read_samples(
        source, stage=settings.run.stage, seed=settings.run.seed, shuffle=data.dataset_shuffle,
        max_samples=data.max_samples, placeholders=replacements(data), pictures=pictures,
    )  # fmt: skip
    for sample in rows:
        samples += [] if isinstance(sample.example, RowError) else [sample]
        if len(samples) >= _MOST_READ or time.monotonic() > deadline:
            found.is_whole = False
            break
    found.rows += len(samples)
    return samples


def _count(samples: Sequence[Sample], settings: Settings, encoder: Encoder | None, found: SampledLengths) -> int:
    """Add the lengths of some of these rows; return of how many pictures were counted."""
    cutoff, is_text = settings.data.cutoff_len, settings.run.stage == "pt"
    if encoder is None:
        lengths = chain.from_iterable(_estimated(sample.example) for sample in samples)
        found.documents += chain.from_iterable(_pieces(length, cutoff, is_text) for length in lengths)
        return 0
    chosen = _chosen(samples)
    found.encoded += len(chosen)
    count = 0
    for _, encoded in encode_all(encoder, chosen, 1):
        if isinstance(encoded, RowError):
            continue
        count += 1
        pictures = [picture.num_tokens for document in encoded.documents for picture in document.pictures]
        found.pictures += sum(pictures)
        found.most_pictures = max(found.most_pictures, sum(pictures))
        found.largest_picture = max(found.largest_picture, *pictures, 0)
        for document in encoded.documents:
            found.documents += _pieces(len(document.input_ids), cutoff, is_text)
    return count


def _chosen(samples: Sequence[Sample]) -> list[Sample]:
    """Return rows at equal distances, and the longest."""
    if len(samples) <= _EVENLY + _LONGEST:
        return list(samples)
    sizes = [sum(_estimated(sample.example)) for sample in samples]
    longest = sorted(range(len(samples)), key=sizes.__getitem__)[-_LONGEST:]
    evenly = (place * len(samples) // _EVENLY for place in range(_EVENLY))
    return [samples[place] for place in sorted({*evenly, *longest})]


def _estimated(example: Example | RowError) -> Iterator[int]:
    """Yield tokens of each document, by its text."""
    assert not isinstance(example, RowError)
    for part in example.conversations() if isinstance(example, PreferencePair) else (example,):
        yield max(1, sum(len(text.encode()) for text in texts(part)) // BYTES_OF_A_TOKEN)


def _pieces(length: int, cutoff: int, is_text: bool) -> Iterator[int]:
    """Yield what becomes of a document that may be longer than cutoff_len."""
    if not is_text:
        yield min(length, cutoff)
        return
    yield from [cutoff] * (length // cutoff)
    if length % cutoff:
        yield length % cutoff
