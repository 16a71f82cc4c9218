"""`megatune shims`: programs called megatron and swift, for command lines that call them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatune.cli.command import Command
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding, MegatuneError

_PROGRAMS = ("megatron", "swift")
_OURS = "# Written by `megatune shims`; `megatune shims --remove` takes it away."


class ShimOptions(Group):
    """The options of `megatune shims`."""

    remove: bool = False
    """remove the programs again"""


COMMAND = Command(
    name="shims",
    usage="[DIR] [--remove]",
    about="Writes two programs, megatron and swift, that call `megatune megatron` and `megatune swift`: scripts of "
    "Megatron-SWIFT then run as they are. DIR is the folder to write them to, by default that of the Python that runs "
    "this. Other programs of these names are left alone.",
    options=ShimOptions,
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Write, or remove, the two programs.

    Raises:
        MegatuneError: (CANNOT_WRITE) one of them is another program's, or the folder cannot be written.
    """
    given = COMMAND.read(words)
    given.stop()
    remove, folder = given.options.remove, Path(given.words[0]) if given.words else Path(sys.executable).parent
    paths = [folder / name for name in _PROGRAMS]
    foreign = [path for path in paths if (path.exists() or path.is_symlink()) and not _is_ours(path)]
    if foreign and not remove:
        findings = [
            Finding(
                f"{path} is another program's", why="it is not replaced", fix="name another folder, before it in PATH"
            )
            for path in foreign
        ]
        raise MegatuneError(findings, ExitCode.CANNOT_WRITE)
    try:
        (_remove if remove else _write)(paths)
    except OSError as error:
        finding = Finding(f"cannot write {error.filename}", why=error.strerror or "", fix="name another folder")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from None
    return ExitCode.DONE


def _is_ours(path: Path) -> bool:
    try:
        return _OURS.encode() in path.read_bytes()[:500]
    except OSError:
        return False


def _write(paths: list[Path]) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        call = f'exec {shlex.quote(sys.executable)} -m megatune {path.name} "$@"'
        path.write_text(f"#!/bin/sh\n{_OURS}\n{call}\n", encoding="utf-8")
        path.chmod(0o755)
        print(f"{path}: calls `megatune {path.name}`")
    if str(paths[0].parent.resolve()) not in map(os.path.realpath, os.environ.get("PATH", "").split(os.pathsep)):
        print(f"{paths[0].parent} is not in PATH: export PATH={shlex.quote(str(paths[0].parent.resolve()))}:$PATH")


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if _is_ours(path):
            path.unlink()
            print(f"{path}: removed")
        else:
            print(f"{path}: {'another program, left alone' if path.exists() else 'not there'}")
