"""The key of a run's prepared rows: one name for everything that determines them."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
import yaml

from megatune.config.setting import Mark
from megatune.config.settings import marked, setting_value
from megatune.data.sources import DatasetSource, datasets_of
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.digests import cache_dir, ends_digest, remember, remembered_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings
    from megatune.data.vision import VisionInput

# Raised whenever the same files and settings give other rows, so that a resumed run notices.
FORMAT_VERSION = 9

# The modules of `data` that no prepared row depends on.
_NO_EFFECT_ON_ROWS = frozenset((
    "batches", "cache", "check", "loader", "preview", "prompts", "sampled", "statistics", "text_scores",
))  # fmt: skip

# Fields of templates that follow from their names or from the tokenizer.
_NOT_IN_KEY = ("eos", "encodes_separately", "has_other_tools")

_STREAMED_DIGEST = partial(ends_digest, num_bytes=2**20)  # it misses bytes that change in between
_SETTINGS = "the settings of the data"
DAY = "the day that the template states"  # the only part that is stored as it is, not as a digest


@dataclass(frozen=True, slots=True)
class RowsKey:
    """The key of a run's rows, equal on every machine: files are identified by content and name, not folder or time."""

    name: str  # 32 hexadecimal digits: the digest of everything that determines the rows
    parts: Mapping[str, str]  # readable names of the parts, each with its digest
    chosen: Mapping[str, Any]  # the settings that determine rows, by name

    def provenance(self) -> dict[str, Any]:
        """Return the record of how the rows were made, for their folder: digests of parts, values of settings."""
        digests = {part: digest for part, digest in self.parts.items() if part != _SETTINGS}
        return {**self.chosen, **digests, "the code that prepares rows": _sources()}


def versioned(name: str) -> str:
    """Return the folder name of a key's rows for this version of megatune: changed code does not find older rows."""
    return f"{name}-{_sources()}"


@cache
def _sources() -> str:
    """Return a digest of the sources that prepare rows, which comments, docstrings and layout do not change.

    Parsing all of them takes most of a second, so the digest is cached by that of their bytes.
    """
    room = Path(__file__).parents[1]
    paths = sorted(each for each in room.rglob("*.*") if each.suffix in (".py", ".yaml"))
    files = {path: path.relative_to(room).with_suffix("").parts for path in paths}
    files = {path: parts for path, parts in files.items() if parts[0] not in _NO_EFFECT_ON_ROWS}
    content = xxhash.xxh3_128(b"".join(f"{parts}".encode() + path.read_bytes() for path, parts in files.items()))
    note = cache_dir() / "digests" / f"{content.hexdigest()}.sources"
    with suppress(OSError, UnicodeDecodeError):
        return note.read_text(encoding="ascii")
    digest = xxhash.xxh3_64(repr([(parts, _content(path)) for path, parts in files.items()]).encode()).hexdigest()
    remember(note, digest)
    return digest


def _content(path: Path) -> Any:
    """Return the content of a table, or the syntax tree of a module as nested lists, the same in every Python."""
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
        vision: converts images and videos to tokens; None for a language model. Their files are identified by name:
            see `data.media_table` for their content.
        file_digest: returns an identifier of a file's content.

    Raises:
        MegatuneError: a data set cannot be resolved (exit codes 64, 66 and 69), or a file cannot be read (66).
    """
    data = settings.data
    train = datasets_of(settings)
    evaluation = datasets_of(settings, evaluation=True)
    files = _digests((*train, *evaluation), file_digest)
    chosen = _chosen(settings)
    content = {
        part: [{**_described(one), "files": [(file.name, files[file]) for file in one.files]} for one in chosen_sources]
        for part, chosen_sources in (("train", train), ("evaluation", evaluation))
    }
    media: dict[str, list[Any]] = {}
    if vision is not None:
        bounds = vision.processor.image
        own = [each for each in (bounds.tiles, bounds.tokens) if each is not None]
        # By the class's name of earlier versions, whose checkpoints resume.
        processor = repr(vision.processor).replace("MediaProcessor", "PictureProcessor", 1)
        media = {"pictures": [processor, vision.media_dir, *own]}
    days = {DAY: data.template_date or date.today().isoformat()} if _states_day(settings, tokenizer) else {}
    made_by = {
        "tokenizer": _tokenizer_digest(tokenizer, data.template),
        "template": _template_content(data.template),
        **media,
        **days,
    }
    parts = {
        **_data_parts((*train, *evaluation), files, chosen),
        "the tokenizer": made_by["tokenizer"],
        "the template": _name(made_by["template"]),
        **({"the processor of images and videos": _name(media)} if media else {}),
        **days,
    }
    return RowsKey(_name({**chosen, **content, **made_by}), parts, chosen)


def _described(source: DatasetSource) -> dict[str, Any]:
    """Return a data set with its format, by the names of earlier versions, whose checkpoints resume."""
    described = asdict(source)
    of_swift = {"swift_version": 0, "renames": (), "fields": ()}
    return {**of_swift, **described.pop("format"), **described, "formatting": source.format.formatting}


def local_parts(settings: Settings) -> dict[str, str]:
    """Return the parts of a run's key that need neither a tokenizer nor a hub: files, and the data settings.

    Raises:
        MegatuneError: as in `prepared_key`, except for hubs.
    """
    sources = [one for part in (False, True) for one in datasets_of(settings, evaluation=part, hubs=False)]
    digest = _STREAMED_DIGEST if settings.data.streaming else remembered_digest
    parts = _data_parts(sources, _digests(sources, digest), _chosen(settings))
    if len(sources) < len(settings.data.dataset) + len(settings.data.eval_dataset):
        del parts[_SETTINGS]  # its digest includes the data sets on hubs
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
        # Rows that were prepared with skip must not be reused with error; quarantine prepares the same rows as skip.
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
    """Return the key of streamed rows, whose files may be too large to hash: of each, its size, start and end.

    Raises:
        MegatuneError: as in `prepared_key`.
    """
    data = settings.data
    key = prepared_key(settings, tokenizer, vision=vision, file_digest=_STREAMED_DIGEST)
    return RowsKey(_name([key.name, data.buffer_size, data.disable_shuffling]), key.parts, key.chosen)


def _name(determining: Any) -> str:
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()[:32]


def _template_content(name: str | None) -> Any:
    """Return the content of a template: the texts of a named one, or the file. The tokenizer's is not included."""
    from megatune.data.templates import template_source
    from megatune.data.templates.named import NAMED_TEMPLATES

    if name in NAMED_TEMPLATES:
        return {key: value for key, value in asdict(NAMED_TEMPLATES[name]).items() if key not in _NOT_IN_KEY}
    try:
        return template_source(name)
    except (OSError, ValueError):
        return name  # loading the template reports what is wrong with the file


def _states_day(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template's texts depend on the date."""
    from megatune.data.templates.swift_table import template_of_swift

    if not settings.data.swift_version:
        return False
    try:
        one, other = (template_of_swift(settings, tokenizer, day=date(2000, 1, day)) for day in (1, 2))
    except MegatuneError:  # loading the template reports it
        return False
    return one != other


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    from megatune.data.templates.jinja import MARK

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        # The text before the vocabulary states how the tokenizer truncated and padded last.
        vocabulary = backend.to_str().partition('"added_tokens"')[2]
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    chat_template = str(tokenizer.chat_template)
    if template is not None and chat_template.startswith(MARK):  # the tokenizer of a checkpoint that a run resumes from
        chat_template = str(None)
    return hashlib.sha256("\0".join((vocabulary, chat_template, special)).encode()).hexdigest()
