"""A folder that is whole or not there: written beside its final name, synced and renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.files import ensure_room, sync, writing


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which takes its name, and the place of what is there, at the end.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    ensure_room(target, num_bytes)
    partial, replaced = (target.with_name(f".{target.name}.{state}") for state in ("partial", "replaced"))
    with writing(target, num_bytes):
        for folder in (partial, replaced):
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
        sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def check_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Refuse to write over what is read, or over anything that the user did not mean to lose."""
    resolved = target.resolve()
    for source in sources:
        if resolved == source.resolve() or resolved in source.resolve().parents:
            why = f"{source} is read from there"
            finding = Finding(f"{target} cannot be written", "export_dir", why, "choose another folder")
            raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if target.is_file():
        finding = Finding(f"{target} is a file", "export_dir", "", "name a folder")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        fix = "choose another folder, or write overwrite_output_dir: true, which deletes what is in it"
        finding = Finding(f"{target} is not empty", "export_dir", "", fix)
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
