"""Where rows come from: dataset_info.json, paths and hubs.

`resolve_datasets` turns the names of a user's settings into `DatasetSource`s, each the files of a data set and the form
of its rows; `DatasetSource.rows_from` reads them from any position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import PAIR_STAGES
from megatune.data.formats import Form, detect
from megatune.data.readers import Position, RawRow, data_suffix, read_rows
from megatune.data.sources.data_files import hub_files, local_files
from megatune.data.sources.registry import (
    DATASET_INFO,
    DatasetEntry,
    DatasetReference,
    nearest,
    parse_entry,
    parse_reference,
    read_registry,
)
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.repository import Hub, Repository, fetch_all, is_repository_id, open_repository, use_modelscope

__all__ = ["DATASET_INFO", "DatasetSource", "SourcePosition", "media_dir_of", "resolve_datasets"]

ONLINE = "ONLINE"
REMOTE = "REMOTE:"
# Readable rows that are looked at for the form of a data set that no entry describes.
ROWS_FOR_DETECTION = 100


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A place between two rows of a data set: index in the data set's files, and the place in that file."""

    file: int
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource(Form):
    """One data set, resolved: the files, and the form of their rows.

    Attributes:
        files: read in this order; all of one kind. Files of a hub lie in its library's cache.
        num_samples: rows to draw, None for all; more than there are repeats rows.
    """

    name: str
    files: tuple[Path, ...]
    num_samples: int | None = None

    def rows(self) -> Iterator[RawRow]:
        """Read every row of every file, in order."""
        for row, _ in self.rows_from():
            yield row

    def rows_from(self, position: SourcePosition | None = None) -> Iterator[tuple[RawRow, SourcePosition]]:
        """Read the rows after a position, all of them where it is None, each with the position after it."""
        first = position.file if position else 0
        for index in range(first, len(self.files)):
            after = position.position if position and index == first else None
            for row in read_rows(self.files[index], after):
                yield row, SourcePosition(index, row.next)


def resolve_datasets(names: Sequence[str], dataset_dir: str | Path, stage: str) -> list[DatasetSource]:
    """Resolve the data sets that `dataset` or `eval_dataset` names, in order; those on a hub are fetched.

    Each is looked up in DATASET_DIR/dataset_info.json; else it is a path, from here or from dataset_dir; else a hub's
    id. `parse_reference` has the syntax.

    Args:
        stage: "dpo" and "rm" take preference pairs and nothing else, "kto" judged answers; "sft" and "pt" take anything
            else.

    Raises:
        MegatuneError: every problem at once. Exit code 64: a name, entry, subset or split that is none; 65: rows of no
            known form; 66: a file or repository that is missing or refused; 69: a hub that cannot be reached; 73: its
            cache cannot be written. Of several, the least.
    """
    if not names:
        return []
    directory = _open_directory(str(dataset_dir))
    sources: list[DatasetSource] = []
    errors: list[MegatuneError] = []
    for name in names:
        try:
            sources.append(_resolved(name, directory, stage))
        except MegatuneError as error:
            errors.append(error)
    if errors:
        findings = [finding for error in errors for finding in error.findings]
        raise MegatuneError(findings, min(error.exit_code for error in errors))
    return sources


def media_dir_of(data: DataSettings) -> str:
    """Return where relative paths of pictures begin: media_dir, else dataset_dir, "" where that is on a hub."""
    if data.media_dir is not None:
        return data.media_dir
    return "" if data.dataset_dir == ONLINE or data.dataset_dir.startswith(REMOTE) else data.dataset_dir


@dataclass(frozen=True, slots=True)
class _DatasetDir:
    """What dataset_dir names.

    Attributes:
        where: dataset_info.json, as messages name it; ONLINE where every name is a hub's id.
        info: the entries of dataset_info.json.
        folder: None where it is on a hub.
        repository: None where it is not.
    """

    where: str
    info: Mapping[str, Any]
    folder: Path | None = None
    repository: Repository | None = None

    def path(self, name: str) -> Path | None:
        """Return the path of something that exists, from here or from dataset_dir."""
        candidates = [Path(name)] if self.folder is None else [Path(name), self.folder / name]
        return next((path for path in candidates if name and path.exists()), None)

    def files(self, entry: DatasetEntry) -> tuple[Path, ...]:
        """Return the data files of an entry."""
        chosen: dict[str, Any] = {"subsets": entry.subsets, "split": entry.split, "folder": entry.folder}
        if entry.hub is not None:
            return hub_files(entry.hub, entry.place, entry.where, **chosen)
        if self.folder is not None:
            return local_files(self.folder / entry.place, entry.where, **chosen)
        assert self.repository is not None
        if entry.place in self.repository.sizes:
            if data_suffix(Path(entry.place)) is None:
                read_rows(Path(self.repository.repo_id, entry.place))  # refuses it, with the reason for its kind
            return fetch_all(self.repository, [entry.place])
        folder = f"{entry.place}/{entry.folder}".rstrip("/")
        return hub_files(self.repository.hub, self.repository.repo_id, entry.where, split=entry.split, folder=folder)


def _open_directory(dataset_dir: str) -> _DatasetDir:
    if dataset_dir == ONLINE:
        return _DatasetDir(ONLINE, {})
    if not dataset_dir.startswith(REMOTE):
        path = Path(dataset_dir) / DATASET_INFO
        return _DatasetDir(str(path), read_registry(path, str(path)) if path.exists() else {}, path.parent)
    repository = open_repository(_default_hub(), dataset_dir.removeprefix(REMOTE), "dataset_dir")
    name = f"{repository.repo_id} on {repository.host}"
    if DATASET_INFO not in repository.sizes:
        raise MegatuneError(Finding(f"{name} has no {DATASET_INFO}", "dataset_dir"), ExitCode.INPUT)
    (path,) = fetch_all(repository, [DATASET_INFO])
    where = f"{name}: {DATASET_INFO}"
    return _DatasetDir(where, read_registry(path, where), repository=repository)


def _resolved(text: str, directory: _DatasetDir, stage: str) -> DatasetSource:
    reference = parse_reference(text, lambda name: name in directory.info or directory.path(name) is not None)
    if reference.hub is None and directory.where != ONLINE:
        if reference.name in directory.info:
            entry = parse_entry(directory.info[reference.name], f"{directory.where}: {reference.name}")
            missing = 'add "ranking": true, if its rows have two answers'
            if stage == "kto":
                missing = 'add "kto_tag" to its columns, if a column says whether an answer is wanted'
            _check_stage(entry.form, stage, entry.where, missing)
            files = directory.files(replace(entry, subsets=reference.subsets or entry.subsets))
            return _source(text, files, entry.form, reference.num_samples or entry.num_samples)
        if (path := directory.path(reference.name)) is not None:
            return _detected(text, reference, local_files(path, "dataset", subsets=reference.subsets), stage)
        if data_suffix(Path(reference.name)) or not is_repository_id(reference.name, owner=True):
            raise _unknown(reference.name, directory)
        try:
            open_repository(_default_hub(), reference.name, "dataset")
        except MegatuneError as error:
            if error.exit_code not in (ExitCode.INPUT, ExitCode.UNAVAILABLE):
                raise
            neither = f"no file or folder {reference.name} here, and "
            findings = [replace(each, what=neither + each.what) for each in error.findings]
            raise MegatuneError(findings, error.exit_code) from error
    files = hub_files(reference.hub or _default_hub(), reference.name, "dataset", subsets=reference.subsets)
    return _detected(text, reference, files, stage)


def _detected(text: str, reference: DatasetReference, files: tuple[Path, ...], stage: str) -> DatasetSource:
    """Resolve a data set that no entry describes: the form is that of its first readable row whose fields are known."""
    readable = (row.fields for file in files for row in read_rows(file) if row.error is None)
    rows = list(islice(readable, 1))
    if not rows:  # an empty form will do: the report on the rows says what is wrong with them
        return _source(text, files, Form(), reference.num_samples)
    rows += islice(readable, ROWS_FOR_DETECTION - 1)
    form = next((form for fields in rows if (form := detect(fields))), None)
    if form is None:
        what = f"{text}: no known form has the fields {', '.join(rows[0]) or 'of a row without fields'}"
        finding = Finding(what, "dataset", fix=f"describe it in {DATASET_INFO}: formatting and columns")
        raise MegatuneError(finding, ExitCode.DATA)
    fix = f"name the two answers chosen and rejected, or describe them in {DATASET_INFO}"
    if stage == "kto":
        fix = f"name the field that says so label, or describe it in {DATASET_INFO}"
    else:  # a label is no tag there
        form = replace(form, columns=replace(form.columns, kto_tag=None))
    _check_stage(form, stage, f"dataset: {text}", fix)
    return _source(text, files, form, reference.num_samples)


def _source(name: str, files: tuple[Path, ...], form: Form, num_samples: int | None) -> DatasetSource:
    own = (form.formatting, form.columns, form.tags, form.ranking)
    return DatasetSource(*own, name=name, files=files, num_samples=num_samples)


def _check_stage(form: Form, stage: str, where: str, fix: str) -> None:
    if form.ranking and stage not in PAIR_STAGES:
        what = f"its rows are preference pairs, which stage {stage} does not train"
        raise MegatuneError(Finding(what, where, fix="write stage: dpo, or rm"), ExitCode.SETTINGS)
    if not form.ranking and stage in PAIR_STAGES:
        what = f"its rows are no preference pairs, and stage {stage} trains nothing else"
        raise MegatuneError(Finding(what, where, fix=f"{fix}; else write stage: sft"), ExitCode.SETTINGS)
    if form.columns.kto_tag is not None and stage == "sft":
        what = "its rows are answers that are wanted or not, and stage sft would train them all"
        raise MegatuneError(Finding(what, where, fix="write stage: kto, or remove kto_tag"), ExitCode.SETTINGS)
    if form.columns.kto_tag is None and stage == "kto":
        what = "its rows do not say whether an answer is wanted, which stage kto needs"
        raise MegatuneError(Finding(what, where, fix=fix), ExitCode.SETTINGS)


def _unknown(name: str, directory: _DatasetDir) -> MegatuneError:
    if data_suffix(Path(name)) or "/" in name:
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset"), ExitCode.INPUT)
    near = nearest(name, directory.info)
    known = ", ".join(sorted(directory.info)[:10]) or f"{directory.where} names no data set"
    what = f"{name!r} is neither in {directory.where} nor a path"
    return MegatuneError(Finding(what, "dataset", fix=f"nearest: {near}" if near else known), ExitCode.SETTINGS)


def _default_hub() -> Hub:
    return "ms" if use_modelscope() else "hf"
