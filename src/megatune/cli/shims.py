"""`megatune shims`: writes programs named megatron and swift, which call `megatune megatron` and `megatune swift`."""

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
_MARKER = "# Written by `megatune shims`; `megatune shims --remove` removes it."


class ShimOptions(Group):
    """The options of `megatune shims`."""

    remove: bool = False
    """remove the programs"""


COMMAND = Command(
    name="shims",
    usage="[DIR] [--remove]",
    about="Writes two programs, megatron and swift, that call `megatune megatron` and `megatune swift`, so that "
    "scripts for Megatron-SWIFT run unchanged. DIR is the folder to write to, by default that of this Python. Other "
    "programs with these names are never replaced.",
    options=ShimOptions,
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Write, or remove, the two programs.

    Raises:
        MegatuneError: (CANNOT_WRITE) a file belongs to another program, or the folder cannot be written.
    """
    given = COMMAND.read(words)
    given.stop()
    remove, folder = given.options.remove, Path(given.words[0]) if given.words else Path(sys.executable).parent
    paths = [folder / name for name in _PROGRAMS]
    foreign = [path for path in paths if (path.exists() or path.is_symlink()) and not _is_ours(path)]
    if foreign and not remove:
        findings = [
            Finding(f"{path} is another program", why="it is not replaced", fix="name another folder, earlier in PATH")
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
        return _MARKER.encode() in path.read_bytes()[:500]
    except OSError:
        return False


def _write(paths: list[Path]) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        call = f'exec {shlex.quote(sys.executable)} -m megatune {path.name} "$@"'
        path.write_text(f"#!/bin/sh\n{_MARKER}\n{call}\n", encoding="utf-8")
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
            print(f"{path}: {'another program, not removed' if path.exists() else 'does not exist'}")
