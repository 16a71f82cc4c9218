"""What counts as a cause, and what as its consequence; the marks a rank leaves of its life."""

from __future__ import annotations

import errno
import json
import signal
import time

import pytest
import torch

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext, heartbeat_path, log_path, read_beat
from megatune.launch.failure import (
    Kind,
    describe_failure,
    operations_path,
    read_failure,
    waits_on_device,
    write_failure,
)
from megatune.launch.processes import RankState
from megatune.launch.report import RankActivity, ended_by_watchdog, find_hung, first_cause, hang_reason, raised_outcome
from megatune.launch.world import RankEnv


class DistBackendError(RuntimeError):
    """Named as torch's, which this test need not import."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (ValueError("x"), Kind.ERROR, 70),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Kind.ERROR, 70),
        (ConnectionResetError("Connection reset by peer"), Kind.ERROR, 70),  # a download's, not a collective's
        (RuntimeError("[pair.cc:538] Connection closed by peer [10.0.0.1]:1"), Kind.COLLECTIVE, 76),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), Kind.COLLECTIVE, 76),
        (DistBackendError("NCCL error: remote process exited"), Kind.COLLECTIVE, 76),
        (caused_by(RuntimeError("step failed"), DistBackendError("NCCL")), Kind.COLLECTIVE, 76),
        (DistBackendError("ncclUnhandledCudaError: CUDA error: out of memory"), Kind.ERROR, 71),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Kind.ERROR, 71),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Kind.ERROR, 71),
        (MemoryError(), Kind.ERROR, 71),
        (RuntimeError("can't start new thread"), Kind.ERROR, 71),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.ERROR, 73),
        (MegatuneError("no peer", ExitCode.UNAVAILABLE), Kind.UNAVAILABLE, 69),
        (MegatuneError("loss is nan", ExitCode.NOT_FINITE), Kind.ERROR, 77),
        (SystemExit(3), Kind.ERROR, 3),
    ],
)
def test_weight_and_exit_code_of_an_exception(error, kind, exit_code):
    failure = describe_failure(error)
    assert (failure.kind, failure.exit_code) == (kind, exit_code)


def test_an_operator_without_a_deterministic_kernel_is_a_matter_of_settings(tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    except RuntimeError as error:
        failure = describe_failure(error)
    finally:
        torch.use_deterministic_algorithms(False)
    outcome = raised_outcome(tmp_path, failure, 0)
    assert outcome.exit_code == ExitCode.SETTINGS
    assert "put_" in outcome.findings[0].what
    assert outcome.findings[0].fix.startswith("write deterministic_mode: false")


def test_a_failure_survives_its_file(tmp_path):
    error = MegatuneError([Finding("a", "b", "c", "d"), Finding("e")], ExitCode.DATA)
    failure = describe_failure(error)
    write_failure(tmp_path / "error.json", failure)
    assert read_failure(tmp_path / "error.json") == failure
    assert read_failure(tmp_path / "none.json") is None


def ended(rank: int, moment: float, exit_code: int | None = None, signum: int | None = None) -> RankState:
    return RankState(rank, pid=rank, progressed=0.0, exit_code=exit_code, signal=signum, ended=moment)


@pytest.mark.parametrize(
    ("states", "culprit"),
    [
        ([ended(0, 5.0, 1), ended(1, 4.0, 1)], 1),  # the earlier one
        ([ended(0, 4.0, None, signal.SIGABRT), ended(1, 5.0, None, signal.SIGKILL)], 1),  # an abort follows a death
        ([ended(0, 4.0, 1), ended(1, 5.0, None, signal.SIGABRT)], 0),
    ],
)
def test_first_cause(states, culprit, tmp_path):
    assert first_cause(tmp_path, states)[0].rank == culprit


def test_the_hung_rank_is_the_one_outside_of_a_collective_or_behind():
    waits = RankActivity("S", ("wait (/x/torch/distributed/distributed_c10d.py:1)",))
    works = RankActivity("R", ("read (/x/user.py:1)",))
    silent, stopped = RankActivity("D", ()), RankActivity("T", ())
    ranks = [ended(0, 0.0), ended(1, 0.0), ended(2, 0.0)]
    for rank, (moment, step) in enumerate([(3.0, 6), (1.0, 7), (2.0, 7)]):
        ranks[rank].beat = beat(moment, step)
    for activities, culprit in (
        ((waits, waits, waits), 0),  # the lowest step
        ((waits, waits, works), 2),
        ((works, silent, works), 1),
        ((silent, works, stopped), 2),
    ):
        assert find_hung(ranks, dict(enumerate(activities))).rank == culprit


def test_a_rank_whose_device_waits_is_not_the_hung_one(tmp_path):
    """Under NCCL the host waits where it reads a number: its stack has nothing of torch.distributed."""
    reads = ("_values (/x/megatune/engine/step.py:9)", "loss (/x/megatune/engine/step.py:5)")
    path = operations_path(tmp_path, 0)
    path.parent.mkdir()
    waiting = {"group": "0", "kind": "default_pg", "ranks": [0, 1], "operations": [[3, "all_reduce", [[8]], True]]}
    for on_device, culprit in ((True, 1), (False, 0)):
        path.write_text(json.dumps([waiting | {"on_device": on_device}]))
        activities = {
            0: RankActivity("S", reads, waits_on_device(tmp_path, 0)),
            1: RankActivity("S", ("sleep (/x/user.py:1)",)),
        }
        ranks = [ended(0, 0.0), ended(1, 0.0)]
        ranks[0].beat, ranks[1].beat = beat(1.0, 7), beat(2.0, 7)
        assert find_hung(ranks, activities).rank == culprit
        if on_device:
            assert "the other ranks wait for it in a collective operation" in hang_reason(ranks[1], activities)
    assert not waits_on_device(tmp_path, 1)


def test_an_abort_by_the_watchdog_is_told_from_other_aborts(tmp_path):
    log = log_path(tmp_path, "rank-0")
    log.parent.mkdir()
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    aborted = ended(0, 1.0, None, signal.SIGABRT)
    assert not ended_by_watchdog(tmp_path, aborted)
    log.write_text(
        "[rank0]:[E] [PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=60000) ran for 60042 milliseconds\n"
    )
    assert ended_by_watchdog(tmp_path, aborted)
    assert not ended_by_watchdog(tmp_path, ended(0, 1.0, 1))


def beat(moment: float, step: int):
    from megatune.launch.context import Beat

    return Beat(count=1, time=moment, phase="forward", step=step, limit=None)


@pytest.fixture
def context(tmp_path):
    return RankContext(RankEnv(1, 1, 2, 2, "127.0.0.1", 1, 0), tmp_path)


def test_a_beat_is_read_back(context, tmp_path):
    path = heartbeat_path(tmp_path, 1)
    assert read_beat(path) is None
    context.beat("forward", 7)
    context.beat("save", 8, limit=60.0)
    found = read_beat(path)
    assert (found.count, found.phase, found.step, found.limit) == (2, "save", 8, 60.0)
    assert abs(found.time - time.time()) < 60
    assert (context.phase, context.step) == ("save", 8)


def test_a_beat_costs_microseconds(context):
    best = min(_seconds_of_beats(context) for _ in range(5))
    assert best / 1000 < 20e-6


def _seconds_of_beats(context: RankContext) -> float:
    begun = time.perf_counter()
    for step in range(1000):
        context.beat("forward", step)
    return time.perf_counter() - begun


def test_stop_is_requested_by_a_signal_or_by_a_file(context, tmp_path):
    assert not context.stop_requested()
    context.request_stop()
    assert context.stop_requested()
    other = RankContext(RankEnv(0, 0, 2, 2, "127.0.0.1", 1, 0), tmp_path)
    (tmp_path / "STOP").touch()
    assert other.stop_requested()
