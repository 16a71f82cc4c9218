"""NAME.safetensors.index.json: which file of a checkpoint holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from megatune.errors import ExitCode, Finding, MegatuneError


def read_weight_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by names relative to the index's folder, which they do not leave.

    Raises:
        MegatuneError: the file is no index, or names files elsewhere (exit code 66).
    """
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_index(index, str(error)) from None
    if not isinstance(file_of, dict):
        raise _no_index(index, "weight_map is no object")
    for tensor, file in file_of.items():
        if not isinstance(file, str) or not file or "\0" in file:
            raise _no_index(index, f"weight_map: {tensor} is in {file!r}, which is no name of a file")
        path = PurePosixPath(file.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            what, why = f"weight_map: {tensor} is in {file}, outside of the checkpoint", "a checkpoint is one folder"
            raise MegatuneError(Finding(what, str(index), why, "download the checkpoint again"), ExitCode.INPUT)
    return file_of


def _no_index(index: Path, why: str) -> MegatuneError:
    return MegatuneError(Finding(f"is not an index of weights: {why}", str(index)), ExitCode.INPUT)
