"""Rehearses a run and prints the table of its stages."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from megatune.config.load import Loaded
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.machine import Machine
from megatune.progress import say
from megatune.rehearse.outcome import as_json, exit_code, table
from megatune.rehearse.ranks import Interrupted
from megatune.rehearse.run import Rehearsal


def rehearse(loaded: Loaded, gpus: int, machine: Machine | None, *, keep: str | None, report: str | None) -> int:
    """Rehearse settings that are read, and print what came of it.

    Args:
        gpus: of the real run.
        keep: a folder that is not there yet.
        report: a file for JSON.

    Returns:
        The exit code of the first failure, DONE where there is none.
    """
    folder = _folder(keep)
    try:
        rehearsal = Rehearsal(loaded.for_world(gpus), gpus, machine, folder, say)
        try:
            rehearsal.run()
        except Interrupted as ended:
            print("interrupted", file=sys.stderr)
            return int(ended.args[0])
        if rehearsal.changes:
            print("\nchanged for the rehearsal")
            print("\n".join(f"  {change.line()}" for change in rehearsal.changes))
        print("\n" + "\n".join(table(rehearsal.outcomes)), flush=True)
        if keep is not None:
            print(f"everything is in {folder}")
        if report is not None:
            _write(Path(report), as_json(rehearsal.outcomes, rehearsal.changes))
        return int(exit_code(rehearsal.outcomes))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(keep: str | None) -> Path:
    """Make the folder that everything is written into: private, unless the user names one."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="megatune-rehearse-"))
    folder = Path(keep).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise _cannot_write(folder, "the folder is not empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error.strerror or str(error)) from None
    return folder


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from None


def _cannot_write(path: Path, why: str) -> MegatuneError:
    return MegatuneError(Finding(f"cannot write {path}", "", why, "name another one"), ExitCode.CANNOT_WRITE)
