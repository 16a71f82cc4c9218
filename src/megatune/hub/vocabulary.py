"""A model with added tokens: a folder with new tokenizer, config.json and embeddings, and links to all other files,
which can be read like any other checkpoint.

Tokens get the ids after those of the tokenizer. They use spare rows of the checkpoint (Qwen has 151,936 rows for
151,669 tokens); if there are not enough, both embeddings grow to the next multiple of 64 rows, as in LLaMA-Factory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.weight_index import HeaderEntry, read_header, read_whole_index
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import CONFIG, INDEX, WEIGHTS, Model, new_view

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MULTIPLE = 64  # of the rows of extended embeddings
# Sorted after the links: readers that load all tensors of all files keep the last one of each name.
_NEW_FILE, _LINKED = "new-tokens.safetensors", "base-"
_ROWS_AT_ONCE = 4096
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that a run adds to its model.

    Attributes:
        plain, special: in the order of their ids, plain ones first; decoding may skip special ones. Existing tokens
            keep their ids.
        descriptions: of tokens, whose rows are initialized as the mean of the rows of the text's tokens.
        noise: whether noise is also added to rows with a description.
        seed: of the noise.
    """

    plain: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    descriptions: tuple[tuple[str, str], ...] = ()
    noise: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Extension:
    """The changes of a model by new tokens.

    Attributes:
        tokenizer: the content of tokenizer.json.
        added: entries of added_tokens_decoder, by id.
        ids: of new rows: of new tokens, and of other tokens that had no row.
        before, after: rows of the embeddings.
        meanings: for rows with a description, its tokens that are not new.
    """

    tokenizer: str
    added: Mapping[int, Mapping[str, Any]]
    ids: tuple[int, ...]
    before: int
    after: int
    meanings: Mapping[int, tuple[int, ...]]


class ExtendedModel(Model):
    """A model with added tokens; the model itself if it has all of them.

    Raises:
        MegatuneError: INPUT, if its tokenizer or its weights cannot be extended.
    """

    def __init__(self, model: Model, tokens: NewTokens) -> None:
        self._model, self._tokens, self.commit = model, tokens, model.commit

    def config_dir(self) -> Path:
        return self.tokenizer_dir()

    def tokenizer_dir(self) -> Path:
        return self._seen(self._model.tokenizer_dir())[0]

    def fetch(self) -> Path:
        folder = self._model.fetch()
        view, grown = self._seen(folder)
        if grown is not None and not (view / INDEX).is_file():
            _write_weights(folder, view, grown, self._tokens)
        return view

    def line(self) -> str:
        """Return the log line on the added tokens."""
        _, grown = self._seen(self._model.tokenizer_dir())
        if grown is None or not grown.ids:
            return "accepted   the tokenizer already has all added tokens"
        rows = f"{grown.after} rows of embeddings instead of {grown.before}"
        rows = f"in spare rows of the {grown.before}" if grown.after == grown.before else rows
        return f"model      {len(grown.ids)} new tokens, ids {grown.ids[0]} to {grown.ids[-1]}: {rows}"

    def _seen(self, folder: Path) -> tuple[Path, _Extension | None]:
        if is_torch_dist(folder):
            what, why = "tokens are added to a model in Megatron-Core's format", "its embeddings cannot be extended"
            fix = "make a Hugging Face model of it first: megatune export --to_hf true"
            raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)
        if not (folder / TOKENIZER).is_file():
            what, why = f"there is no {TOKENIZER}", "tokens cannot be added to other tokenizer files"
            fix = "save it with Transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
            raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)
        files = (folder / TOKENIZER).stat(), (folder / CONFIG).stat()
        return _small_view(folder.absolute(), self._tokens, tuple((each.st_mtime_ns, each.st_size) for each in files))


def as_adapted(model: Model, adapters: Sequence[Path]) -> Model:
    """Return a model with the tokens of its last adapter with embeddings, whose rows replace the new ones."""
    folder = next((each for each in reversed(adapters) if _has_embeddings(each)), None)
    if folder is None or not (base := model.tokenizer_dir() / TOKENIZER).is_file():
        return model
    known = {each["content"] for each in _added(base)}
    new = [each for each in _added(folder / TOKENIZER) if each["content"] not in known]
    plain, special = (tuple(each["content"] for each in new if each["special"] is kind) for kind in (False, True))
    return ExtendedModel(model, NewTokens(plain, special)) if new else model


def _has_embeddings(adapter: Path) -> bool:
    """Return whether an adapter has embeddings with their tokenizer."""
    weights, ends = adapter / WEIGHTS_FILE, {name for each in FAMILIES.values() for name in each.vocabulary_tensors()}
    return all(path.is_file() for path in (adapter / TOKENIZER, weights)) and any(
        name.endswith(tuple(ends)) for name in read_header(weights)
    )


def _added(tokenizer: Path) -> list[dict[str, Any]]:
    """List the added tokens of a tokenizer.json, sorted by id."""
    found: list[dict[str, Any]] = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens") or []
    return sorted(found, key=lambda each: int(each["id"]))


@cache
def _small_view(folder: Path, tokens: NewTokens, identity: tuple[object, ...]) -> tuple[Path, _Extension | None]:
    """Return a folder without weights, and the changes; the original folder if there are none. The folder is deleted
    with this process, and cached for unchanged files (`identity`)."""
    config = read_config(folder)
    grown = _grow(folder, config, tokens)
    if grown is None:
        return folder, None
    view, own = new_view(), {TOKENIZER, TOKENIZER_CONFIG, CONFIG, WEIGHTS, INDEX}
    for path in folder.iterdir():
        if path.name not in own and path.suffix != ".safetensors":
            (view / path.name).symlink_to(path.absolute())
    (view / TOKENIZER).write_text(grown.tokenizer, encoding="utf-8")
    if (folder / TOKENIZER_CONFIG).is_file():
        said = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        if "added_tokens_decoder" in said:
            said["added_tokens_decoder"] |= {str(id_): dict(entry) for id_, entry in grown.added.items()}
        _write_json(view / TOKENIZER_CONFIG, said)
    _write_json(view / CONFIG, with_rows(config, grown.after))
    return view, grown


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_rows(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return config.json of a model whose embeddings have this many rows."""
    changed = dict(config)
    if isinstance(text := changed.get("text_config"), Mapping):
        changed["text_config"] = {**text, "vocab_size": rows}
    if "vocab_size" in changed or "text_config" not in changed:
        changed["vocab_size"] = rows
    return changed


def rows_of(config: Mapping[str, Any]) -> int:
    """Return the rows of the embeddings that a config.json describes."""
    text = config.get("text_config")
    said = text.get("vocab_size") if isinstance(text, Mapping) else None
    return int(said or config["vocab_size"])


def padded_rows(rows: int) -> int:
    """Return the number of rows of extended embeddings with at least this many rows."""
    return -(-rows // MULTIPLE) * MULTIPLE


def _grow(folder: Path, config: Mapping[str, Any], tokens: NewTokens) -> _Extension | None:
    """Add tokens to a tokenizer; return None if it had all of them, with rows."""
    from tokenizers import Tokenizer

    tokenizer, rows = Tokenizer.from_file(str(folder / TOKENIZER)), rows_of(config)
    asked = (*tokens.plain, *tokens.special)
    new = [token for token in asked if tokenizer.token_to_id(token) is None]
    before = set(tokenizer.get_added_tokens_decoder())
    tokenizer.add_tokens([token for token in tokens.plain if not _is_added(tokenizer, token)])
    tokenizer.add_special_tokens([token for token in tokens.special if not _is_added(tokenizer, token)])
    added = {id_: each for id_, each in tokenizer.get_added_tokens_decoder().items() if id_ not in before}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    needed = max(vocabulary.values()) + 1
    ids = {vocabulary[token] for token in new} | set(range(rows, needed))
    if not added and not ids:
        return None
    known = {
        vocabulary[token]: tokenizer.encode(text, add_special_tokens=False).ids for token, text in tokens.descriptions
    }
    meanings = {id_: tuple(each for each in found if each not in ids and each < rows) for id_, found in known.items()}
    parts = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return _Extension(
        tokenizer.to_str(pretty=True),
        {id_: {part: getattr(each, part) for part in parts} for id_, each in added.items()},
        tuple(sorted(ids)),
        rows,
        rows if needed <= rows else padded_rows(needed),
        {id_: found for id_, found in meanings.items() if id_ in ids and found},
    )


def _is_added(tokenizer: Tokenizer, token: str) -> bool:
    return any(each.content == token for each in tokenizer.get_added_tokens_decoder().values())


def _write_weights(folder: Path, view: Path, grown: _Extension, tokens: NewTokens) -> None:
    """Write links to the weights, a file with the embeddings, and an index into the folder `view`."""
    index = folder / INDEX
    file_of = read_whole_index(index) if index.is_file() else dict.fromkeys(read_header(folder / WEIGHTS), WEIGHTS)
    architecture = load_architecture(folder)
    places = _places(architecture, file_of)
    found = {name: (folder / file_of[name], read_header(folder / file_of[name])[name]) for name in places}
    for name, (path, entry) in found.items():
        if entry.dtype not in _NUMPY or len(entry.shape) != 2 or entry.shape[0] != grown.before:
            what = f"{name} is {entry.dtype} {list(entry.shape)}, and config.json has {grown.before} tokens"
            why = "rows can be added only to 16- or 32-bit embeddings with one row per token"
            fix = "use the config.json and the weights of one checkpoint"
            raise MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)
    for file in set(file_of.values()):
        link = view / f"{_LINKED}{file}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((folder / file).absolute())
    with (view / _NEW_FILE).open("wb") as target:
        _write_embeddings(target, found, grown, tokens, places)
    files = {name: _NEW_FILE if name in found else f"{_LINKED}{file}" for name, file in file_of.items()}
    _write_json(view / INDEX, {"metadata": {}, "weight_map": files})


def _places(architecture: Architecture, names: Container[str]) -> dict[str, int]:
    """Number the embeddings of a checkpoint, by name: tied ones, and copies in MTP layers, have the same number."""
    family, is_tied = FAMILIES[architecture.model_type], architecture.tie_word_embeddings
    own = [name for name in family.vocabulary_tensors() if name in names]
    places = {name: 0 if is_tied else place for place, name in enumerate(own)}
    copies = family.copies(replace(architecture, mtp_num_layers=1))
    return places | {copy: places[name] for name, copy in copies.items() if copy in names}


def _write_embeddings(
    target: BinaryIO,
    found: Mapping[str, tuple[Path, HeaderEntry]],
    grown: _Extension,
    tokens: NewTokens,
    places: Mapping[str, int],
) -> None:
    """Write a safetensors file of the embeddings with new rows, which are equal for embeddings of the same number."""
    header, offset = dict[str, Any](), 0
    for name, (_, entry) in found.items():
        size = (entry.stop - entry.start) // grown.before * grown.after
        shape = [grown.after, entry.shape[1]]
        header[name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    target.write(len(said).to_bytes(8, "little") + said)
    for name, (path, entry) in found.items():
        begin = target.tell()
        new, mean = _new_rows(path, entry, grown, tokens, places[name])
        with path.open("rb") as source:
            source.seek(entry.start)
            for size in _chunks(entry.stop - entry.start):
                target.write(source.read(size))
        target.write(mean.tobytes() * (grown.after - grown.before))
        for id_, row in new.items():
            target.seek(begin + id_ * mean.nbytes)
            target.write(row.tobytes())
        target.seek(begin + grown.after * mean.nbytes)


def _chunks(size: int, most: int = 2**26) -> Iterator[int]:
    yield from (min(most, size - start) for start in range(0, size, most))


def _new_rows(
    path: Path, entry: HeaderEntry, grown: _Extension, tokens: NewTokens, place: int
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return the initial new rows, by id, and the mean row, in the dtype of the file.

    A row is the mean of the matrix's old rows, or of those of its description's tokens, plus normal noise with a
    standard deviation of 1 / √h that depends on the seed, the matrix and the id only. Means are summed row by row in
    fp64, so that all machines get the same bits.

    Args:
        place: index of the matrix among the embeddings.
    """
    import numpy as np

    matrix = np.memmap(path, _NUMPY[entry.dtype], "r", entry.start, entry.shape)
    width = entry.shape[1]
    total = np.zeros(width)
    for first in range(0, grown.before, _ROWS_AT_ONCE):
        total += _floats(matrix[first : first + _ROWS_AT_ONCE]).sum(axis=0)
    spare = [id_ for id_ in grown.ids if id_ < grown.before]
    mean = (total - _floats(matrix[spare]).sum(axis=0)) / (grown.before - len(spare))
    found = {}
    for id_ in grown.ids:
        meaning = grown.meanings.get(id_)
        row = mean if meaning is None else _floats(matrix[list(meaning)]).mean(axis=0)
        if meaning is None or tokens.noise:
            generator = np.random.default_rng([tokens.seed, place, id_])
            row = row + generator.standard_normal(width) / math.sqrt(width)
        found[id_] = _stored(row, entry.dtype)
    return found, _stored(mean, entry.dtype)


def _floats(values: np.ndarray) -> np.ndarray:
    """Convert stored values to fp64; bf16 values are stored as uint16."""
    import numpy as np

    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert values to a file's dtype, rounded to nearest even."""
    import numpy as np

    if dtype != "BF16":
        return values.astype(_NUMPY[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
