"""Where rows come from: dataset_info.json, paths and hubs.

`resolve_datasets` turns the data set names in the settings into `DatasetSource`s, each with the files of a data set and
the form of its rows; `DatasetSource.rows_from` reads them from any position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.groups.data import DataSettings
from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources.data_files import hub_files, local_files
from megatune.data.sources.detection import DatasetSource, FormatDetector, SourcePosition, check_stage
from megatune.data.sources.registry import DATASET_INFO, DatasetEntry, parse_entry, parse_reference, read_registry
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.hub.repository import Hub, Repository, fetch_all, is_repository_id, open_repository, use_modelscope
from megatune.references import ref, write

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
    """Resolve the data sets for training or evaluation: see `resolve_datasets`."""
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
    """Resolve the data set in eval_generate_prompts: see `resolve_datasets`."""
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

    Each name is looked up in DATASET_DIR/dataset_info.json; otherwise it is a path, relative to the working directory
    or to dataset_dir; otherwise an id on a hub. `parse_reference` documents the syntax.

    Args:
        stage: "dpo" and "rm" accept only preference pairs, "kto" only desirable and undesirable answers; the other
            stages accept neither.
        columns: own name -> standard name of columns, for data sets without an entry.
        key: the setting, for messages.
        swift_version: the version of ms-swift, if its rules read the rows of data sets without an entry.
        all_columns: reject a column that none of them has.
        hubs: False skips data sets on hubs, without contacting any hub.

    Raises:
        MegatuneError: with all problems at once. Exit code 64: an unknown name, subset, split or column, or an invalid
            entry; 65: rows of an unknown form; 66: a file or repository that is missing or not supported; 69: a hub
            that cannot be reached; 73: its cache cannot be written. If there are several, the lowest code.
    """
    if not names or (not hubs and str(dataset_dir).startswith((ONLINE, REMOTE))):
        return []
    directory = _open_directory(str(dataset_dir))
    detector = FormatDetector(stage, columns or {}, swift_version)
    sources: list[DatasetSource] = []
    errors: list[MegatuneError] = []
    for name in names:
        try:
            if (source := _resolve(name, directory, detector, hubs)) is not None:
                sources.append(source)
        except MegatuneError as error:
            findings = [replace(each, where=key) if each.where == "dataset" else each for each in error.findings]
            errors.append(MegatuneError(findings, error.exit_code))
    if all_columns and not errors and len(sources) == len(names) and (wrong := detector.unknown_columns()):
        errors.append(MegatuneError(wrong, ExitCode.SETTINGS))
    if errors:
        findings = [finding for error in errors for finding in error.findings]
        raise MegatuneError(findings, min(error.exit_code for error in errors))
    return sources


def media_dir_of(data: DataSettings) -> str:
    """Return the base of relative media paths: media_dir, else dataset_dir, or "" if that is on a hub."""
    if data.media_dir is not None:
        return data.media_dir
    return "" if data.dataset_dir == ONLINE or data.dataset_dir.startswith(REMOTE) else data.dataset_dir


@dataclass(frozen=True, slots=True)
class _DatasetDir:
    """The content of dataset_dir.

    Attributes:
        where: dataset_info.json, as shown in messages; ONLINE if every name is a hub's id.
        info: the entries of dataset_info.json.
        folder: None if it is on a hub.
        repository: None if it is a local folder.
    """

    where: str
    info: Mapping[str, Any]
    folder: Path | None = None
    repository: Repository | None = None

    def path(self, name: str) -> Path | None:
        """Return the path of an existing file or folder, relative to the working directory or to dataset_dir."""
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
                read_rows(Path(self.repository.repo_id, entry.place))  # raises the error for its file type
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


def _resolve(text: str, directory: _DatasetDir, detector: FormatDetector, hubs: bool) -> DatasetSource | None:
    """Resolve one data set; return None if it is on a hub and hubs are skipped."""
    reference = parse_reference(text, lambda name: name in directory.info or directory.path(name) is not None)
    if reference.hub is None and directory.where != ONLINE:
        if reference.name in directory.info:
            entry = parse_entry(directory.info[reference.name], f"{directory.where}: {reference.name}")
            missing = 'add "ranking": true if its rows have two answers'
            if detector.stage == "kto":
                missing = 'add "kto_tag" to its columns if a column states whether an answer is desirable'
            check_stage(entry.format, detector.stage, entry.where, missing)
            if entry.hub is not None and not hubs:
                return None
            files = directory.files(replace(entry, subsets=reference.subsets or entry.subsets))
            fetched = entry.hub is not None or directory.repository is not None
            return DatasetSource(text, files, entry.format, reference.num_samples or entry.num_samples, fetched)
        if (path := directory.path(reference.name)) is not None:
            return detector.source(text, reference, local_files(path, "dataset", subsets=reference.subsets))
        if data_suffix(Path(reference.name)) or not is_repository_id(reference.name, owner=True):
            raise _unknown(reference.name, directory, is_swift=bool(detector.swift_version))
        if not hubs:
            return None
        try:
            open_repository(_default_hub(), reference.name, "dataset")
        except MegatuneError as error:
            if error.exit_code not in (ExitCode.INPUT, ExitCode.UNAVAILABLE):
                raise
            neither = f"there is no local file or folder {reference.name}, and "
            findings = [replace(each, what=neither + each.what) for each in error.findings]
            raise MegatuneError(findings, error.exit_code) from error
    if not hubs:
        return None
    files = hub_files(reference.hub or _default_hub(), reference.name, "dataset", subsets=reference.subsets)
    return detector.source(text, reference, files, fetched=True)


def _unknown(name: str, directory: _DatasetDir, *, is_swift: bool) -> MegatuneError:
    """Return the error for an unknown name; it does not mention dataset_dir, which ms-swift lacks, if it is not set."""
    is_default = directory.folder == Path(DataSettings.model_fields["dataset_dir"].default)
    if is_swift and is_default and not directory.info:
        fix = "name a file or a folder, relative to the working directory, or a data set on a hub: OWNER/NAME"
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset", fix=fix), ExitCode.INPUT)
    if data_suffix(Path(name)) or "/" in name:
        fix = f"correct the path, which is relative to the working directory or to {ref('dataset_dir')}"
        return MegatuneError(Finding(f"no such file or folder: {name}", "dataset", fix=fix), ExitCode.INPUT)
    if directory.folder is not None and not directory.folder.is_dir():
        what, fix = f"folder {directory.folder} not found", write("dataset_dir", "FOLDER")
        return MegatuneError(Finding(what, "dataset_dir", f"dataset {name!r} is looked up in it", fix), ExitCode.INPUT)
    known = ", ".join(sorted(directory.info)[:10])
    known = f"name one of: {known}" if known else f"{directory.where} names no data set"
    what = f"{name!r} is neither in {directory.where} nor a path"
    fix = did_you_mean(name, directory.info, known, count=3)
    return MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.SETTINGS)


def _default_hub() -> Hub:
    return "ms" if use_modelscope() else "hf"
