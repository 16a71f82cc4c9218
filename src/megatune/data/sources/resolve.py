"""From what `dataset` names to files and the form of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources.dataset import DatasetSource
from megatune.data.sources.hub import hub_files
from megatune.data.sources.paths import local_files
from megatune.data.sources.reference import Reference, parse_reference
from megatune.data.sources.registry import (
    DATASET_INFO,
    Entry,
    nearest,
    parse_entry,
    read_registry,
)
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.repository import Hub, fetch_all, is_repository_id, open_repository, use_modelscope

ONLINE = "ONLINE"
REMOTE = "REMOTE:"
# Readable rows that are looked at for the form of a data set that no entry describes.
ROWS_FOR_DETECTION = 100


def resolve_datasets(names: Sequence[str], dataset_dir: str | Path, stage: str) -> list[DatasetSource]:
    """The data sets that `dataset` or `eval_dataset` names, in order; those on a hub are fetched.

    Each is looked up in DATASET_DIR/dataset_info.json; else it is a path, from here or from dataset_dir; else a hub's
    id. `parse_reference` has the syntax.

    Args:
        stage: "dpo" takes preference pairs and nothing else; "sft" and "pt" take anything else.

    Raises:
        MegatuneError: every problem at once. Exit code 64: a name, entry, subset or split that is none; 65: rows of no
            known form; 66: a file or repository that is missing or refused; 69: a hub that cannot be reached; 73: its
            cache cannot be written. Of several, the least.
    """
    if not names:
        return []
    place = _place(str(dataset_dir))
    sources: list[DatasetSource] = []
    errors: list[MegatuneError] = []
    for name in names:
        try:
            sources.append(_resolved(name, place, stage))
        except MegatuneError as error:
            errors.append(error)
    if errors:
        findings = [finding for error in errors for finding in error.findings]
        raise MegatuneError(findings, min(error.exit_code for error in errors))
    return sources


@dataclass(frozen=True, slots=True)
class _Place:
    """What dataset_dir stands for.

    Attributes:
        directory: None where it is on a hub.
        info: the entries of dataset_info.json.
        where: dataset_info.json, as messages name it.
        files: the data files of an entry that is on no hub of its own.
        online: every name is a hub's id.
    """

    directory: Path | None
    info: Mapping[str, Any]
    where: str
    files: Callable[[Entry], tuple[Path, ...]]
    online: bool = False

    def path(self, name: str) -> Path | None:
        """The path of something that exists, from here or from dataset_dir."""
        candidates = [Path(name)] if self.directory is None else [Path(name), self.directory / name]
        return next((path for path in candidates if name and path.exists()), None)


def _place(dataset_dir: str) -> _Place:
    if dataset_dir == ONLINE:
        return _Place(None, {}, ONLINE, lambda entry: (), online=True)
    if dataset_dir.startswith(REMOTE):
        return _remote_place(dataset_dir.removeprefix(REMOTE))
    directory = Path(dataset_dir)
    path = directory / DATASET_INFO

    def files(entry: Entry) -> tuple[Path, ...]:
        return local_files(
            directory / entry.place, entry.where, subsets=entry.subsets, split=entry.split, folder=entry.folder
        )

    return _Place(directory, read_registry(path, str(path)) if path.exists() else {}, str(path), files)


def _remote_place(repo_id: str) -> _Place:
    """dataset_info.json from a repository on a hub, which has the files it names too."""
    repository = open_repository(_default_hub(), repo_id, "dataset_dir")
    where = f"{repo_id} on {repository.host}: {DATASET_INFO}"
    if DATASET_INFO not in repository.sizes:
        raise MegatuneError(
            Finding(f"{repo_id} on {repository.host} has no {DATASET_INFO}", "dataset_dir"), ExitCode.INPUT
        )
    (path,) = fetch_all(repository, [DATASET_INFO])

    def files(entry: Entry) -> tuple[Path, ...]:
        if entry.place in repository.sizes:
            if data_suffix(Path(entry.place)) is None:
                read_rows(Path(repo_id, entry.place))  # refuses it, with the reason for its kind
            return fetch_all(repository, [entry.place])
        folder = f"{entry.place}/{entry.folder}".rstrip("/")
        return hub_files(repository.hub, repo_id, entry.where, split=entry.split, folder=folder)

    return _Place(None, read_registry(path, where), where, files)


def _resolved(text: str, place: _Place, stage: str) -> DatasetSource:
    reference = parse_reference(text, lambda name: name in place.info or place.path(name) is not None)
    if reference.hub is None and not place.online:
        if reference.name in place.info:
            return _from_entry(text, reference, place, stage)
        if (path := place.path(reference.name)) is not None:
            return _detected(text, reference, local_files(path, "dataset", subsets=reference.subsets), stage)
        if data_suffix(Path(reference.name)) or not is_repository_id(reference.name, owner=True):
            raise _unknown(reference.name, place)
        _open_unprefixed(reference.name)
    files = hub_files(reference.hub or _default_hub(), reference.name, "dataset", subsets=reference.subsets)
    return _detected(text, reference, files, stage)


def _from_entry(text: str, reference: Reference, place: _Place, stage: str) -> DatasetSource:
    entry = parse_entry(place.info[reference.name], f"{place.where}: {reference.name}")
    _check_stage(entry.ranking, stage, entry.where, 'add "ranking": true, if its rows have two answers')
    entry = replace(entry, subsets=reference.subsets or entry.subsets)
    if entry.hub is None:
        files = place.files(entry)
    else:
        files = hub_files(
            entry.hub, entry.place, entry.where, subsets=entry.subsets, split=entry.split, folder=entry.folder
        )
    num_samples = reference.num_samples or entry.num_samples
    return DatasetSource(text, files, entry.formatting, entry.columns, entry.tags, num_samples, entry.ranking)


def _detected(text: str, reference: Reference, files: tuple[Path, ...], stage: str) -> DatasetSource:
    """A data set that no entry describes: the form is that of its first readable row whose fields are known."""
    from megatune.data.formats import detect  # formats are described in the terms of this package

    readable = (row.fields for file in files for row in read_rows(file) if row.error is None)
    rows = list(islice(readable, 1))
    if not rows:  # an empty form will do: the report on the rows says what is wrong with them
        return DatasetSource(text, files, num_samples=reference.num_samples)
    rows += islice(readable, ROWS_FOR_DETECTION - 1)
    form = next((form for fields in rows if (form := detect(fields))), None)
    if form is None:
        what = f"{text}: no known form has the fields {', '.join(rows[0]) or 'of a row without fields'}"
        fix = f"describe it in {DATASET_INFO}: formatting and columns"
        raise MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.DATA)
    fix = f"name the two answers chosen and rejected, or describe them in {DATASET_INFO}"
    _check_stage(form.ranking, stage, f"dataset: {text}", fix)
    return DatasetSource(text, files, form.formatting, form.columns, form.tags, reference.num_samples, form.ranking)


def _open_unprefixed(repo_id: str) -> None:
    """Find out whether a hub has it; a user who meant a folder is told that there is none."""
    try:
        open_repository(_default_hub(), repo_id, "dataset")
    except MegatuneError as error:
        if error.exit_code not in (ExitCode.INPUT, ExitCode.UNAVAILABLE):
            raise
        findings = [replace(each, what=f"no file or folder {repo_id} here, and {each.what}") for each in error.findings]
        raise MegatuneError(findings, error.exit_code) from error


def _check_stage(ranking: bool, stage: str, where: str, fix: str) -> None:
    if ranking and stage != "dpo":
        what = f"its rows are preference pairs, which stage {stage} does not train"
        raise MegatuneError(Finding(what, where, fix="write stage: dpo"), ExitCode.SETTINGS)
    if not ranking and stage == "dpo":
        what = "its rows are no preference pairs, and stage dpo trains nothing else"
        raise MegatuneError(Finding(what, where, fix=f"{fix}; else write stage: sft"), ExitCode.SETTINGS)


def _unknown(name: str, place: _Place) -> MegatuneError:
    if data_suffix(Path(name)) or "/" in name:
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset"), ExitCode.INPUT)
    near = nearest(name, place.info)
    known = ", ".join(sorted(place.info)[:10]) or f"{place.where} names no data set"
    what = f"{name!r} is neither in {place.where} nor a path"
    return MegatuneError(Finding(what, "dataset", fix=f"nearest: {near}" if near else known), ExitCode.SETTINGS)


def _default_hub() -> Hub:
    return "ms" if use_modelscope() else "hf"
