"""One machine: planted trouble is named with its fix."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from megatune.doctor.check import Verdict, as_json, from_json, pages
from megatune.doctor.folders import folders
from megatune.doctor.machine import gpus, machine, variables
from megatune.doctor.network import _infiniband, hub, network
from megatune.doctor.software import software
from megatune.pages import as_text
from megatune.training.checks import DiskSpace


def trouble(checks):
    """What is no PASS, by name."""
    return {check.name: check for check in checks if check.verdict in (Verdict.WARN, Verdict.FAIL)}


def test_a_disk_too_small_for_the_checkpoints(tmp_path):
    assert not trouble(folders(tmp_path / "not" / "yet", DiskSpace(10**6, 2)))
    assert not list(tmp_path.iterdir())
    found = trouble(folders(tmp_path, DiskSpace(10**17, 3)))[f"room of {tmp_path}"]
    assert found.verdict is Verdict.FAIL
    assert "3 checkpoints of 100000.0 TB" in found.found
    assert "300000.0 TB are needed" in found.why
    assert "save_total_limit" in found.fix


def test_a_folder_that_cannot_be_written():
    (found,) = trouble(folders(Path("/proc/self"), DiskSpace())).values()
    assert (found.name, found.verdict, found.found) == ("/proc/self", Verdict.FAIL, "not writable")


def test_a_port_that_is_taken_is_named_with_who_holds_it():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        found = trouble(network("127.0.0.1", port, first=True, several=False))[f"port {port}"]
    assert found.verdict is Verdict.FAIL
    assert f"process {os.getpid()}" in found.found


def test_names_and_interfaces_that_are_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = trouble(network("nobody.invalid", 1, first=False, several=True))
    assert set(found) == {"host name", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"}
    assert "lo" in found["GLOO_SOCKET_IFNAME"].why


def test_a_port_of_infiniband_that_is_down(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    assert set(trouble(_infiniband(tmp_path))) == {"mlx5_1 port 1"}


def test_a_hub_that_does_not_answer(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for name in ("https_proxy", "HTTPS_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert hub("hf", "Qwen/Qwen3-0.6B").verdict is Verdict.FAIL
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub("hf", "Qwen/Qwen3-0.6B").verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS"),
        ({"http_proxy": "http://proxy:3128"}, "http_proxy"),
    ],
)
def test_variables_that_harm(env, name):
    assert set(trouble(variables(env, tensor_parallel=True, gpus=True))) == {name}
    well = {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4", "no_proxy": "*"}
    assert not trouble(variables(well, tensor_parallel=True, gpus=True))


def test_more_processes_than_cores_and_memory():
    found = trouble(machine(10**6, 4))
    assert {"cores", "main memory", "/dev/shm"} <= set(found)
    assert "dataloader_num_workers" in found["cores"].fix


def test_few_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert "ulimit -n" in trouble(machine(1, 0))["open files"].fix
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# As nvidia-smi prints them: a good GPU; one with errors, throttled, in use, with MIG; another one.
_GPUS = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 9.0, 35, 0, Disabled, 0x0000000000000000
1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 40000, 9.0, 91, 3, Enabled, 0x0000000000000040
2, Tesla V100-SXM2-32GB, 550.54.15, 32768, 4, 7.0, 35, 0, [N/A], 0x0000000000000004
"""
_TOPOLOGY = "        GPU0  GPU1\nGPU0     X    SYS\nGPU1    SYS    X\n"


@pytest.mark.parametrize("reasons", ["clocks_throttle_reasons", "clocks_event_reasons"])
def test_gpus_are_judged_by_what_their_driver_says(reasons, tmp_path, monkeypatch):
    """Old drivers and new ones, which end with an error where they do not know a field."""
    program = tmp_path / "nvidia-smi"
    text = f"#!/bin/sh\ncase $1 in *,{reasons}.active) cat <<'E'\n{_GPUS}E\n;; --query*) exit 2 ;; "
    text += f"*) cat <<'E'\n{_TOPOLOGY}E\n;; esac\n"
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    checks = list(gpus(4, bf16=True))
    found = [check for check in checks if check.name == "GPU 1"]
    assert [check.verdict for check in found] == [Verdict.FAIL, Verdict.WARN, Verdict.WARN, Verdict.WARN]
    said = " ".join(check.found for check in found)
    assert all(part in said for part in ("3 uncorrected", "40000 of 81559", "hardware thermal at 91", "MIG"))
    others = trouble(checks)
    assert "4 processes" in others["GPUs"].why
    assert others["bf16"].fix == "fp16: true"
    assert others["links"].found == "SYS (1)"
    assert "GPU 0" not in others
    assert "GPU 2" not in others
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "Triton" in trouble(gpus(4, bf16=True))["C compiler"].why
    monkeypatch.setenv("CC", str(program))
    assert "C compiler" not in trouble(gpus(4, bf16=True))


def test_a_package_built_for_another_torch_is_found_without_ending_this_process(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')")
    (tmp_path / "flash_attn-2.0.dist-info").mkdir()
    (tmp_path / "flash_attn-2.0.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = trouble(software())
    assert set(found) == {"flash-attn"}
    assert "not built for torch" in found["flash-attn"].why


def test_a_report_survives_json_and_says_reason_and_fix():
    checks = list(variables({"NCCL_P2P_DISABLE": "1"}, tensor_parallel=False, gpus=False))
    assert from_json(as_json(checks)) == checks
    printed = [as_text(page) for page in pages(checks)]
    assert "        fix: unset it" in printed[0].splitlines()
    assert printed[-1] == "1 with a warning"
