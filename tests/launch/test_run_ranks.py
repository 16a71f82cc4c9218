"""Ranks that end well: what they print where, what they are given, how they stop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import psutil
import pytest
from launch_run import HERE, LIMIT, is_running, wait_until
from launch_targets import PATIENCE

from megatune.errors import ExitCode
from megatune.launch import supervisor
from megatune.launch.context import heartbeat_path, read_beat
from megatune.launch.rank_main import load_target


def test_output_of_rank_0_reaches_the_terminal_and_that_of_others_their_logs(launch):
    run = launch("finish", payload={"word": "hello"})
    code, stdout, stderr = run.finish()
    assert code == ExitCode.DONE
    assert stdout.splitlines()[0] == "rank 0 of 2 says hello"
    assert "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1" in stdout
    assert stderr == "rank 0 warns\n"
    log = (run.run_dir / "logs" / "rank-1.log").read_text()
    assert "rank 1 of 2 says hello\nrank 1 warns\nRANK=1 LOCAL_RANK=1" in log
    report = run.report()
    assert (report["outcome"], report["exit_code"], report["start_method"]) == ("done", 0, "fork")
    assert [rank["last_beat"]["phase"] for rank in report["ranks"]] == ["exit", "exit"]


def test_libraries_that_few_ranks_use_are_not_imported_with_a_target(monkeypatch, tmp_path):
    for name in ("bitsandbytes", "peft", "scipy", "sklearn"):  # which libraries import where they are installed
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "looks.py").write_text(
        "from importlib.util import find_spec\n"
        "FOUND = [name for name in ('bitsandbytes', 'peft', 'scipy', 'sklearn', 'torch') if find_spec(name)]\n"
        "def found(): return FOUND"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_target("looks:found")() == ["torch"]
    assert find_spec("bitsandbytes").origin == str(tmp_path / "bitsandbytes" / "__init__.py")


def test_a_target_that_must_not_be_forked_is_imported_by_each_rank(launch):
    run = launch("launch_threaded:finish", payload={"word": "hello"})
    code, stdout, stderr = run.finish()
    assert code == ExitCode.DONE
    assert stdout.startswith("rank 0 of 2 says hello\n"), "the import's noise belongs into the log"
    assert stderr == "rank 0 warns\n"
    assert run.report()["start_method"] == "exec"


def test_a_process_that_an_import_started_may_end(launch):
    code, _, stderr = launch("launch_child:work").finish()
    assert (code, stderr) == (ExitCode.DONE, "")


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_run_goes_on_in_its_log_when_its_output_is_lost(launch, hangs_up):
    run = launch("say_much", nproc=1, payload={"lingers": hangs_up})
    assert run.process.stdout.readline() == "line 0 of 0\n"
    run.process.stdout.close()
    stderr, run.process.stdout, run.process.stderr = run.process.stderr, None, None
    if hangs_up:  # a closed terminal takes both away, and the kernel and the shell say so to the process
        stderr.close()
        run.wait_for_step(0)
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGHUP)
    else:
        assert "stdout is lost (Broken pipe): the run continues" in stderr.read()
    assert run.finish()[0] == (ExitCode.STOPPED if hangs_up else ExitCode.DONE)
    assert (run.run_dir / "logs" / "rank-0.log").read_text().endswith("line 4999 of 0\nthe last line\n")


def test_sigterm_has_the_ranks_save_and_stop(launch):
    run = launch("run_on", nproc=3)
    run.wait_for_step(0, 1, 2)
    run.process.terminate()
    code, _, stderr = run.finish()
    assert (code, stderr) == (ExitCode.STOPPED, "")
    assert run.report()["outcome"] == "stopped"


@pytest.mark.parametrize("then", ["SIGTERM", "a rank dies"])
def test_ranks_go_on_while_the_launcher_is_stopped_and_wake_it_when_it_is_needed(launch, then):
    run = launch("run_on")
    run.wait_for_step(0, 1)
    run.process.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
    wait_until(lambda: select.select([run.process.stderr], [], [], 0)[0])
    assert run.process.stderr.readline() == "\n"
    told = run.process.stderr.readline()
    watcher = f"process {run.process.pid}, which watches the run,"
    assert told.startswith(f"megatune: {watcher} is stopped; the run continues;")
    before = [read_beat(heartbeat_path(run.run_dir, rank)).count for rank in (0, 1)]
    wait_until(lambda: all(read_beat(heartbeat_path(run.run_dir, rank)).count > before[rank] for rank in (0, 1)))
    assert psutil.Process(run.process.pid).status() == psutil.STATUS_STOPPED
    if then == "SIGTERM":
        run.process.terminate()
    else:
        os.kill(run.rank_pids()[1], signal.SIGKILL)
    code, _, stderr = run.finish()
    assert code == (ExitCode.STOPPED if then == "SIGTERM" else ExitCode.PROCESS_DIED)
    assert ("rank 1 on host" in stderr) is (then != "SIGTERM")


def test_sigterm_has_ranks_stop_that_were_not_forked(launch):
    run = launch("launch_threaded:run_on")
    run.wait_for_step(0, 1)
    run.process.terminate()
    assert run.finish()[0] == ExitCode.STOPPED


def test_the_stop_file_stops_the_run_and_the_next_run_starts(launch, tmp_path):
    stop_file = tmp_path / "STOP"
    run = launch("run_on", stop_file_name=str(stop_file))
    run.wait_for_step(0, 1)
    stop_file.touch()
    assert run.finish()[0] == ExitCode.STOPPED
    again = launch("finish", payload={"word": "again"}, stop_file_name=str(stop_file))
    assert again.finish()[0] == ExitCode.DONE
    assert not stop_file.exists()


@pytest.mark.parametrize("how", ["grace is over", "second signal"])
def test_ranks_that_do_not_stop_are_killed(launch, how):
    run = launch("ignore_stop", grace=0.5 if how == "grace is over" else 60)
    run.wait_for_step(0, 1)
    run.process.terminate()
    if how == "second signal":
        run.wait_for_step(0, 1, step=8)
        run.process.send_signal(signal.SIGINT)
    code, _, stderr = run.finish()
    assert code == ExitCode.PROCESS_DIED
    assert "ranks 0, 1 had not stopped" in stderr


def test_ctrl_c_ends_everything_with_one_line(launch):
    run = launch("run_on")
    run.wait_for_step(0, 1)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    code, _, stderr = run.finish()
    assert (code, stderr) == (ExitCode.INTERRUPTED, "megatune: interrupted\n")


def test_ctrl_c_before_the_ranks_start_waits_for_none():
    processes = SimpleNamespace(pending=True, started=False, ready=None, poll=lambda seconds: None)  # has no `end`
    signals = Counter({signal.SIGINT: 1})
    outcome = supervisor._watch(processes, signals, None, start_timeout=60, hang_timeout=60, grace=60)
    assert outcome.exit_code == ExitCode.INTERRUPTED


def test_kill_of_the_supervisor_leaves_no_orphans(launch):
    run = launch("ignore_stop")
    run.wait_for_step(0, 1)
    ranks = run.members()
    assert len(ranks) >= 2
    run.process.kill()
    run.process.communicate(timeout=LIMIT)
    run.assert_no_orphans()


def test_what_a_rank_leaves_behind_ends_with_it(launch):
    run = launch("leave_child")
    assert run.finish()[0] == ExitCode.DONE
    worker = int((run.run_dir / "worker").read_text())
    wait_until(lambda: not is_running(worker))


def test_a_rank_can_end_its_workers(launch):
    begun = time.monotonic()
    assert launch("leave_daemon").finish()[0] == ExitCode.DONE
    assert time.monotonic() - begun < PATIENCE / 2


def test_launch_imports_no_torch():
    script = (
        "import sys, megatune.launch.supervisor, megatune.launch.devices, megatune.launch.rank_main\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT, cwd=HERE)
