"""`megatune shims`: programs called megatron and swift, for command lines that call them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError

_PROGRAMS = ("megatron", "swift")
_OURS = "# Written by `megatune shims`; `megatune shims --remove` takes it away."


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "shims",
        help="write programs called megatron and swift",
        description="Writes two programs, megatron and swift, that call `megatune megatron` and `megatune swift`: "
        "scripts of Megatron-SWIFT then run as they are. Programs of these names that are there are left alone.",
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="where to (beside the Python that runs this)")
    parser.add_argument("--remove", action="store_true", help="take them away again")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write, or remove, the two programs.

    Raises:
        MegatuneError: (CANNOT_WRITE) one of them is another program's, or the folder cannot be written.
    """
    folder = Path(args.folder) if args.folder else Path(sys.executable).parent
    paths = [folder / name for name in _PROGRAMS]
    foreign = [path for path in paths if (path.exists() or path.is_symlink()) and not _is_ours(path)]
    if foreign and not args.remove:
        findings = [
            Finding(
                f"{path} is another program's", why="it is not replaced", fix="name another folder, before it in PATH"
            )
            for path in foreign
        ]
        raise MegatuneError(findings, ExitCode.CANNOT_WRITE)
    try:
        (_remove if args.remove else _write)(paths)
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
