"""Ranks that another launcher started, with torchrun's environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from launch_run import HERE, LIMIT, wait_until

from megatune.errors import ExitCode
from megatune.launch.context import heartbeat_path, read_beat
from megatune.launch.failure import error_path, read_failure
from megatune.launch.world import RankEnv

SCRIPT = """
import json, os, sys
from pathlib import Path
from megatune.launch.rank_main import run_under_torchrun
from megatune.launch.world import torchrun_env
target, payload, run_dir = f"launch_targets:{sys.argv[1]}", json.loads(sys.argv[3]), Path(sys.argv[2])
sys.exit(run_under_torchrun(target, payload, torchrun_env(os.environ), run_dir, out_of_memory_advice="ask for help"))
"""
PLACE = RankEnv(1, 1, 2, 2, "127.0.0.1", 29500, 0).variables() | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def join(tmp_path):
    def start(target: str, payload: str = "{}") -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, target, tmp_path, payload],
            env=os.environ | PLACE,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def test_a_joined_rank_runs_and_beats(join, tmp_path):
    process = join("finish", '{"word": "hello"}')
    stdout, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.DONE
    assert stdout.startswith("rank 1 of 2 says hello\n")
    assert read_beat(heartbeat_path(tmp_path, 1)).phase == "exit"


def test_a_joined_rank_stops_on_sigterm(join, tmp_path):
    process = join("run_on")
    deadline = time.monotonic() + LIMIT
    while read_beat(heartbeat_path(tmp_path, 1)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.STOPPED


def test_a_stop_of_the_process_group_spares_what_a_rank_needs_to_save(join, tmp_path):
    process = join("stop_with_worker")
    wait_until(lambda: (beat := read_beat(heartbeat_path(tmp_path, 1))) is not None and beat.step > 0)
    os.killpg(process.pid, signal.SIGHUP)  # as torchrun does in a terminal that is closed
    process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.STOPPED
    assert (tmp_path / "worker").read_text() == "alive"


def torchrun(script, *words):
    """Run a script on two ranks; return what it printed, and torchrun's report."""
    words = ["--standalone", "--nproc_per_node", "2", script, *words]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{HERE}"},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT,
    )
    said, _, report = ended.stderr.partition("Failures:")
    return said, report


def test_torchrun_ends_all_ranks_with_the_code_and_the_message_of_the_one_that_refuses(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    said, report = torchrun(tmp_path / "script.py", "refuse", tmp_path, "{}")
    assert said.count("no row is left") == 1
    assert "traceback : megatune: data.json: no row is left\n" in report.partition("Root Cause")[2]
    assert report.count(f"exitcode  : {ExitCode.DATA} ") == 2, report


SLOW_START = """
import os, sys, time
time.sleep(6 * int(os.environ["LOCAL_RANK"]))  # as a machine with few cores does
from megatune.cli.main import main
sys.exit(main())
"""


def test_a_rank_that_starts_later_under_torchrun_ends_with_the_code_of_the_one_that_refuses(tmp_path):
    (tmp_path / "script.py").write_text(SLOW_START)
    (tmp_path / "run.yaml").write_text("learning_rate: -1\n")
    said, report = torchrun(tmp_path / "script.py", "train", tmp_path / "run.yaml")
    assert said.count("learning_rate is -1") == 1
    assert report.count(f"exitcode  : {ExitCode.SETTINGS} ") == 2, report


def test_a_joined_rank_tells_findings_without_a_traceback(join, tmp_path):
    process = join("fail_user")
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.DATA
    assert stderr == "megatune: data.json: no row is left\n    fix: raise cutoff_len\n"
    assert read_failure(error_path(tmp_path, 1)).rank == 1


def test_a_joined_rank_that_ran_out_of_memory_says_where_help_is(join, tmp_path):
    process = join("fail_memory")
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.OUT_OF_MEMORY
    assert stderr.endswith("ask for help\n")
