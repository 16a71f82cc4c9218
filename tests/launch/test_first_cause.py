"""Whatever goes wrong, the right rank is named, once, with the right exit code, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from launch_run import LIMIT
from torch.distributed import c10d_logger

from megatune.engine import collectives
from megatune.errors import ExitCode
from megatune.launch import devices, report


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(launch, rank):
    run = launch("die", payload={"rank": rank, "signal": signal.SIGKILL})
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert f"rank {rank} on host" in stderr
    assert "was killed by SIGKILL at step 7 (forward)" in stderr
    assert "out-of-memory killer" in stderr
    assert run.report()["culprit"] == rank


@pytest.fixture
def small_group(tmp_path):
    """A memory group of the kernel with a limit of 300 MB; where none can be made, a folder with the kernel's counter,
    which the rank that dies counts up itself."""
    limit = 300_000_000
    for mount, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        if not Path("/sys/fs/cgroup", mount, "cgroup.procs").exists():
            continue
        group = Path("/sys/fs/cgroup", mount, f"megatune-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        yield {"group": str(group), "limit": limit}
        group.rmdir()
        return
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    yield {"counters": str(tmp_path)}


def test_a_rank_that_the_kernel_kills_for_memory_is_out_of_memory(launch, small_group):
    run = launch("outgrow", payload=small_group)
    code, _, stderr = run.finish()
    assert code == ExitCode.OUT_OF_MEMORY
    assert "rank 1 on host" in stderr
    assert "was killed by SIGKILL at step 7 (forward)" in stderr
    assert "out of main memory" in stderr
    assert "per_device_train_batch_size" in stderr


def test_kills_are_counted_where_the_kernel_does(tmp_path, monkeypatch):
    groups = tmp_path / "cgroup"
    for folder, name in (("", "memory.events"), ("job", "memory.events"), ("memory", "memory.oom_control")):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / name).write_text("oom 5\noom_kill 0\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n0::/job\n")
    (tmp_path / "proc/vmstat").write_text("pgfault 7\noom_kill 0\n")
    monkeypatch.setattr(devices, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(devices, "_CGROUPS", groups)
    files = [groups / "job/memory.events", groups / "memory/memory.oom_control", tmp_path / "proc/vmstat"]
    for number, file in enumerate(files):
        assert devices.count_oom_kills() == number
        file.write_text("oom_kill 1\n")
    files[0].unlink()
    assert devices.count_oom_kills() == 2


def test_what_rank_0_raises_for_all_is_told_once_as_its_own(launch):
    run = launch("launch_relay:fail_for_all", nproc=3)
    code, _, stderr = run.finish(limit=4 * LIMIT)  # it imports the engine
    assert code == ExitCode.INTERNAL
    assert "rank 0 on host" in stderr
    assert "ValueError: rank 0 read nonsense" in stderr
    assert stderr.count("Traceback") == 1
    assert run.report()["culprit"] == 0
    assert [rank["exit_code"] for rank in run.report()["ranks"]] == [ExitCode.INTERNAL] * 3


def test_a_rank_that_vanishes_is_named(launch):
    code, _, stderr = launch("vanish").finish()
    assert code == ExitCode.PROCESS_DIED
    assert "rank 1" in stderr
    assert "exit code 9" in stderr


def test_the_raising_rank_is_named_and_not_the_one_that_lost_it(launch):
    run = launch("fail")
    code, _, stderr = run.finish()
    assert code == ExitCode.INTERNAL
    assert stderr.count("Traceback") == 1
    assert stderr.count("no gradient for layer 3") == 2  # the source line, and the message
    assert "rank 1 on host" in stderr
    assert "at step 7 (backward): ValueError: no gradient for layer 3" in stderr
    assert "rank 0" not in stderr
    assert "ValueError: no gradient" in (run.run_dir / "logs" / "rank-1.log").read_text()
    assert run.report()["culprit"] == 1


def test_findings_of_all_ranks_are_told_once_without_a_traceback(launch):
    code, _, stderr = launch("fail_user", nproc=3).finish()
    assert code == ExitCode.DATA
    assert stderr == "megatune: data.json: no row is left\n    fix: raise cutoff_len\n"


def test_out_of_memory_has_its_exit_code(launch):
    code, _, stderr = launch("fail_memory").finish()
    assert code == ExitCode.OUT_OF_MEMORY
    assert "rank 1" in stderr
    assert "per_device_train_batch_size" in stderr


def test_a_full_disk_has_its_exit_code_though_it_hides_the_report(launch):
    code, _, stderr = launch("fail_disk").finish()
    assert code == ExitCode.CANNOT_WRITE
    assert "rank 1" in stderr
    assert "could not write" in stderr


def test_a_target_that_cannot_be_imported(launch):
    run = launch("launch_no_such_module:run")
    code, _, stderr = run.finish()
    assert code == ExitCode.INTERNAL
    assert "before any rank was started: ModuleNotFoundError: No module named 'launch_no_such_module'" in stderr
    assert "Traceback" in (run.run_dir / "logs" / "start.log").read_text()


def test_a_crash_while_importing_the_target(launch):
    run = launch("launch_crash:run")
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert "starts the ranks was killed by SIGSEGV" in stderr
    assert "launch_crash.py" in (run.run_dir / "logs" / "start.log").read_text()


def test_an_import_that_takes_too_long(launch):
    run = launch("launch_slow:run", start_timeout=1.0)
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert "launch_slow was not imported within 1 s" in stderr
    assert "launch_slow.py" in (run.run_dir / "logs" / "start.log").read_text()


def test_a_death_of_the_fork_server_is_reported(launch):
    run = launch("run_on")
    run.wait_for_step(0, 1)
    fork_server = psutil.Process(run.rank_pids()[0]).parent()
    os.kill(fork_server.pid, signal.SIGKILL)
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert "starts the ranks was killed by SIGKILL" in stderr


def test_a_death_is_noticed_while_the_fork_server_is_stopped(launch):
    run = launch("run_on")
    run.wait_for_step(0, 1)
    victim = run.rank_pids()[1]
    os.kill(psutil.Process(victim).ppid(), signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert "the process that watches the ranks was stopped, and is continued" in stderr
    assert "rank 1 on host" in stderr


@pytest.mark.parametrize(("stopped", "why"), [(True, "its process is stopped"), (False, "it is in stuck_in_user_code")])
def test_a_hung_rank_is_named(launch, stopped, why):
    run = launch("hang", payload={"stopped": stopped}, hang_timeout=1.0)
    begun = time.monotonic()
    code, _, stderr = run.finish()
    assert time.monotonic() - begun < 10
    assert code == ExitCode.PROCESS_DIED
    assert "rank 1 on host" in stderr
    assert "hung at step 7 (forward)" in stderr
    assert why in stderr
    assert "in linger" in (run.run_dir / "logs" / "rank-0.log").read_text()
    assert run.report()["outcome"] == "hung"


def test_a_phase_states_its_own_limit(launch):
    code, _, stderr = launch("hang", payload={"stopped": False, "limit": 0.5}, hang_timeout=LIMIT).finish()
    assert code == ExitCode.PROCESS_DIED
    assert "rank 1" in stderr


def test_the_rank_waited_for_is_named_and_not_the_one_that_timed_out(launch):
    code, _, stderr = launch("wait_in_vain").finish()
    assert code == ExitCode.PROCESS_DIED
    assert "rank 1" in stderr
    assert "rank 0" not in stderr


@pytest.mark.extended("raise")  # what a rank raises is told the same in test_the_raising_rank_is_named
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("kill", ExitCode.PROCESS_DIED, "was killed by SIGKILL at step 3"),
        ("raise", ExitCode.INTERNAL, "ValueError: rank 1 had a reason"),
        ("hang", ExitCode.PROCESS_DIED, "the other ranks wait for it in a collective operation"),
    ],
)
def test_a_real_all_reduce_that_breaks_off(launch, how, code, text):
    run = launch("launch_collective:break_off", payload={"how": how}, hang_timeout=1.0)
    ended, _, stderr = run.finish()
    assert ended == code
    assert "rank 1 on host" in stderr
    assert text in stderr


def test_what_wraps_collectives_is_left_out_of_where_a_rank_hangs():
    for module in (collectives, c10d_logger, contextlib):
        assert report._WRAPPERS.search(f"all_reduce ({module.__file__}:12)")
