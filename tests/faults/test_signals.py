"""Signals to a run that has no work to lose: what the launcher does with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from launch_run import Run, wait_until

from megatune.errors import ExitCode


def test_a_save_that_takes_longer_than_the_grace_is_waited_for(
    launch: Callable[..., Run], told: Callable[..., None]
) -> None:
    run = launch("save_slowly", payload={"seconds": 2.5}, grace=1.0)
    run.wait_for_step(0, 1)
    began = time.monotonic()
    run.process.terminate()
    code, _, stderr = run.finish()
    assert time.monotonic() - began >= 2.5
    assert (code, stderr) == (ExitCode.STOPPED, "")
    assert [(run.run_dir / f"saved-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert run.report()["outcome"] == "stopped"
    fault = "SIGTERM, and a save that takes longer than the launcher waits for a step"
    told(case="T28", fault=fault, got=f"exit code {code}, with its checkpoint: a save has a limit of its own")


def test_stacks_are_written_on_request_and_the_run_goes_on(
    launch: Callable[..., Run], told: Callable[..., None]
) -> None:
    run = launch("run_on")
    run.wait_for_step(0, 1)
    logs = [run.run_dir / f"logs/rank-{rank}.log" for rank in (0, 1)]
    began = time.monotonic()
    run.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: all("in linger" in log.read_text() for log in logs))
    seconds = time.monotonic() - began
    run.process.send_signal(signal.SIGUSR1)  # counts neither as a stop nor towards one
    run.process.terminate()
    code, _, stderr = run.finish()
    assert code == ExitCode.STOPPED
    lines = stderr.splitlines()
    assert lines[0] == f"megatune: the stacks of all ranks are in {run.run_dir}/logs/rank-*.log; the run continues"
    assert set(lines) == {lines[0]}
    told(case="T31", fault="SIGUSR1 to the launcher", got=lines[0], seconds=seconds)
