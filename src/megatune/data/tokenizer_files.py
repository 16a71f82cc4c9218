"""Check that a tokenizer is complete and matches its model: ids within the vocabulary, a class that tokenizes like
tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.references import write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_OWN_FILE = "the tokenizer that was published with the weights"
# Classes that read tokenizer.json as it is, for any model.
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model*", "tekken.json", "*.tiktoken", "vocab.txt", "spiece.model")
# Words, digits, space and letters that tokenizer classes split differently.
_PROBE = "Hello world, it's 2024:\n\n    def f(x): return x + 1\n你好，世界 naïve  1,000.50"


def check_vocabulary(folder: Path) -> None:
    """Refuse a tokenizer without vocabulary files, which Transformers would load as an empty one.

    Raises:
        MegatuneError: INPUT.
    """
    # Vocabulary files, each with the file that it needs.
    for pattern, other in (*((name, "") for name in _VOCABULARIES), ("vocab.json", "merges.txt")):
        if any(path.is_file() for path in folder.glob(pattern)) and (not other or (folder / other).is_file()):
            return
    why, fix = "there is no tokenizer.json, which has the tokens", "copy it from the published model"
    raise MegatuneError(Finding("the tokenizer cannot be loaded", str(folder), why, fix), ExitCode.INPUT)


def cannot_load(folder: Path, error: Exception) -> MegatuneError:
    """Return the error of a tokenizer that Transformers cannot load, with a tokenizer_class of another model if that is
    a possible cause."""
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    fix = f"put {TOKENIZER} and {TOKENIZER_CONFIG} next to the weights"
    if (name := _foreign_class(folder)) is not None:
        why = f"tokenizer_class: {name} of {TOKENIZER_CONFIG} belongs to another model: {why}"
        fix = f"use {_OWN_FILE}"
    return MegatuneError(Finding("the tokenizer cannot be loaded", str(folder), why, fix), ExitCode.INPUT)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a tokenizer with tokens without an embedding, or whose class tokenizes differently from tokenizer.json.

    Raises:
        MegatuneError: INPUT, with ids and texts.
    """
    name = _foreign_class(folder)
    if name is not None and (folder / TOKENIZER).is_file():
        _check_class(name, tokenizer, folder)
    _check_ids(tokenizer, folder)


def _check_class(name: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a class of another model that tokenizes differently from tokenizer.json."""
    from tokenizers import Tokenizer

    of_file = Tokenizer.from_file(str(folder / TOKENIZER)).encode(_PROBE, add_special_tokens=False).ids
    of_class = tokenizer.encode(_PROBE, add_special_tokens=False)
    if of_file != of_class:
        place = next((at for at, pair in enumerate(zip(of_file, of_class, strict=False)) if pair[0] != pair[1]), 0)
        first, other = (tokenizer.convert_ids_to_tokens(ids[place : place + 4]) for ids in (of_class, of_file))
        why = f"it produces the tokens {first} where {TOKENIZER} produces {other}"
        what = f"tokenizer_class: {name} belongs to another model"
        fix = f"use {_OWN_FILE}, or write tokenizer_class: {_GENERAL[0]}, which reads {TOKENIZER} as it is"
        raise MegatuneError(Finding(what, str(folder / TOKENIZER_CONFIG), why, fix), ExitCode.INPUT)


def _check_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    config = _read(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    added = tokenizer.added_tokens_decoder
    if type(size) is not int or (len(tokenizer) <= size and max(added, default=0) < size):
        return
    beyond = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items() if id_ >= size)
    if beyond:
        shown = ", ".join(f"{id_} {token!r}" for id_, token in beyond[:3])
        more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
        what = f"the tokenizer is larger than the model's vocabulary of {size}: {shown}{more}"
        fix = f"use {_OWN_FILE}, or {write('resize_vocab', True)}, which adds rows for them"
        raise MegatuneError(Finding(what, str(folder), "the model has no embedding for them", fix), ExitCode.INPUT)


def _foreign_class(folder: Path) -> str | None:
    """Return the class in tokenizer_config.json if it is neither the one of this model_type nor a general one."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    model_type = _read(folder / "config.json").get("model_type")
    name = _read(folder / TOKENIZER_CONFIG).get("tokenizer_class")
    own = TOKENIZER_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(name, str) or own is None or name in _GENERAL:
        return None
    names = own if isinstance(own, tuple) else (own,)
    return None if name.removesuffix("Fast") in [str(each).removesuffix("Fast") for each in names] else name


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # the code that loads this file reports the problem
    return content if isinstance(content, dict) else {}


def stop_tokens(source: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the ids of stop tokens: the tokenizer's eos token, and those in generation_config.json."""
    path = source / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    ids = [found] if isinstance(found, int) else list(found or ())
    return tuple(sorted({*ids, *([] if eos_token_id is None else [eos_token_id])}))


def check_pretraining_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an eos token (exit code 66), which stage pt appends to each text."""
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no eos_token, which stage pt puts after each text"
        raise MegatuneError(Finding(what, tokenizer.name_or_path), ExitCode.INPUT)
