"""The fixture with which a test of the fault suite says what a user got, and the page that is written from it.

MEGATUNE_WRITE_FAULTS=1 make test-faults writes docs/faults.md, where every test passed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Helpers of other tests, and the injector, which processes of a run find on their PYTHONPATH.
sys.path[:0] = [str(HERE / "inject"), *(str(HERE.parent / kit) for kit in ("training", "launch", "data", "bridge"))]

from fault_table import PAGE, Told, render  # noqa: E402
from launch_run import launch as launch  # noqa: E402

_PROPERTY = "fault"


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[..., None]:
    """told(case="T13", fault="a byte of a shard is flipped", got="a line of the real output", seconds=0.4,
    lost="nothing"): a row of docs/faults.md, called at the end of a test. `seconds` until it was noticed, as measured;
    None where there is nothing to measure."""

    def note(*, case: str, fault: str, got: str, seconds: float | None = None, lost: str = "nothing") -> None:
        file = request.node.path.relative_to(HERE.parents[1]).as_posix()
        row = Told(case, fault, got, seconds, lost, file, request.node.originalname)
        request.node.user_properties.append((_PROPERTY, row.as_list()))

    return note


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and os.environ.get("MEGATUNE_WRITE_FAULTS") == "1":
        config.pluginmanager.register(_Page(), "page of faults")


class _Page:
    """Collects the rows of all tests that passed, and writes the page."""

    def __init__(self) -> None:
        self._rows: list[Told] = []
        self._note = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._rows += [Told(*row) for name, row in report.user_properties if name == _PROPERTY]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self._rows:
            PAGE.write_text(render(self._rows), encoding="utf-8")
            self._note = f"wrote {len(self._rows)} rows into {PAGE.relative_to(HERE.parents[1])}"
        else:
            self._note = f"{PAGE.name} is as it was: not every test passed"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self._note)
