"""What determines a run's token rows, as one name for the folder that holds them."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
import yaml

from megatune.config.setting import Mark
from megatune.config.settings import marked, setting_value
from megatune.data.sources import DatasetSource, datasets_of
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.digests import cache_dir, remember, remembered_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings
    from megatune.data.vision import VisionInput

# Raised whenever the same files and settings come to give other rows, so that a run that is resumed notices.
FORMAT_VERSION = 9

# What of this room no prepared row depends on.
_MAKES_NO_ROWS = frozenset((
    "batches", "cache", "check", "loader", "preview", "prompts", "sampled", "statistics", "text_scores",
))  # fmt: skip

# Of templates: it follows from their names, or from the tokenizer.
_UNKEYED = ("eos", "is_apart", "has_other_tools")

_CHUNK_BYTES = 2**20
_SETTINGS = "the settings of the data"
DAY = "the day that the template states"  # the one part that is said as it is, not as a digest


@dataclass(frozen=True, slots=True)
class RowsKey:
    """The name of a run's rows. Files count by their content and name, not by their folder or time, so that it is the
    same on every machine."""

    name: str  # 32 hexadecimal digits of all that determines the rows
    parts: Mapping[str, str]  # what it is made of, in words, each with a digest of its own
    chosen: Mapping[str, Any]  # the settings among it, by name

    def made_of(self) -> dict[str, Any]:
        """Return what a folder of prepared rows notes of its making: digests of parts, values of settings."""
        digests = {part: digest for part, digest in self.parts.items() if part != _SETTINGS}
        return {**self.chosen, **digests, "the code that prepares rows": _sources()}


def kept_as(name: str) -> str:
    """Return the name under which this version of megatune keeps the rows of a key: a function that has changed finds
    none of before."""
    return f"{name}-{_sources()}"


@cache
def _sources() -> str:
    """Digest what the sources of this room that make rows say, which comments, docstrings and layout do not change.

    Parsing all of them takes most of a second, so the digest is remembered by that of their bytes.
    """
    room = Path(__file__).parents[1]
    paths = sorted(each for each in room.rglob("*.*") if each.suffix in (".py", ".yaml"))
    files = {path: path.relative_to(room).with_suffix("").parts for path in paths}
    files = {path: parts for path, parts in files.items() if parts[0] not in _MAKES_NO_ROWS}
    content = xxhash.xxh3_128(b"".join(f"{parts}".encode() + path.read_bytes() for path, parts in files.items()))
    note = cache_dir() / "digests" / f"{content.hexdigest()}.sources"
    with suppress(OSError, UnicodeDecodeError):
        return note.read_text(encoding="ascii")
    said = xxhash.xxh3_64(repr([(parts, _said(path)) for path, parts in files.items()]).encode()).hexdigest()
    remember(note, said)
    return said


def _said(path: Path) -> Any:
    """Return the content of a table, or the syntax tree of a program as nested lists, the same in every Python."""
    if path.suffix == ".yaml":
        return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
    return _nested(tree)


def _nested(node: Any) -> Any:
    if isinstance(node, list):
        return [_nested(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = (value for _, value in ast.iter_fields(node) if value is not None and value != [])
    return [type(node).__name__, *map(_nested, fields)]


def prepared_key(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionInput | None = None,
    *,
    file_digest: Callable[[Path], str] = remembered_digest,
) -> RowsKey:
    """Return the key of prepared rows.

    Args:
        vision: what makes pictures into tokens; None for a language model. Files of pictures count by their names: the
            rows know how many bytes each had (see `data.pictures`).
        file_digest: names the content of a file; by default see there.

    Raises:
        MegatuneError: a data set cannot be resolved (exit codes 64, 66 and 69), or a file not be read (66).
    """
    data = settings.data
    train = datasets_of(settings)
    evaluation = datasets_of(settings, evaluation=True)
    files = _digests((*train, *evaluation), file_digest)
    chosen = _chosen(settings)
    content = {
        part: [{**asdict(one), "files": [(file.name, files[file]) for file in one.files]} for one in chosen_sources]
        for part, chosen_sources in (("train", train), ("evaluation", evaluation))
    }
    pictures: dict[str, list[Any]] = {}
    if vision is not None:
        bounds = vision.processor.image
        own = [each for each in (bounds.tiles, bounds.tokens) if each is not None]
        pictures = {"pictures": [repr(vision.processor), vision.media_dir, *own]}
    days = {DAY: data.template_date or date.today().isoformat()} if _states_day(settings, tokenizer) else {}
    made_by = {
        "tokenizer": _tokenizer_digest(tokenizer, data.template),
        "template": _template_content(data.template),
        **pictures,
        **days,
    }
    parts = {
        **_data_parts((*train, *evaluation), files, chosen),
        "the tokenizer": made_by["tokenizer"],
        "the template": _name(made_by["template"]),
        **({"the processor of images and videos": _name(pictures)} if pictures else {}),
        **days,
    }
    return RowsKey(_name({**chosen, **content, **made_by}), parts, chosen)


def local_parts(settings: Settings) -> dict[str, str]:
    """Return the parts of a run's key that need neither a tokenizer nor a hub: files, and the settings of the data.

    Raises:
        MegatuneError: as `prepared_key`, except for hubs.
    """
    sources = [one for part in (False, True) for one in datasets_of(settings, evaluation=part, hubs=False)]
    digest = _ends_digest if settings.data.streaming else remembered_digest
    parts = _data_parts(sources, _digests(sources, digest), _chosen(settings))
    if len(sources) < len(settings.data.dataset) + len(settings.data.eval_dataset):
        del parts[_SETTINGS]  # it names those of hubs, too
    return parts


def _digests(sources: Sequence[DatasetSource], file_digest: Callable[[Path], str]) -> dict[Path, str]:
    files: dict[Path, str] = {}
    for file in (file for source in sources for file in source.files):
        try:
            files[file] = file_digest(file)
        except OSError as error:
            raise MegatuneError(Finding(f"cannot be read: {error.strerror}", str(file)), ExitCode.INPUT) from error
    return files


def _chosen(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine rows."""
    data = settings.data
    return {
        "format": FORMAT_VERSION,
        "packing": settings.packing,
        # Rows that error refuses must not be found where skip left them out; quarantine leaves out the same.
        "refuses_bad_rows": data.on_bad_row == "error",
        **{path.partition(".")[2]: setting_value(settings, path) for path in sorted(marked(Mark.ROWS))},
        **({"tool_format": data.tool_format} if data.tool_format else {}),
    }


def _data_parts(
    sources: Sequence[DatasetSource], files: Mapping[Path, str], chosen: Mapping[str, Any]
) -> dict[str, str]:
    return {
        **{f"the file {file.name} of dataset {one.name}": files[file] for one in sources for file in one.files},
        _SETTINGS: _name([chosen, [source.name for source in sources]]),
    }


def streamed_key(settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None) -> RowsKey:
    """Return the key of streamed rows, whose files may be too large to read them for a name: of each its size, start
    and end.

    Raises:
        MegatuneError: as `prepared_key`.
    """
    data = settings.data
    key = prepared_key(settings, tokenizer, vision=vision, file_digest=_ends_digest)
    return RowsKey(_name([key.name, data.buffer_size, data.disable_shuffling]), key.parts, key.chosen)


def _ends_digest(path: Path) -> str:
    """Digest a file's size and ends: what is appended, cut off or replaced shows, a byte changed between does not."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(_CHUNK_BYTES)
        file.seek(max(0, size - _CHUNK_BYTES))
        return hashlib.sha256(b"%d\0" % size + start + file.read(_CHUNK_BYTES)).hexdigest()


def _name(determining: Any) -> str:
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()[:32]


def _template_content(name: str | None) -> Any:
    """Return what a template says: of one of ours its texts, of a file its content. The tokenizer has its own."""
    from megatune.data.templates import template_source
    from megatune.data.templates.named import NAMED_TEMPLATES

    if name in NAMED_TEMPLATES:
        return {key: value for key, value in asdict(NAMED_TEMPLATES[name]).items() if key not in _UNKEYED}
    try:
        return template_source(name)
    except (OSError, ValueError):
        return name  # what is wrong with the file is said where it is used


def _states_day(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether texts of the template are others on another day."""
    from megatune.data.templates.swift_table import template_of_swift

    if not settings.data.swift_version:
        return False
    try:
        one, other = (template_of_swift(settings, tokenizer, day=date(2000, 1, day)) for day in (1, 2))
    except MegatuneError:  # said where it is used
        return False
    return one != other


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    from megatune.data.templates.jinja import MARK

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        # Before its vocabulary it has how it truncated and padded last.
        vocabulary = backend.to_str().partition('"added_tokens"')[2]
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    chat_template = str(tokenizer.chat_template)
    if template is not None and chat_template.startswith(MARK):  # a checkpoint's, from which a run resumes
        chat_template = str(None)
    return hashlib.sha256("\0".join((vocabulary, chat_template, special)).encode()).hexdigest()
