"""Bars on a terminal, lines elsewhere, and nothing where --quiet asks for it."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from megatune.progress import QUIET_VARIABLE, Bars, Progress


def terminal() -> tuple[io.StringIO, Bars]:
    output = io.StringIO()
    return output, Bars(Console(file=output, force_terminal=True, width=100))


def test_one_live_set_of_bars() -> None:
    output, bars = terminal()
    with Progress("training", 12, "steps", done=4, bars=bars) as training:
        training.to(8, "loss 2.5000")
        with Progress("saving", 2_000_000, bars=bars) as saving:
            saving.add(1_500_000)
        assert bars.print("a line above them")
    text = output.getvalue()
    assert "8 of 12 steps  loss 2.5000" in text
    assert "1.5 MB of 2.0 MB" in text
    assert "a line above them" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    assert not bars.print("nothing is left")


def test_lines_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megatune.progress.time.monotonic", lambda: now[0])
    with Progress("preparing", None, "rows", name="my") as progress:
        for _ in range(1000):
            now[0] += 1 / 32
            progress.add(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"preparing  {done} rows of my, 32 rows/s" for done in (321, 642, 963)]
    with Progress("training", 1000, "steps", lines=False) as progress:  # which has lines of its own
        now[0] += 60
        progress.add(1)
    assert capsys.readouterr().err == ""


def test_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUIET_VARIABLE, "1")
    output, bars = terminal()
    with Progress("saving", 10, bars=bars) as progress:
        progress._next_line = 0.0
        progress.add(5)
    assert (output.getvalue(), capsys.readouterr().err) == ("", "")


def test_color_and_width_of_a_terminal() -> None:
    """NO_COLOR and COLUMNS, on a real one; a process that is forked meanwhile prints."""
    ours, theirs = pty.openpty()
    program = """
import os, time
from megatune.progress import Progress
with Progress("loading", 100, "tensors") as progress:
    time.sleep(0.2)
    progress.add(40)
    if os.fork() == 0:
        print("from a child", flush=True)
        os._exit(0)
    os.wait()
"""
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "60"}
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, timeout=60
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the terminal's end
        pass
    os.close(ours)
    assert done.returncode == 0, shown
    assert b"40 of 100 tensors" in shown
    assert b"from a child" in shown
    assert b"\x1b[3" not in shown  # no color
    bar = next(line for line in shown.decode().splitlines() if "40 of 100 tensors" in line)
    assert len(bar.split("loading")[-1].split("\x1b")[0]) <= 60
