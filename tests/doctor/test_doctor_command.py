"""`megatune doctor` as users type it, on what stands for two machines: two processes that start ranks of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatune.cli.main import main
from megatune.launch.world import find_free_port

LIMIT = 300.0  # seconds, on a busy machine


def start(folder: Path, node: int, port: int, *words: str) -> subprocess.Popen[str]:
    """Start the verb in its own folder, as machine `node` of two with a rank each."""
    folder.mkdir(exist_ok=True)
    place = {"NNODES": "2", "NODE_RANK": f"{node}", "NPROC_PER_NODE": "1", "MASTER_PORT": f"{port}"}
    env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatune", "doctor", *words]
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_machines_without_a_shared_folder(tmp_path, model_dir):
    """Both names are relative, so that each machine has a folder of its own."""
    model, port = model_dir("qwen3"), find_free_port()
    settings = (
        f"model_name_or_path: {model}\nstage: sft\ndataset: mine\noutput_dir: out\ntensor_model_parallel_size: 2\n"
    )
    (tmp_path / "run.yaml").write_text(settings + "save_total_limit: 2\nbf16: true\nrms_norm: 1\n")
    both = [start(tmp_path / f"{node}", node, port, "--json", "../run.yaml") for node in (0, 1)]
    (text, errors), _ = (process.communicate(timeout=LIMIT) for process in both)
    assert both[0].returncode == 69, errors
    found = json.loads(text)
    assert found["verdict"] == "FAIL"
    failed = {check["name"] + check["found"]: check for check in found["checks"] if check["verdict"] == "FAIL"}
    said = " ".join(check["found"] for check in failed.values())
    assert "rms_norm" in said
    assert "folder data not found" in said
    assert "(NODE_RANK 1) does not see what" in said
    assert {check["host"].partition(" ")[2] for check in found["checks"] if check["group"] == "machine"} == {
        "(NODE_RANK 0)",
        "(NODE_RANK 1)",
    }
    names = {check["name"] for check in found["checks"]}
    assert {"versions", "clocks", "all-reduce", "all-to-all"} <= names
    # On a busy machine one of the two links may be slow, and is then named.
    assert any(name == "links between machines" or name.startswith("link from rank") for name in names)
    (room,) = (check["found"] for check in found["checks"] if check["name"].startswith(f"room of {tmp_path / '0'}"))
    assert "2 checkpoints of" in room
    assert not list((tmp_path / "0").iterdir())


def test_settings_without_their_run_are_refused(capsys):
    assert main(["doctor", "num_processes=2", "output_dir=out", "tensor_model_parallel_size=2"]) == 64
    said = capsys.readouterr().err
    assert "output_dir=out: output_dir has no effect here" in said
    assert "tensor_model_parallel_size has no effect here" in said
    assert "num_processes has" not in said


@pytest.mark.extended
def test_a_machine_that_does_not_come_is_said(tmp_path):
    alone = start(tmp_path / "1", 1, find_free_port(), "ddp_timeout=2")
    text, errors = alone.communicate(timeout=LIMIT)
    assert alone.returncode == 69
    assert "did not meet" in text + errors
    assert "FAIL  ranks" in text
