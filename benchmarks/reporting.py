"""What the benchmarks share: a table on the terminal, and a dated file with all it takes to read the figures later."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "megatron-core", "transformers")


def add_output_flag(parser: argparse.ArgumentParser) -> None:
    """Declares --output."""
    parser.add_argument(
        "--output", action="store_true", help="also write the table to benchmarks/results/YYYY-MM-DD-NAME.md"
    )


def finish(
    name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str, output: bool
) -> None:
    """Print the table and, with `output`, write it: see `finish_text`.

    Args:
        note: what was measured, and how to read it.
    """
    finish_text(name, title, f"{markdown_table(header, rows)}\n\n{note}", output)


def finish_text(name: str, title: str, text: str, output: bool, packages: Sequence[str] = ()) -> None:
    """Print the text and, with `output`, write it with the machine, the versions, the command and the commit.

    Args:
        name: of the file, without date and suffix.
        text: Markdown.
        packages: further ones whose versions matter, whether or not they are installed.
    """
    print(text)
    if not output:
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.md"
    # Files elsewhere on this machine by their names only: their places say nothing to a reader.
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    path.write_text(
        f"# {title}\n\n{text}\n\n- command: `{command}`\n- commit: {commit()}\n- machine: {machine()}\n"
        f"- versions: Python {platform.python_version()}, "
        + ", ".join(f"{package} {_version(package)}" for package in (*_PACKAGES, *packages))
        + "\n",
        encoding="utf-8",
    )
    print(f"\nwritten to {os.path.relpath(path)}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as text, too: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [[line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
             for line in (header, rule, *rows)]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def machine() -> str:
    """The hardware, without its name."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, {platform.system()}"
    return "; ".join((cpu, *(f"{name}, {size / 2**30:.0f} GiB" for name, size in gpus())))


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU, asked of the driver without touching one."""
    words = "nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"
    rows = (line.rpartition(", ") for line in _output(*words).splitlines())
    return [(name, int(mebibytes) * 2**20) for name, _, mebibytes in rows if mebibytes.isdigit()]


def commit() -> str:
    """The commit measured, and whether files differ from it."""
    git = "git", "-C", str(Path(__file__).parent)
    changed = _output(*git, "status", "--porcelain", "--", "../src")
    return (_output(*git, "rev-parse", "--short", "HEAD") or "unknown") + (", with changes to src/" if changed else "")


def _output(*words: str) -> str:
    """What a program prints; nothing where there is no such program."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
