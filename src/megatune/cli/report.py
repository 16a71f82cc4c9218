"""`megatune report`: writes an HTML file that shows one run, or compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from megatune.cli.command import Command
from megatune.config.options import Flag
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding


class ReportOptions(Group):
    """The options of `megatune report`."""

    output: Annotated[str, Flag("FILE.html")] = "report.html"
    """the file to write; -o is short for it (report.html)"""


COMMAND = Command(
    name="report",
    usage="RUN ... [-o FILE.html]",
    about="Writes one HTML file about runs, given by their output_dir: curves, settings and their differences, plan "
    "and measurements, checkpoints, the ends of logs, samples. It needs no server and no network.",
    options=ReportOptions,
    most_words=None,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Write the report.

    Raises:
        MegatuneError: SETTINGS, INPUT or CANNOT_WRITE.
    """
    given = COMMAND.read(["--output" if word == "-o" else word for word in words])
    if not given.words:
        given.findings.append(Finding("no run is given", COMMAND.program, fix=f"{COMMAND.program} {COMMAND.usage}"))
    path = Path(given.options.output)
    if path.suffix.lower() not in (".html", ".htm"):
        given.findings.append(Finding(f"{path} is not an HTML file", "--output", fix="-o report.html"))
    given.stop()

    from megatune.ui.page import write_report

    write_report(given.words, path)
    print(f"report: {path}")
    return ExitCode.DONE
