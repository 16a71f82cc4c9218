"""Where rows come from: dataset_info.json, paths and hubs.

`resolve_datasets` turns the names of a user's settings into `DatasetSource`s, each the files of a data set and the form
of its rows; `DatasetSource.rows_from` reads them from any position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.groups.data import DataSettings
from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources.data_files import hub_files, local_files
from megatune.data.sources.detection import DatasetSource, Detection, SourcePosition, check_stage, source_of
from megatune.data.sources.registry import DATASET_INFO, DatasetEntry, parse_entry, parse_reference, read_registry
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.hub.repository import Hub, Repository, fetch_all, is_repository_id, open_repository, use_modelscope

if TYPE_CHECKING:
    from megatune.config.settings import Settings

__all__ = [
    "DATASET_INFO",
    "DatasetSource",
    "SourcePosition",
    "datasets_of",
    "media_dir_of",
    "prompt_sources",
    "resolve_datasets",
]

ONLINE = "ONLINE"
REMOTE = "REMOTE:"


def datasets_of(settings: Settings, *, evaluation: bool = False, hubs: bool = True) -> list[DatasetSource]:
    """Resolve the data sets that a run trains on, or evaluates on: see `resolve_datasets`."""
    data = settings.data
    return resolve_datasets(
        data.eval_dataset if evaluation else data.dataset,
        data.dataset_dir,
        settings.run.stage,
        data.columns,
        key="eval_dataset" if evaluation else "dataset",
        swift_version=data.swift_version,
        all_columns=not evaluation,
        hubs=hubs,
    )


def prompt_sources(settings: Settings, name: str, *, hubs: bool = True) -> list[DatasetSource]:
    """Resolve what eval_generate_prompts names: see `resolve_datasets`."""
    data = settings.data
    return resolve_datasets(
        [name], data.dataset_dir, "sft", data.columns, key="eval_generate_prompts", all_columns=False, hubs=hubs
    )


def resolve_datasets(
    names: Sequence[str],
    dataset_dir: str | Path,
    stage: str,
    columns: Mapping[str, str] | None = None,
    *,
    key: str = "dataset",
    swift_version: int = 0,
    all_columns: bool = True,
    hubs: bool = True,
) -> list[DatasetSource]:
    """Resolve the data sets that a setting names, in order; those on a hub are fetched.

    Each is looked up in DATASET_DIR/dataset_info.json; else it is a path, from here or from dataset_dir; else a hub's
    id. `parse_reference` has the syntax.

    Args:
        stage: "dpo" and "rm" take preference pairs and nothing else, "kto" judged answers; "sft" and "pt" take anything
            else.
        columns: own name -> usual name of columns of the data sets that have no entry.
        key: the setting, for messages.
        swift_version: of ms-swift, if its rules read the rows of data sets that have no entry.
        all_columns: refuse a column that none of them has.
        hubs: False leaves out those that are on a hub, and asks none.

    Raises:
        MegatuneError: every problem at once. Exit code 64: a name, entry, subset, split or column that is none; 65:
            rows of no known form; 66: a file or repository that is missing or refused; 69: a hub that cannot be
            reached; 73: its cache cannot be written. Of several, the least.
    """
    if not names or (not hubs and str(dataset_dir).startswith((ONLINE, REMOTE))):
        return []
    directory = _open_directory(str(dataset_dir))
    told = Detection(stage, columns or {}, swift_version)
    sources: list[DatasetSource] = []
    errors: list[MegatuneError] = []
    for name in names:
        try:
            if (source := _resolved(name, directory, told, hubs)) is not None:
                sources.append(source)
        except MegatuneError as error:
            findings = [replace(each, where=key) if each.where == "dataset" else each for each in error.findings]
            errors.append(MegatuneError(findings, error.exit_code))
    if all_columns and not errors and len(sources) == len(names) and (wrong := told.unknown_columns()):
        errors.append(MegatuneError(wrong, ExitCode.SETTINGS))
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


def _resolved(text: str, directory: _DatasetDir, told: Detection, hubs: bool) -> DatasetSource | None:
    """Resolve one data set; None where it is on a hub that is not to be asked."""
    reference = parse_reference(text, lambda name: name in directory.info or directory.path(name) is not None)
    if reference.hub is None and directory.where != ONLINE:
        if reference.name in directory.info:
            entry = parse_entry(directory.info[reference.name], f"{directory.where}: {reference.name}")
            missing = 'add "ranking": true, if its rows have two answers'
            if told.stage == "kto":
                missing = 'add "kto_tag" to its columns, if a column says whether an answer is desirable'
            check_stage(entry.form, told.stage, entry.where, missing)
            if entry.hub is not None and not hubs:
                return None
            files = directory.files(replace(entry, subsets=reference.subsets or entry.subsets))
            fetched = entry.hub is not None or directory.repository is not None
            return source_of(text, files, entry.form, reference.num_samples or entry.num_samples, fetched=fetched)
        if (path := directory.path(reference.name)) is not None:
            return told.source(text, reference, local_files(path, "dataset", subsets=reference.subsets))
        if data_suffix(Path(reference.name)) or not is_repository_id(reference.name, owner=True):
            raise _unknown(reference.name, directory, is_swift=bool(told.swift_version))
        if not hubs:
            return None
        try:
            open_repository(_default_hub(), reference.name, "dataset")
        except MegatuneError as error:
            if error.exit_code not in (ExitCode.INPUT, ExitCode.UNAVAILABLE):
                raise
            neither = f"no file or folder {reference.name} here, and "
            findings = [replace(each, what=neither + each.what) for each in error.findings]
            raise MegatuneError(findings, error.exit_code) from error
    if not hubs:
        return None
    files = hub_files(reference.hub or _default_hub(), reference.name, "dataset", subsets=reference.subsets)
    return told.source(text, reference, files, fetched=True)


def _unknown(name: str, directory: _DatasetDir, *, is_swift: bool) -> MegatuneError:
    """Say what is wrong with a name; in words of ms-swift, which has no dataset_dir, where nobody wrote one."""
    is_default = directory.folder == Path(DataSettings.model_fields["dataset_dir"].default)
    if is_swift and is_default and not directory.info:
        fix = "name a file or a folder, from the current folder, or a data set on a hub: OWNER/NAME"
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset", fix=fix), ExitCode.INPUT)
    if data_suffix(Path(name)) or "/" in name:
        fix = "correct the path, which begins at the current folder or at dataset_dir"
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset", fix=fix), ExitCode.INPUT)
    if directory.folder is not None and not directory.folder.is_dir():
        what, fix = f"folder {directory.folder} not found", "write dataset_dir: the folder of the data sets"
        return MegatuneError(Finding(what, "dataset_dir", f"dataset {name!r} is looked up in it", fix), ExitCode.INPUT)
    known = ", ".join(sorted(directory.info)[:10])
    known = f"name one of: {known}" if known else f"{directory.where} names no data set"
    what = f"{name!r} is neither in {directory.where} nor a path"
    fix = did_you_mean(name, directory.info, known, count=3)
    return MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.SETTINGS)


def _default_hub() -> Hub:
    return "ms" if use_modelscope() else "hf"
