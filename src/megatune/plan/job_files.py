"""Files that start a planned run on a cluster: for Slurm's sbatch, for SkyPilot, and for Kubernetes.

One task a machine runs `megatune train`, which starts the processes of its machine. A run that is told to stop saves a
whole checkpoint, for which each file leaves it GRACE_SECONDS; started again, it resumes.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from megatune.errors import ExitCode
from megatune.plan.case import Case
from megatune.plan.launch_lines import DEFAULT_PORT, machines_of, suggested_lines

GRACE_SECONDS = 900  # for the step that a run is at, and a checkpoint
_RESTARTS = 3
_FIRST_PORT = 20000  # the job's number is added, so that two jobs that share a machine do not meet
# What SkyPilot calls devices of the catalogue; it is asked for others by the first word of their name.
_SKYPILOT = {"a100-80g": "A100-80GB", "a100-80g-pcie": "A100-80GB", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090",
             "rtx-5090": "RTX5090", "rtx-a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada"}  # fmt: skip


def slurm_file(case: Case, file: str) -> str:
    """Return a file for sbatch. Before the job's time is over, and where it is preempted, the run saves and is queued
    again; one that somebody has stopped (OUTPUT/STOP) is not.

    Args:
        file: the YAML that `megatune train` runs, as every machine names it.

    Raises:
        MegatuneError: SETTINGS, where processes do not fill whole machines.
    """
    nodes, per_node = machines_of(case)
    line = f'NODE_RANK="$SLURM_NODEID" exec megatune train {shlex.quote(file)}'
    output = case.settings.run.output_dir
    by_somebody = f" && [ ! -e {shlex.quote(f'{output}/STOP')} ]" if output else ""
    return "\n".join([
        "#!/bin/bash",
        "#SBATCH --job-name=megatune",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([] if case.machine.device.on_cpu else [f"#SBATCH --gpus-per-node={per_node}"]),
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        f"#SBATCH --signal=TERM@{GRACE_SECONDS}",
        "",
        "set -uo pipefail",
        "",
        *suggested_lines(case),
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"export NNODES={nodes} NPROC_PER_NODE={per_node}",
        f"export MASTER_ADDR=${{hosts[0]}} MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % 10000))",
        "",
        "# A step gets one core a task unless it asks for more.",
        f'srun --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c {shlex.quote(line)}',
        "code=$?",
        f'if [ "$code" -eq {int(ExitCode.STOPPED)} ]{by_somebody}; then',
        '    scontrol requeue "$SLURM_JOB_ID"  # the run resumes from its checkpoint; scancel ends it for good',
        "fi",
        'exit "$code"',
        "",
    ])  # fmt: skip


def skypilot_file(case: Case, file: str) -> str:
    """Return a task for `sky launch`, or for `sky jobs launch`, which starts it again on other machines; see
    `slurm_file`."""
    nodes, per_node = machines_of(case)
    name = case.machine.device.name
    accelerators = f"{_SKYPILOT.get(name, name.partition('-')[0].upper())}:{per_node}"
    run = [
        *suggested_lines(case),
        f"export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK NPROC_PER_NODE={per_node}",
        f'export MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS") MASTER_PORT={DEFAULT_PORT}',
        f"exec megatune train {shlex.quote(file)}",
    ]
    task = {
        "name": "megatune",
        "num_nodes": nodes,
        "resources": {} if case.machine.device.on_cpu else {"accelerators": accelerators},
        "workdir": ".",
        "setup": "# Install megatune here, or name an image that has it under resources.\n",
        "run": "\n".join(run) + "\n",
    }
    head = "# output_dir must lie on storage that all machines mount and that outlives them: file_mounts.\n"
    return head + _yaml(task)


def kubernetes_file(case: Case, file: str) -> str:
    """Return a JobSet for `kubectl apply`: one pod a machine, which are started again together; see `slurm_file`."""
    nodes, per_node = machines_of(case)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    values = {"NNODES": nodes, "NPROC_PER_NODE": per_node, "MASTER_ADDR": "megatune-node-0-0.megatune",
              "MASTER_PORT": DEFAULT_PORT}  # fmt: skip
    container: dict[str, Any] = {
        "name": "megatune",
        "image": "IMAGE",
        "workingDir": "/shared",
        "command": ["megatune", "train", file],
        "env": [
            *({"name": name, "value": str(value)} for name, value in values.items()),
            {"name": "NODE_RANK", "valueFrom": index},
        ],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if not case.machine.device.on_cpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": per_node}}
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "CLAIM"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's, and that of data workers
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    job = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0,
           "template": {"spec": pod}}  # fmt: skip
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "megatune"},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }
    head = "# IMAGE has megatune; CLAIM is a volume that all pods write: settings file, model, data and output_dir.\n"
    return head + _yaml(jobset)


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=200)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
