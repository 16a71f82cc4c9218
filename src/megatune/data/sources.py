"""Which files a data set is: dataset_info.json in LLaMA-Factory's form, or a path."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatune.data.readers import RawRow, json_type, read_rows, supported_suffixes
from megatune.errors import ExitCode, Finding, MegatuneError

DATASET_INFO = "dataset_info.json"
Formatting = Literal["alpaca", "sharegpt", "openai"]
FORMATTINGS: tuple[Formatting, ...] = ("alpaca", "sharegpt", "openai")


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row keeps what (the `columns` block of dataset_info.json); None turns a column off."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = "history"
    messages: str | None = "conversations"
    system: str | None = "system"
    tools: str | None = "tools"
    images: str | None = "images"
    videos: str | None = "videos"
    audios: str | None = "audios"


@dataclass(frozen=True, slots=True)
class Tags:
    """How messages are written (the `tags` block of dataset_info.json)."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


OPENAI_COLUMNS = Columns(messages="messages")
OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """One data set, resolved: which files, and how their rows read.

    Attributes:
        files: read in this order; rows are numbered through them.
        num_samples: rows to draw, None for all.
    """

    name: str
    files: tuple[Path, ...]
    formatting: Formatting = "alpaca"
    columns: Columns = Columns()
    tags: Tags = Tags()
    num_samples: int | None = None

    def rows(self) -> Iterator[RawRow]:
        """Every row of every file, in order."""
        for file in self.files:
            yield from read_rows(file)


_HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "subset", "folder")
_ENTRY_KEYS = (*_HUB_KEYS, "file_name", "formatting", "ranking", "split", "num_samples", "columns", "tags")
_UNBUILT_COLUMNS = {
    "chosen": "preference pairs need stage dpo, which is not built",
    "rejected": "preference pairs need stage dpo, which is not built",
    "kto_tag": "KTO is not built",
    "images": "training on images is not built",
    "videos": "training on videos is not built",
    "audios": "training on audio is not built",
}


def resolve_datasets(names: Sequence[str], dataset_dir: str | Path) -> list[DatasetSource]:
    """The data sets that `dataset` or `eval_dataset` names, in order.

    A name is looked up in DATASET_DIR/dataset_info.json; otherwise it is a path, from here or from dataset_dir.

    Raises:
        MegatuneError: every problem at once; exit code 66 where only files are missing, else 64.
    """
    directory = Path(dataset_dir)
    info = _read_info(directory)
    sources: list[DatasetSource] = []
    errors: list[MegatuneError] = []
    for name in names:
        try:
            if name in info:
                sources.append(_from_entry(name, info[name], directory))
            else:
                sources.append(_from_path(name, directory, info))
        except MegatuneError as error:
            errors.append(error)
    if errors:
        worst = ExitCode.INPUT if all(e.exit_code == ExitCode.INPUT for e in errors) else ExitCode.SETTINGS
        raise MegatuneError([finding for error in errors for finding in error.findings], worst)
    return sources


def _read_info(directory: Path) -> dict[str, Any]:
    path = directory / DATASET_INFO
    if not path.exists():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        raise MegatuneError(Finding(f"cannot read: {error}", place), ExitCode.INPUT) from error
    if not isinstance(info, dict):
        raise MegatuneError(
            Finding(f"expected an object of data sets, got {json_type(info)}", str(path)), ExitCode.INPUT
        )
    return info


def _from_entry(name: str, entry: Any, directory: Path) -> DatasetSource:
    where = f"{directory / DATASET_INFO}: {name}"
    if not isinstance(entry, Mapping):
        raise _refused([Finding(f"expected an object, got {json_type(entry)}", where)])
    findings = [*_unknown_keys(entry, _ENTRY_KEYS, where), *_unbuilt(entry, where)]
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATTINGS:
        findings.append(
            Finding(f"formatting: {formatting!r} is unknown", where, mend=f"one of {', '.join(FORMATTINGS)}")
        )
    num_samples = entry.get("num_samples")
    if num_samples is not None and not (type(num_samples) is int and num_samples > 0):
        findings.append(Finding(f"num_samples: expected a positive whole number, got {num_samples!r}", where))
    openai = formatting == "openai"
    columns, column_findings = _overridden(
        OPENAI_COLUMNS if openai else Columns(), entry.get("columns"), "columns", where
    )
    tags, tag_findings = _overridden(OPENAI_TAGS if openai else Tags(), entry.get("tags"), "tags", where)
    findings += column_findings + tag_findings
    if not findings and not isinstance(entry.get("file_name"), str):
        findings.append(
            Finding("file_name is missing", where, mend='add "file_name": a file or folder of this data set')
        )
    if findings:
        raise _refused(findings)
    files = _data_files(directory / entry["file_name"], where)
    return DatasetSource(name, files, formatting, columns, tags, num_samples)


def _from_path(name: str, directory: Path, info: Mapping[str, Any]) -> DatasetSource:
    for path in (Path(name), directory / name):
        if path.exists():
            files = _data_files(path, "dataset")
            return _detected(name, files)
    if Path(name).suffix.lower() in supported_suffixes() or "/" in name:
        raise MegatuneError(Finding(f"no such file or folder: {name}", "dataset"), ExitCode.INPUT)
    if directory.name == "ONLINE" or str(directory).startswith("REMOTE:"):
        why = "dataset_dir on a hub needs the network loader, which is not built"
        raise _refused([Finding(f"{directory} is not supported", "dataset_dir", why)])
    near = difflib.get_close_matches(name, info, n=3)
    known = ", ".join(near or sorted(info)[:10]) or f"{directory / DATASET_INFO} names no data set"
    finding = Finding(
        f"{name!r} is neither in {directory / DATASET_INFO} nor a path",
        "dataset",
        mend=f"nearest: {known}" if near else known,
    )
    raise _refused([finding])


def _detected(name: str, files: tuple[Path, ...]) -> DatasetSource:
    """The form of a data set given as a path, from the fields of its first readable row."""
    first = next((row.fields for file in files for row in read_rows(file) if not row.problem), {})
    if "messages" in first:
        return DatasetSource(name, files, "openai", OPENAI_COLUMNS, OPENAI_TAGS)
    if "conversations" in first:
        return DatasetSource(name, files, "sharegpt")
    if "text" in first and "instruction" not in first:
        return DatasetSource(name, files, columns=Columns(prompt="text"))
    return DatasetSource(name, files)


def _data_files(path: Path, where: str) -> tuple[Path, ...]:
    if not path.exists():
        raise MegatuneError(Finding(f"no such file or folder: {path}", where), ExitCode.INPUT)
    if path.is_file():
        return (path,)
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in supported_suffixes() and p.name != DATASET_INFO)
    kinds = sorted({p.suffix.lower() for p in found})
    if len(kinds) != 1:
        what = f"a folder of {' and '.join(kinds)} files" if kinds else "a folder without data files"
        mend = f"one kind of file in a folder, of {', '.join(supported_suffixes())}"
        raise MegatuneError(Finding(what, str(path), mend=mend), ExitCode.INPUT)
    return tuple(found)


def _unknown_keys(block: Mapping[str, Any], known: Sequence[str], where: str) -> list[Finding]:
    return [
        Finding(
            f"{key}: unknown key",
            where,
            mend=f"nearest: {', '.join(difflib.get_close_matches(key, known, 1) or known)}",
        )
        for key in block
        if key not in known
    ]


def _unbuilt(entry: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """What LLaMA-Factory knows and this loader refuses, by name."""
    remote = [key for key in _HUB_KEYS if entry.get(key)]
    if entry.get("split", "train") != "train":
        remote.append("split")
    if remote:
        what = f"{', '.join(remote)}: needs the network loader, which is not built"
        yield Finding(what, where, mend="download the data set, and keep file_name, formatting, columns and tags only")
    if entry.get("ranking"):
        yield Finding("ranking: preference pairs need stage dpo, which is not built", where)
    columns = entry.get("columns")
    if isinstance(columns, Mapping):
        for key, why in _UNBUILT_COLUMNS.items():
            if columns.get(key) is not None:
                yield Finding(f"columns.{key}: {why}", where)


def _overridden(default: Any, block: Any, name: str, where: str) -> tuple[Any, list[Finding]]:
    """A block of dataset_info.json over its defaults: what it does not list keeps its default."""
    if block is None:
        return default, []
    if not isinstance(block, Mapping):
        return default, [Finding(f"{name}: expected an object, got {json_type(block)}", where)]
    known = [field.name for field in fields(default)]
    findings = _unknown_keys(block, [*known, *_UNBUILT_COLUMNS] if name == "columns" else known, f"{where}.{name}")
    for key, value in block.items():
        if not (isinstance(value, str) or (value is None and name == "columns")):
            findings.append(Finding(f"{name}.{key}: expected a string, got {json_type(value)}", where))
    if findings:
        return default, findings
    return type(default)(**{key: block.get(key, getattr(default, key)) for key in known}), []


def _refused(findings: Iterable[Finding]) -> MegatuneError:
    return MegatuneError(findings, ExitCode.SETTINGS)
