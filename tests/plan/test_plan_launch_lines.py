"""The lines that start a planned run, run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatune.config.groups.parallel import ParallelSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.world import find_free_port
from megatune.plan.case import Case
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.launch import GRACE_SECONDS, environment_lines, job_file, torchrun_lines

LIMIT = 120.0  # seconds; the machine may be busy with other tests
TP2 = Settings(parallel=ParallelSettings(tensor_model_parallel_size=2))


def case(world_size: int, gpu: str = "h100", settings: Settings = TP2) -> Case:
    model = find_model("Qwen3-8B")
    return Case(model=model, settings=settings, world_size=world_size, machine=find_machine(gpu))


def test_one_machine_starts_itself() -> None:
    assert torchrun_lines(case(8), "run.yaml") == ("megatune train run.yaml",)
    assert torchrun_lines(case(4), "run.yaml") == ("megatune train run.yaml num_processes=4",)
    four = Settings(run=RunSettings(num_processes=4))
    assert torchrun_lines(case(4, settings=four), "run.yaml") == ("megatune train run.yaml",)


def test_every_machine_has_its_line() -> None:
    blocks = torchrun_lines(case(24), "run.yaml")
    assert [block.splitlines()[-1] for block in blocks] == [
        f"torchrun --nnodes 3 --node_rank {rank} --nproc_per_node 8 --master_addr node-0 --master_port 29500"
        " -m megatune train run.yaml"
        for rank in range(3)
    ]
    assert "node-0 is the first machine" in blocks[0]
    assert all("# export NCCL_IB_DISABLE=0" in block for block in blocks)
    assert "NCCL_IB" not in torchrun_lines(case(16, "4090"), "run.yaml")[0]


def test_machines_are_filled() -> None:
    with pytest.raises(MegatuneError) as caught:
        torchrun_lines(case(12), "run.yaml")
    assert caught.value.exit_code is ExitCode.SETTINGS
    assert caught.value.findings[0].fix.startswith("8 or 16 GPUs")


@pytest.mark.parametrize(
    ("gpu", "parallel", "needed"),
    [
        ("h100", {"tensor_model_parallel_size": 2}, True),
        ("h100", {"context_parallel_size": 2}, True),
        ("a100", {"overlap_grad_reduce": True}, True),
        ("a100", {"pipeline_model_parallel_size": 2}, False),
        ("b200", {"tensor_model_parallel_size": 2}, False),
    ],
)
def test_launch_order_of_kernels(gpu: str, parallel: dict[str, object], needed: bool) -> None:
    settings = Settings(parallel=ParallelSettings(**{"overlap_grad_reduce": False, **parallel}))  # type: ignore[arg-type]
    lines = environment_lines(case(16, gpu, settings))
    assert [line.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=1") for line in lines] == [True] * needed


def environment(*more: str) -> dict[str, str]:
    """With this environment's commands, and what is in the folders, first."""
    path = os.pathsep.join([*more, str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def test_lines_of_two_machines_run(tmp_path: Path) -> None:
    """Each of two machines' ranks joins torchrun's processes and reports its own error: the file is not there."""
    machine = dataclasses.replace(cpu_machine(2**30, 2), gpus_per_node=1)
    run = Case(model=find_model("Qwen3-8B"), settings=Settings(), world_size=2, machine=machine)
    port = find_free_port()
    started = [
        subprocess.Popen(
            ["bash", "-c", block.replace("node-0", "127.0.0.1").replace("29500", str(port))],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for block in torchrun_lines(run, "no such file.yaml")
    ]  # fmt: skip
    for process in started:
        output, _ = process.communicate(timeout=LIMIT)
        assert "there is no settings file no such file.yaml" in output
        assert process.returncode == 1  # torchrun's own, of a process that failed


def test_a_file_for_slurm_starts_a_line_on_each_machine_and_is_queued_again(tmp_path: Path) -> None:
    """With stand-ins for Slurm's two commands and for megatune, on the second machine; sbatch itself, where it is."""
    (tmp_path / "scontrol").write_text(
        """#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else printf 'host-a\\nhost-b\\n'; fi
"""
    )
    (tmp_path / "srun").write_text('#!/bin/bash\nSLURM_NODEID=1 "${@:2}"\n')
    (tmp_path / "megatune").write_text(
        """#!/bin/bash
echo "$NNODES $NODE_RANK $NPROC_PER_NODE $MASTER_ADDR $MASTER_PORT $1 $2"
exit 75
"""
    )
    for command in ("scontrol", "srun", "megatune"):
        (tmp_path / command).chmod(0o755)
    run = Settings(parallel=TP2.parallel, run=RunSettings(output_dir="out"))
    text = job_file("slurm", case(16, settings=run), "it's mine.yaml")
    (tmp_path / "run.sbatch").write_text(text)
    slurm = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_ID": "12345", "SLURM_CPUS_ON_NODE": "64"}

    def ended() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "run.sbatch"],
            cwd=tmp_path, env={**environment(str(tmp_path)), **slurm, "LC_ALL": "C"},
            capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip

    started = "2 1 8 host-a 22345 train it's mine.yaml"
    done = ended()
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (75, "", [started, "requeued 12345"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()  # by somebody
    assert ended().stdout.splitlines() == [started]
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    if shutil.which("sbatch") is None:
        return
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=localhost\nGresTypes=gpu\n")
    asked = ["sbatch", "--test-only", "run.sbatch"]
    for name, said in (("run.sbatch", "unrecognized option"), ("wrong.sbatch", "unrecognized option")):
        (tmp_path / "wrong.sbatch").write_text(text.replace("--requeue", "--queue-again"))
        found = subprocess.run(
            [*asked[:2], name], cwd=tmp_path, env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        assert (said in found.stderr) == (name == "wrong.sbatch"), found.stderr


def test_a_task_of_skypilot_starts_a_line_on_each_machine(tmp_path: Path) -> None:
    task = yaml.safe_load(job_file("skypilot", case(16, "a100-80g"), "run.yaml"))
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "A100-80GB:8"})
    (tmp_path / "megatune").write_text('#!/bin/bash\necho "$NNODES $NODE_RANK $NPROC_PER_NODE $MASTER_ADDR $1 $2"\n')
    (tmp_path / "megatune").chmod(0o755)
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run(
        ["bash", "-c", task["run"]], env={**environment(str(tmp_path)), **sky},
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2 1 8 10.0.0.1 train run.yaml\n", "")
    schemas = pytest.importorskip("sky.utils.schemas")
    pytest.importorskip("jsonschema").validate(task, schemas.get_task_schema())


def test_a_jobset_has_a_pod_for_each_machine() -> None:
    jobset = yaml.safe_load(job_file("kubernetes", case(24), "run.yaml"))
    (job,) = jobset["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["template"]["spec"]["completions"], pod["terminationGracePeriodSeconds"]) == (3, GRACE_SECONDS)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    values = {each["name"]: each.get("value") for each in container["env"]}
    # JobSet's names: set, job, number of the job, number of the pod; the domain is the set's.
    assert values["MASTER_ADDR"] == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert (values["NNODES"], values["NPROC_PER_NODE"]) == ("3", "8")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    again = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert again is not None
    assert again.to_dict()["spec"]["replicatedJobs"] == jobset["spec"]["replicatedJobs"]
