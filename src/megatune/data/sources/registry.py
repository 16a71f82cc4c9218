"""How data sets are named: by an item of `dataset`, and in dataset_info.json.

An item is `[hf::|ms::]NAME_OR_PATH_OR_ID[:SUBSET/SUBSET|:all][#N]`, ms-swift's syntax; dataset_info.json has
LLaMA-Factory's format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatune.data.formats import FORMATS, RowFormat
from megatune.data.readers import data_suffix, json_error, json_type
from megatune.data.sources.data_files import DEFAULT_SPLIT
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.hub.repository import Hub, use_modelscope

DATASET_INFO = "dataset_info.json"
_JSON_FIX = "correct it there; JSON has no comments and no comma before a closing bracket"

# The keys for the location of rows, in the order of LLaMA-Factory; those in _UNSUPPORTED_PLACES are not supported here.
_HUB_KEYS: Mapping[str, Hub] = {"hf_hub_url": "hf", "ms_hub_url": "ms"}
_UNSUPPORTED_PLACES = {
    "om_hub_url": "reading from the Openmind hub is not supported",
    "script_url": "a data set's script is code, which is never run",
    "cloud_file_name": "reading from cloud storage is not supported",
}
_STRINGS = (*_HUB_KEYS, *_UNSUPPORTED_PLACES, "file_name", "subset", "split", "folder")
_KEYS = (*_STRINGS, "formatting", "ranking", "num_samples", "columns", "tags")
# Off unless `columns` lists them, in LLaMA-Factory's formattings; `query` only if there are `columns`.
_OFF_BY_DEFAULT = ("history", "system", "tools", "images", "videos", "audios")
_PREFIX = re.compile(r"(hf|ms)::(.*)", re.IGNORECASE | re.DOTALL)
# The number after "#" never has these characters; a path with a "#" in it often continues with one.
_PATH_CHARACTERS = re.compile(r"[/.\\]")


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """One item of `dataset`, parsed.

    Attributes:
        name: a name of dataset_info.json, a path or a hub's id.
        hub: the hub in its prefix.
        subsets: () if none is named; ("all",) selects all subsets.
        num_samples: rows to draw.
    """

    name: str
    hub: Hub | None = None
    subsets: tuple[str, ...] = ()
    num_samples: int | None = None


def parse_reference(text: str, known: Callable[[str], bool]) -> DatasetReference:
    """Parse an item of `dataset`.

    Args:
        known: returns whether a whole text is a name of dataset_info.json or an existing path. These take precedence
            over the syntax, since "#" and ":" may be part of a file's name.

    Raises:
        MegatuneError: an invalid number of rows, or an empty name or subset (exit code 64).
    """
    hub: Hub | None = None
    name = text
    if prefixed := _PREFIX.fullmatch(text):
        hub, name = ("hf" if prefixed[1].lower() == "hf" else "ms"), prefixed[2]
    if hub is None and known(name):
        return DatasetReference(name)
    body, mark, number = name.rpartition("#")
    num_samples = None
    if mark and not _PATH_CHARACTERS.search(number):
        if not re.fullmatch(r"[0-9]+", number) or int(number) == 0:
            raise _bad_reference(text, f"expected a whole number above 0 after #, got {number!r}")
        name, num_samples = body, int(number)
        if hub is None and known(name):
            return DatasetReference(name, num_samples=num_samples)
    subsets: tuple[str, ...] = ()
    if ":" in name and (hub or data_suffix(Path(name)) is None):
        # Split at the first colon, which a hub's id cannot have; at the last if a folder has colons in its name.
        folder, _, last = name.rpartition(":")
        head, _, subset = (folder, ":", last) if known(folder) else name.partition(":")
        name, subsets = head, tuple(subset.split("/"))
        if not all(subsets):
            raise _bad_reference(text, "a subset's name is empty")
    if not name:
        raise _bad_reference(text, "the name is empty")
    return DatasetReference(name, hub, subsets, num_samples)


def _bad_reference(text: str, what: str) -> MegatuneError:
    fix = "write NAME#500 for 500 rows, and OWNER/NAME:SUBSET for one subset"
    return MegatuneError(Finding(f"{text!r}: {what}", "dataset", fix=fix), ExitCode.SETTINGS)


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """One data set of dataset_info.json.

    Attributes:
        where: the file and the name, for messages.
        hub: None for a file or folder next to dataset_info.json.
        place: the id on the hub, or the name of the file or folder.
        subsets: () for the default subset.
        folder: "" for all folders.
    """

    where: str
    hub: Hub | None
    place: str
    subsets: tuple[str, ...]
    split: str
    folder: str
    format: RowFormat
    num_samples: int | None


def read_registry(path: Path, where: str) -> dict[str, Any]:
    """Read the entries of a dataset_info.json, without checking them.

    Raises:
        MegatuneError: it is not JSON, or not an object (exit code 66).
    """
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError, RecursionError) as error:
        if not isinstance(error, json.JSONDecodeError):
            raise MegatuneError(Finding(f"cannot be read: {error}", where), ExitCode.INPUT) from error
        what = f"not valid JSON: {json_error(error)} at column {error.colno}"
        raise MegatuneError(Finding(what, f"{where}:{error.lineno}", fix=_JSON_FIX), ExitCode.INPUT) from error
    if not isinstance(info, dict):
        raise MegatuneError(Finding(f"expected an object of data sets, got {json_type(info)}", where), ExitCode.INPUT)
    return info


def parse_entry(entry: Any, where: str) -> DatasetEntry:
    """Check and convert one entry.

    As in LLaMA-Factory, a part of a row that `columns` does not list is not read, unless every row needs it; tags that
    `tags` does not list keep their defaults.

    Raises:
        MegatuneError: with all problems of the entry (exit code 64).
    """
    if not isinstance(entry, Mapping):
        raise MegatuneError(Finding(f"expected an object, got {json_type(entry)}", where), ExitCode.SETTINGS)
    findings = [*_unknown_keys(entry, _KEYS, where), *_wrong_types(entry, where)]
    formatting = entry.get("formatting") or "alpaca"
    if formatting not in list(FORMATS):  # it may be of any type
        what = f"formatting: {formatting!r} is unknown"
        findings.append(Finding(what, where, fix=f"one of {', '.join(FORMATS)}"))
        formatting = "alpaca"
    default = FORMATS[formatting]
    unlisted = default.columns
    if default.parts:
        off = (*_OFF_BY_DEFAULT, "query") if entry.get("columns") else _OFF_BY_DEFAULT
        unlisted = replace(unlisted, **dict.fromkeys(off))
    columns = _overridden(unlisted, entry.get("columns"), "columns", where, findings)
    tags = _overridden(default.tags, entry.get("tags"), "tags", where, findings)
    hub, place = _place(entry)
    if findings or place is None:
        raise MegatuneError(findings or [_missing_place(entry, where)], ExitCode.SETTINGS)
    subsets = (entry["subset"],) if entry.get("subset") else ()
    split, folder = entry.get("split") or DEFAULT_SPLIT, entry.get("folder") or ""
    form = replace(default, columns=columns, tags=tags, ranking=bool(entry.get("ranking")))
    return DatasetEntry(where, hub, place, subsets, split, folder, form, entry.get("num_samples"))


def _place(entry: Mapping[str, Any]) -> tuple[Hub | None, str | None]:
    """Return where an entry's rows are: a hub before a file; of two hubs Hugging Face, unless ModelScope is used."""
    hubs = [key for key in _HUB_KEYS if entry.get(key)]
    if hubs:
        key = "ms_hub_url" if "ms_hub_url" in hubs and use_modelscope() else hubs[0]
        return _HUB_KEYS[key], entry[key]
    refused = any(entry.get(key) for key in _UNSUPPORTED_PLACES)
    return None, None if refused else entry.get("file_name") or None


def _missing_place(entry: Mapping[str, Any], where: str) -> Finding:
    for key, why in _UNSUPPORTED_PLACES.items():
        if entry.get(key):
            return Finding(f"{key}: {why}", where, fix="download the rows, and write file_name instead")
    fix = "add file_name, a file or folder of this data set, or hf_hub_url or ms_hub_url, its id on a hub"
    return Finding("file_name is missing", where, fix=fix)


def _wrong_types(entry: Mapping[str, Any], where: str) -> Iterator[Finding]:
    for key in _STRINGS:
        if entry.get(key) is not None and not isinstance(entry[key], str):
            yield Finding(f"{key}: expected a string, got {json_type(entry[key])}", where)
    if entry.get("ranking") is not None and not isinstance(entry["ranking"], bool):
        yield Finding(f"ranking: expected true or false, got {json_type(entry['ranking'])}", where)
    number = entry.get("num_samples")
    if number is not None and not (type(number) is int and number > 0):
        yield Finding(f"num_samples: expected a positive whole number, got {number!r}", where)
    columns = entry.get("columns")
    if isinstance(columns, Mapping) and columns.get("audios") is not None:
        yield Finding("columns.audios: training on audio is not supported", where)


def _overridden(default: Any, block: Any, name: str, where: str, findings: list[Finding]) -> Any:
    """Return a block of dataset_info.json merged with its defaults; append its errors to `findings`."""
    if block is None:
        return default
    if not isinstance(block, Mapping):
        findings.append(Finding(f"{name}: expected an object, got {json_type(block)}", where))
        return default
    known = [field.name for field in fields(default)]
    wrong = _unknown_keys(block, known, f"{where}.{name}")
    for key, value in block.items():
        if not (isinstance(value, str) or (value is None and name == "columns")):
            wrong.append(Finding(f"{name}.{key}: expected a string, got {json_type(value)}", where))
    findings += wrong
    return default if wrong else type(default)(**{key: block.get(key, getattr(default, key)) for key in known})


def _unknown_keys(block: Mapping[str, Any], known: Sequence[str], where: str) -> list[Finding]:
    return [
        Finding(f"{key}: unknown key", where, fix=did_you_mean(key, known, f"one of {', '.join(known)}"))
        for key in block
        if key not in known
    ]
