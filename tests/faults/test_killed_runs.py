"""Runs that are killed, stopped, hung or interrupted: what is told, and that the same command ends as if nothing had
happened."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_injector import Fault
from fault_runs import Ended, Job, weights

from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode
from megatune.plan.run.record import read_records
from megatune.training.storage.store import list_checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run that nothing interrupted."""
    job = Job(model, tmp_path_factory.mktemp("whole") / "run")
    ended = job.finish()
    assert ended.code == ExitCode.DONE, ended.stderr
    return weights(job.output_dir)


def resumed(model: Path, folder: Path, after: int, whole: dict[str, bytes]) -> Ended:
    """The same command again: it goes on after that step, and ends with the weights of a run without a fault."""
    job = Job(model, folder)
    ended = job.finish()
    assert ended.code == ExitCode.DONE, ended.stderr
    assert f"resumed after step {after}" in ended.stdout
    assert weights(job.output_dir) == whole
    assert not list(job.output_dir.glob(".checkpoint*"))
    return ended


@pytest.mark.extended
def test_killed_in_a_step(model: Path, whole: dict[str, bytes], tmp_path: Path, told: Callable[..., None]) -> None:
    ended = Job(model, tmp_path / "run", [Fault("signal", "forward", rank=1, step=7)]).finish()
    assert ended.code == ExitCode.PROCESS_DIED
    assert "rank 1 on host" in ended.line
    assert "was killed by SIGKILL at step 7 (train)" in ended.line
    assert "dmesg" in ended.stderr
    assert "start again to resume" in ended.stderr
    assert ended.report["culprit"] == 1
    assert ended.seconds is not None
    assert ended.seconds < 60  # a busy machine is slow to tell
    assert not list((tmp_path / "run/out").glob("model*"))
    resumed(model, tmp_path / "run", 6, whole)
    first, second = read_records(tmp_path / "run/out")
    assert first.outcome != "finished"
    assert first.measured is not None  # noted at its last save, step 6, at the latest
    assert (first.first_step, second.outcome, second.first_step) == (0, "finished", 6)
    told(case="T1", fault="`kill -9` of a rank in a forward pass", got=ended.line, seconds=ended.seconds,
         lost="1 step of work: trained again, to the same weights")  # fmt: skip


@pytest.mark.extended
def test_killed_in_a_step_it_goes_on_by_itself(
    model: Path, whole: dict[str, bytes], tmp_path: Path, told: Callable[..., None]
) -> None:
    job = Job(model, tmp_path / "run", [Fault("signal", "forward", rank=1, step=7)], max_restarts=2)
    ended = job.finish()
    assert ended.code == ExitCode.DONE, ended.stderr
    said = "megatune: restart 1 of 2, from checkpoint-6, in 5 s"
    assert said in ended.stderr
    assert "resumed after step 6" in ended.stdout
    assert weights(job.output_dir) == whole
    (restart,) = ended.report["restarts"]
    assert "was killed by SIGKILL" in restart["cause"]
    told(case="T2", fault="the same with max_restarts: 2", got=said, seconds=restart["ended"] - ended.fired[0]["time"],
         lost="1 step of work: trained again, to the same weights")  # fmt: skip


SAVES = {
    "T3": ("`kill -9` of a rank that has written its first file of a checkpoint", 1, 3,
           Fault("signal", "megatune.bridge.file_stream:SmallFile.write", rank=1, step=6, when="after")),
    "T4": ("`kill -9` of rank 0 when a checkpoint has its name, and nothing else is done", 0, 6,
           Fault("signal", "save.commit", rank=0, step=6, when="after")),
    "T10": ("`kill -9` of rank 0 when all of a checkpoint is written, before it has its name", 0, 3,
            Fault("signal", "save.commit", rank=0, step=6)),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("case", SAVES)
def test_killed_in_a_save(
    case: str, model: Path, whole: dict[str, bytes], tmp_path: Path, told: Callable[..., None]
) -> None:
    fault, rank, newest, put = SAVES[case]
    ended = Job(model, tmp_path / "run", [put]).finish()
    assert ended.code == ExitCode.PROCESS_DIED, ended.stderr
    assert f"rank {rank} on host" in ended.line
    assert "was killed by SIGKILL at step 6 (save)" in ended.line
    there = [path.name for path in list_checkpoints(tmp_path / "run/out")]
    assert there == [f"checkpoint-{step}" for step in (3, 6) if step <= newest]
    resumed(model, tmp_path / "run", newest, whole)
    lost = "nothing" if newest == 6 else "3 steps of work, from the checkpoint before: trained again"
    got = f"{ended.line}; the next start: resumed after step {newest}"
    told(case=case, fault=fault, got=got, seconds=ended.seconds, lost=lost)


@pytest.mark.extended
def test_stopped_it_is_named_as_hung(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    job = Job(model, tmp_path / "run", [Fault("stop", "forward", rank=1, step=5)], ddp_timeout=10)
    ended = job.finish()
    assert ended.code == ExitCode.PROCESS_DIED
    assert "rank 1 on host" in ended.line
    assert "its process is stopped (SIGSTOP, or a debugger)" in ended.stderr
    assert ended.seconds is not None
    assert ended.seconds < 60  # a busy machine is slow to tell
    logs = [(job.output_dir / f"launch/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert "most recent call first" in logs[0]
    told(case="T5", fault="SIGSTOP of a rank, with ddp_timeout: 10", got=f"{ended.line}: its process is stopped",
         seconds=ended.seconds, lost="steps since the last checkpoint")  # fmt: skip


@pytest.mark.extended
def test_a_rank_that_skips_a_collective_ends_the_run(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    put = Fault("skip", "torch.distributed:all_reduce", rank=1, step=5, phase="train")
    ended = Job(model, tmp_path / "run", [put], ddp_timeout=10).finish()
    assert ended.code == ExitCode.PROCESS_DIED, ended.stderr
    assert ended.seconds is not None
    assert ended.seconds < 60  # a busy machine is slow to tell
    # Both ranks are right: what one left out, the other waits in.
    said = re.search(r"(operation \d+ of group \w+ is not the same: [^;\n]*|rank \d has called .*)", ended.stderr)
    assert said, ended.stderr
    assert "all_reduce of [" in said[1]
    told(case="T6", fault="a rank leaves one all-reduce out, with ddp_timeout: 10", got=f"{ended.line}: {said[1]}",
         seconds=ended.seconds, lost="steps since the last checkpoint")  # fmt: skip


def test_ctrl_c_ends_everything_at_once(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    # Long enough that it cannot be done before it is told to end.
    job = Job(model, tmp_path / "run", max_steps=1000, save_strategy="no")
    job.until("step 2/")
    began = time.time()
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    ended = job.finish()
    assert ended.code == ExitCode.INTERRUPTED
    assert ended.stderr == "megatune: interrupted\n"
    assert re.search("^interrupted: after step", ended.stdout, re.MULTILINE)
    assert "failed" not in ended.stdout
    told(case="T30", fault="Ctrl-C", got=ended.line, seconds=ended.report["ended"] - began,
         lost="steps since the last checkpoint, as asked")  # fmt: skip


@pytest.mark.extended
def test_a_stop_of_one_rank_and_of_the_launcher_is_agreed(
    model: Path, whole: dict[str, bytes], tmp_path: Path, told: Callable[..., None]
) -> None:
    """SIGTERM to rank 1 alone, then to the launcher, then to the end."""
    job = Job(model, tmp_path / "run", [Fault("signal", "forward", rank=1, step=4, value="SIGTERM")])
    ended = job.finish()
    assert ended.code == ExitCode.STOPPED, ended.stderr
    said = "stopped on request: checkpoint-5 is kept; the same command resumes from there"
    assert said in ended.stdout
    assert ended.report["outcome"] == "stopped"
    told(case="T26", fault="SIGTERM to one rank", got=said, seconds=ended.seconds)
    # So slow that it cannot be done before it is told to end.
    job = Job(model, tmp_path / "run", [Fault("slow", "forward", value=0.5, times=100)])
    job.until("step 6/")
    began = time.time()
    job.process.terminate()
    ended = job.finish()
    assert ended.code == ExitCode.STOPPED, ended.stderr
    seconds = ended.report["ended"] - began
    line = next(line for line in ended.stdout.splitlines() if line.startswith("stopped on request: checkpoint-"))
    step = int(line.partition("checkpoint-")[2].partition(" ")[0])
    resumed(model, tmp_path / "run", step, whole)
    told(case="T25", fault="SIGTERM to the launcher", got=line, seconds=seconds)


@pytest.mark.extended
def test_an_error_of_a_rank_is_told_once(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    put = Fault("exception", "forward", rank=1, step=5, value="no gradient for layer 3")
    job = Job(model, tmp_path / "run", [put])
    _, stderr = job.process.communicate(timeout=240)
    assert job.process.returncode == ExitCode.INTERNAL
    assert stderr.count("Traceback") <= 1
    line = next(line for line in stderr.splitlines() if line.startswith("megatune:"))
    assert "rank 1 on host" in line
    assert "at step 5 (train): fault_injector.InjectedError: no gradient for layer 3" in line
    assert not job.members()
    told(case="T7", fault="an exception in a rank's forward pass", got=line, lost="steps since the last checkpoint")


@pytest.mark.extended
def test_two_runs_do_not_share_a_folder(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    job = Job(model, tmp_path / "run", max_steps=5000, save_strategy="no")
    job.until("step 1/")
    began = time.monotonic()
    second = Job(model, tmp_path / "run").finish()
    seconds = time.monotonic() - began
    assert second.code == ExitCode.CANNOT_WRITE
    assert f"is being written to by another run: process {job.process.pid} on host" in second.line
    job.process.terminate()
    assert job.finish().code == ExitCode.STOPPED
    told(case="T22", fault="a second run with the same output_dir", got=second.line, seconds=seconds)


@pytest.mark.extended
def test_a_disk_that_fills_up_in_a_save(
    model: Path, whole: dict[str, bytes], tmp_path: Path, told: Callable[..., None]
) -> None:
    put = Fault("disk full", "save.write", rank=0, step=6, value=100_000)
    ended = Job(model, tmp_path / "run", [put]).finish()
    assert ended.code == ExitCode.CANNOT_WRITE, ended.stderr
    assert "no room to write" in ended.line
    assert ".checkpoint-6.partial: needs " in ended.line
    assert "free there" in ended.line
    assert [path.name for path in list_checkpoints(tmp_path / "run/out")] == ["checkpoint-3"]
    resumed(model, tmp_path / "run", 3, whole)
    told(case="T16", fault="the disk is full in the middle of a save", got=ended.line, seconds=ended.seconds,
         lost="3 steps of work, from the checkpoint before: trained again")  # fmt: skip


@pytest.mark.extended
def test_a_run_goes_back_by_itself(model: Path, tmp_path: Path, told: Callable[..., None]) -> None:
    put = Fault("nan", "megatune.engine.step:_compute", rank=1, step=8, once=False)
    ended = Job(model, tmp_path / "run", [put], on_bad_step="go_back").finish()
    assert ended.code == ExitCode.DONE, ended.stderr
    assert re.search(r"step 8: loss [\d.]+, gradient norm nan", ended.line)  # rank 0 has the loss
    assert "the step's rows are row " in ended.stderr
    assert "megatune: goes back to checkpoint-6" in ended.stderr
    assert "step 7: left out" in ended.stdout
    assert "step 8: left out" in ended.stdout
    (restart,) = ended.report["restarts"]
    assert (restart["from"], restart["exit_code"]) == ("checkpoint-6", ExitCode.NOT_FINITE)
    told(case="T46", fault="NaN in a rank's forward pass, with on_bad_step: go_back", got=ended.line,
         seconds=restart["ended"] - ended.fired[0]["time"], lost="the rows of two steps")  # fmt: skip
