"""Which files of a folder hold rows, and why others are not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatune.data.readers import DATA_SUFFIXES, data_suffix
from megatune.errors import ExitCode, Finding, MegatuneError

# Beside data, and no data: what hubs and the `datasets` library write about it.
_ABOUT_DATA = (
    "readme.md",
    "readme.txt",
    "license.txt",
    "requirements.txt",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)


def is_data(path: str) -> bool:
    """Whether a relative path, by its name, is of a data file."""
    return is_visible(path) and data_suffix(Path(path)) is not None


def check_kinds(paths: Sequence[str], where: str, fix: str = "") -> None:
    """Refuse files of several kinds, which cannot be one data set, and none at all.

    Args:
        paths: relative paths; those that are no data are left out.

    Raises:
        MegatuneError: with exit code 66.
    """
    visible = [Path(path) for path in paths if is_visible(path)]
    kinds = sorted({kind for path in visible if (kind := data_suffix(path))})
    if len(kinds) == 1:
        return
    fix = fix or f"one kind of file in a folder, of {', '.join(DATA_SUFFIXES)}"
    if kinds:
        what = f"data files of several kinds: {' and '.join(kinds)}"
    else:
        others = sorted({path.suffix.lower() for path in visible if path.suffix})
        what = f"no data files; {', '.join(others)} files are not read" if others else "no data files"
    raise MegatuneError(Finding(what, where, fix=fix), ExitCode.INPUT)


def is_visible(path: str) -> bool:
    """Not hidden, not of a cache and not about the data."""
    *folders, name = path.split("/")
    hidden = name.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)
    return not hidden and name.lower() not in _ABOUT_DATA
