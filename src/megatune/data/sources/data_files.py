"""The data files of a folder or of a data set on a hub, with their subsets and splits, by the data set card or by name.

The rules are those of the `datasets` library, for which repositories are written. Of a repository's other files only
README.md is read, and no code is run.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatune.data.readers import DATA_SUFFIXES, data_suffix, json_type, read_rows
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.repository import Hub, fetch_all, open_repository, read_file
from megatune.references import ref

README = "README.md"
DEFAULT_SUBSET = "default"
DEFAULT_SPLIT = "train"

# Words for a split in the name of a file or folder, between these separators.
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATOR = r"[-._ 0-9]"
_SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
# Files that hubs and the `datasets` library write next to the data.
_METADATA_FILES = ("readme.md", "readme.txt", "license.txt", "requirements.txt", "config.json", "dataset_info.json",
               "dataset_infos.json", "dataset_dict.json", "state.json")  # fmt: skip
# Options of a subset that do not change rows; others are for other readers, and could change them.
_OPTIONS = ("config_name", "data_files", "data_dir", "default", "features", "version", "description", "drop_labels")


def local_files(
    path: Path, where: str, *, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = ""
) -> tuple[Path, ...]:
    """Return the data files of a local file or folder, sorted by name.

    A folder gives all its data files. If its README.md is a data set card, if it has no data files itself, or if a
    subset, split or folder in it is requested, it is read as a data set repository.

    Raises:
        MegatuneError: there are no data files or none that is supported (exit code 66); no such subset or split (64).
    """
    chosen = bool(subsets or split != DEFAULT_SPLIT or folder)
    if path.is_file():
        if chosen:
            what = f"{path} is a file, which has no subsets, splits or folders"
            raise MegatuneError(Finding(what, where, fix="remove them"), ExitCode.SETTINGS)
        if data_suffix(path) is None:
            read_rows(path)  # raises the error for its file type
        return (path,)
    if not path.exists():
        fix = "correct its path, which is relative to the folder of dataset_info.json"
        raise MegatuneError(Finding(f"no such file or folder: {path}", where, fix=fix), ExitCode.INPUT)
    readme = path / README
    card = read_card(readme.read_text(encoding="utf-8", errors="replace"), str(path)) if readme.is_file() else None
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if not chosen and card is None and any(map(_is_data, names)):
        _check_kinds(names, str(path))
        return tuple(path / name for name in names if _is_data(name))
    inside: list[str] = []
    for root, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside += [(Path(root) / name).relative_to(path).as_posix() for name in files]
    data_files = DataFiles(inside, card, name=path.resolve().name, where=str(path))
    return tuple(path / name for name in data_files.choose(subsets, split, folder))


def hub_files(
    hub: Hub, repo_id: str, where: str, *, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = ""
) -> tuple[Path, ...]:
    """Return the data files of a data set on a hub, after downloading those that the cache does not have.

    Raises:
        MegatuneError: no such repository, subset, split or data files, or they are private (exit codes 64 and 66);
            the hub or its library is not available (69); the cache cannot be written (73).
    """
    repository = open_repository(hub, repo_id, where)
    name = f"{repo_id} on {repository.host}"
    card = read_card(read_file(repository, README) or "", name)
    fix = f"download it to a folder, and name its files in {ref('dataset')}"
    data_files = DataFiles(list(repository.sizes), card, name=repo_id.rpartition("/")[2], where=name, fix=fix)
    return fetch_all(repository, data_files.choose(subsets, split, folder))


def read_card(text: str, where: str) -> dict[str, Any] | None:
    """Parse the YAML block at the start of a data set's README.md; return None if there is none.

    Raises:
        MegatuneError: it is not YAML (exit code 66).
    """
    import yaml

    from megatune.config.values import construct

    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return None
    try:
        card = construct("\n".join(lines[1 : lines.index("---", 1)]))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 2}" if mark else ""
        raise MegatuneError(Finding("the card is not YAML", f"{where}: {README}{line}"), ExitCode.INPUT) from error
    return card if isinstance(card, dict) else {}


class DataFiles:
    """The data files of a repository, by subset and split.

    Args:
        paths: all its files, relative, with "/".
        card: the result of `read_card`.
        name: the repository's name without its owner; NAME.py would be its script.
        where, fix: the repository, for messages, and the fix if its files cannot be chosen by these rules.

    Raises:
        MegatuneError: the card's `configs` are invalid, or a script generates the rows (exit code 66).
    """

    def __init__(
        self, paths: Sequence[str], card: Mapping[str, Any] | None, *, name: str, where: str, fix: str = ""
    ) -> None:
        self._paths, self._where, self._fix = sorted(paths), where, fix
        self._configs = self._read_configs((card or {}).get("configs"))
        scripts = [path for path in self._paths if path.endswith(".py") and "/" not in path]
        scripts.sort(key=lambda path: path != f"{name}.py")  # the data set's script first
        if not self._configs and scripts and (scripts[0] == f"{name}.py" or not any(map(_is_data, self._paths))):
            raise self._unsupported(f"its rows are generated by a script, {scripts[0]}", "data set code is never run")

    def choose(self, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = "") -> list[str]:
        """Return the paths of the files of the subsets, sorted by name within each.

        Args:
            subsets: () for the default subset.
            folder: only the files in it, without looking at the card's subsets, as with `data_dir`.

        Raises:
            MegatuneError: no such subset or split (exit code 64); no data files, or several file types (66).
        """
        if folder:
            found = self._by_split(_folder(folder), split, "")
        else:
            found = [path for name in self._chosen(subsets) for path in self._of_subset(name, split)]
        found = list(dict.fromkeys(found))
        _check_kinds([path for path in found if not _is_data(path)] or found, self._where, self._fix)
        return found

    def _chosen(self, subsets: Sequence[str]) -> Sequence[str]:
        names = list(self._configs) or [DEFAULT_SUBSET]
        if tuple(subsets) == ("all",) and "all" not in names:
            return names
        if not subsets:
            default = [n for n in names if len(names) == 1 or n == DEFAULT_SUBSET or self._configs[n].get("default")]
            if not default:
                fix = f"write NAME:{names[0]}, or NAME:all for all of them; its subsets are {_listed(names)}"
                raise self._unknown("it has several subsets, but none was chosen", fix)
            return default[:1]
        if unknown := [name for name in subsets if name not in names]:
            only = "it has no subsets" if not self._configs else f"its subsets are {_listed(names)}"
            raise self._unknown(f"no subset {_listed(unknown)}", only)
        return subsets

    def _of_subset(self, name: str, split: str) -> list[str]:
        config = self._configs.get(name, {})
        folder = _folder(str(config.get("data_dir") or ""))
        data_files = config.get("data_files")
        if not data_files:
            return self._by_split(folder, split, name)
        patterns = self._patterns(data_files, name)
        if split not in patterns:
            raise self._no_split(split, list(patterns), name)
        return [path for pattern in patterns[split] for path in self._matched(folder, pattern, name)]

    def _by_split(self, folder: str, split: str, subset: str) -> list[str]:
        """Choose by the names of files and folders, as `datasets` does for a repository without a card."""
        prefix = f"{folder}/" if folder else ""
        inside = [path.removeprefix(prefix) for path in self._paths if path.startswith(prefix)]
        data = [path for path in inside if _is_data(path)]
        if not data:
            _check_kinds(inside, f"{self._where}: {folder}" if folder else self._where, self._fix)
        splits = splits_by_name(data)
        if split not in splits:
            raise self._no_split(split, list(splits), subset)
        return [prefix + path for path in splits[split]]

    def _patterns(self, data_files: Any, subset: str) -> dict[str, list[str]]:
        """Return the patterns of each split, from any valid form of the card's `data_files`."""
        items = data_files if isinstance(data_files, list) else [data_files]
        splits: dict[str, list[str]] = {}
        for item in items:
            one = item if isinstance(item, Mapping) else {"split": DEFAULT_SPLIT, "path": item}
            split, path = one.get("split"), one.get("path")
            paths: list[Any] = path if isinstance(path, list) else [path]
            if not isinstance(split, str) or not all(isinstance(each, str) for each in paths):
                raise self._unsupported(f"{README}: data_files of subset {subset} do not have the expected form")
            if elsewhere := [each for each in paths if "://" in each]:
                raise self._unsupported(f"subset {subset} reads files from another host: {elsewhere[0]}")
            splits.setdefault(split, []).extend(each.removeprefix("./") for each in paths)
        return splits

    def _matched(self, folder: str, named: str, subset: str) -> list[str]:
        from fsspec.utils import glob_translate

        pattern = f"{folder}/{named}" if folder else named
        if pattern in self._paths:
            return [pattern]
        try:
            expression = re.compile(glob_translate(pattern))
        except ValueError as error:
            raise self._unsupported(f"subset {subset}: {pattern} is not a valid file pattern") from error
        matched = [path for path in self._paths if expression.match(path) and _is_visible(path)]
        if not matched:
            raise self._unsupported(f"subset {subset} names {named}, but there is no such data file")
        return [path for path in matched if _is_data(path)] or matched

    def _read_configs(self, configs: Any) -> dict[str, Mapping[str, Any]]:
        if configs is None:
            return {}
        if not isinstance(configs, list) or not all(isinstance(c, Mapping) and c.get("config_name") for c in configs):
            raise self._unsupported(f"{README}: configs do not have the expected form: got {json_type(configs)}")
        for config in configs:
            if other := [key for key in config if key not in _OPTIONS]:
                what = f"subset {config['config_name']} needs the reading options {', '.join(other)}"
                raise self._unsupported(what, "such options are not supported")
        return {str(config["config_name"]): config for config in configs}

    def _no_split(self, split: str, splits: Sequence[str], subset: str) -> MegatuneError:
        of = f" of subset {subset}" if subset and self._configs else ""
        return self._unknown(f"no split {split}{of}", f'write "split" in dataset_info.json: one of {_listed(splits)}')

    def _unknown(self, what: str, fix: str) -> MegatuneError:
        return MegatuneError(Finding(what, self._where, fix=fix), ExitCode.SETTINGS)

    def _unsupported(self, what: str, why: str = "") -> MegatuneError:
        return MegatuneError(Finding(what, self._where, why, self._fix), ExitCode.INPUT)


def splits_by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """Group files by split: shards in data/, else words in folder names, else words in file names, else all train."""
    shards: dict[str, list[str]] = {}
    for path in paths:
        if match := _SHARD.fullmatch(path):
            shards.setdefault(match["split"], []).append(path)
    if shards:
        return shards
    for part in (slice(None, -1), slice(-1, None)):  # the folders, then the file
        found: dict[str, list[str]] = {}
        for split, words in _KEYWORDS.items():
            word = re.compile(rf"(^|{_SEPARATOR})({'|'.join(words)})({_SEPARATOR}|$)")
            if files := [path for path in paths if any(map(word.search, path.split("/")[part]))]:
                found[split] = files
        if found:
            return found
    return {DEFAULT_SPLIT: list(paths)}


def _folder(path: str) -> str:
    """Normalize a relative folder, "" for the root."""
    plain = posixpath.normpath(path.strip("/") or ".")
    return "" if plain == "." else plain


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown


def _is_data(path: str) -> bool:
    return _is_visible(path) and data_suffix(Path(path)) is not None


def _check_kinds(paths: Sequence[str], where: str, fix: str = "") -> None:
    """Reject files of several types, which cannot be one data set, and an empty list (exit code 66)."""
    visible = [Path(path) for path in paths if _is_visible(path)]
    kinds = sorted({kind for path in visible if (kind := data_suffix(path))})
    if len(kinds) == 1:
        return
    fix = fix or f"use one file type per folder: {', '.join(DATA_SUFFIXES)}"
    if kinds:
        what = f"data files of several types: {' and '.join(kinds)}"
    else:
        others = sorted({path.suffix.lower() for path in visible if path.suffix})
        what = f"no data files; {', '.join(others)} files are not supported" if others else "no data files"
    raise MegatuneError(Finding(what, where, fix=fix), ExitCode.INPUT)


def _is_visible(path: str) -> bool:
    """Return whether a path is not hidden, not in a cache and not metadata."""
    *folders, name = path.split("/")
    hidden = name.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)
    return not hidden and name.lower() not in _METADATA_FILES
