"""The data files of a local path: a file, a folder, or a folder that is a copy of a hub's repository."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources.kinds import check_kinds, is_data
from megatune.data.sources.layout import DEFAULT_SPLIT, README, Layout, read_card
from megatune.errors import ExitCode, Finding, MegatuneError


def local_files(
    path: Path, where: str, *, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = ""
) -> tuple[Path, ...]:
    """The data files of a path, in order of their names.

    A folder gives all its data files. Where its README.md is a data set's card, it holds none itself, or a subset,
    split or folder in it is asked for, it is read as the repository of a data set.

    Raises:
        MegatuneError: there is none, or none that is read (exit code 66); no such subset or split (64).
    """
    chosen = bool(subsets or split != DEFAULT_SPLIT or folder)
    if path.is_file():
        if chosen:
            what = f"{path} is a file, which has no subsets, splits or folders"
            raise MegatuneError(Finding(what, where, fix="remove them"), ExitCode.SETTINGS)
        if data_suffix(path) is None:
            read_rows(path)  # refuses it, with the reason for its kind
        return (path,)
    if not path.exists():
        raise MegatuneError(Finding(f"no such file or folder: {path}", where), ExitCode.INPUT)
    readme = path / README
    card = read_card(readme.read_text(encoding="utf-8", errors="replace"), str(path)) if readme.is_file() else None
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if not chosen and card is None and any(map(is_data, names)):
        check_kinds(names, str(path))
        return tuple(path / name for name in names if is_data(name))
    layout = Layout(_all_files(path), card, name=path.resolve().name, where=str(path))
    return tuple(path / name for name in layout.files(subsets, split, folder))


def _all_files(folder: Path) -> list[str]:
    """Relative paths of all files below a folder, but for hidden folders."""
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in files]
    return found
