"""The commands that start a planned run: a line for each machine, or a file for Slurm."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.machine import Machine

DEFAULT_PORT = 29500  # torchrun's
FIRST_MACHINE = "node-0"  # stands for the first machine's name, where the user did not say it
# Generations on which Megatron-Core's overlaps need no single queue of kernels.
_MANY_QUEUES = ("blackwell", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to start.

    Attributes:
        file: the YAML that `megatune train` runs, as every machine names it.
        master_addr: name or address of the first machine, as the others reach it.
    """

    file: str
    settings: Settings
    machine: Machine
    world_size: int
    master_addr: str = FIRST_MACHINE
    master_port: int = DEFAULT_PORT

    @property
    def processes_per_node(self) -> int:
        return min(self.world_size, self.machine.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        """Machines that the run fills.

        Raises:
            MegatuneError: SETTINGS, where it leaves one half full: each then needs a line that torchrun does not have.
        """
        size = self.processes_per_node
        if self.world_size % size:
            near = self.world_size // size * size
            raise MegatuneError(
                Finding(
                    f"{self.world_size} GPUs do not fill machines of {self.machine.gpus_per_node}",
                    why="torchrun starts as many processes on every machine",
                    fix=f"{near} or {near + size} GPUs, or gpus_per_node: a divisor of {self.world_size}",
                ),
                ExitCode.SETTINGS,
            )
        return self.world_size // size


def torchrun_lines(launch: Launch) -> tuple[str, ...]:
    """Return what to type on each machine, by its rank. On one machine megatune starts its own processes.

    Raises:
        MegatuneError: SETTINGS, where processes do not fill whole machines.
    """
    command = f"megatune train {shlex.quote(launch.file)}"
    if launch.num_nodes == 1:
        # It starts one for each GPU unless num_processes says otherwise.
        fits = launch.world_size in (launch.settings.run.num_processes, launch.machine.gpus_per_node)
        return (command if fits else f"{command} num_processes={launch.world_size}",)
    stands = f"# {FIRST_MACHINE} stands for the first machine: its name or address, as the others reach it"
    named = launch.master_addr != FIRST_MACHINE
    environment = (*environment_lines(launch), *suggested_lines(launch), *(() if named else (stands,)))
    return tuple(
        "\n".join(
            (*environment, _torchrun(launch, str(rank), shlex.quote(launch.master_addr), str(launch.master_port)))
        )
        for rank in range(launch.num_nodes)
    )


def environment_lines(launch: Launch) -> tuple[str, ...]:
    """Return what must be set where torchrun starts the processes; megatune's own launcher sets it itself."""
    parallel = launch.settings.parallel
    overlaps = (
        parallel.tensor_model_parallel_size > 1
        or parallel.context_parallel_size > 1
        or parallel.overlap_grad_reduce
        or parallel.overlap_param_gather
    )
    if launch.machine.device.generation in _MANY_QUEUES or not overlaps:
        return ()
    return ("export CUDA_DEVICE_MAX_CONNECTIONS=1  # kernels run in launch order, which overlaps count on",)


def suggested_lines(launch: Launch) -> tuple[str, ...]:
    """Return what may be set, commented out: NCCL finds most of it itself."""
    if launch.machine.device.generation == "cpu":
        return ("# export GLOO_SOCKET_IFNAME=eth0  # the interface by which the machines reach each other",)
    lines = ["# export NCCL_SOCKET_IFNAME=eth0  # the interface by which the machines reach each other"]
    if launch.machine.network.name.startswith(("ib-", "roce-")):
        lines += [
            "# export NCCL_IB_DISABLE=0  # InfiniBand and RoCE are used, which is NCCL's default",
            "# export NCCL_NET_GDR_LEVEL=PHB  # network cards read GPU memory under the same PCIe host bridge",
        ]
    if launch.machine.network.name.startswith("roce-"):
        lines.append("# export NCCL_IB_GID_INDEX=3  # RoCE v2, on most networks")
    return (*lines, "# export NCCL_DEBUG=INFO  # prints which network NCCL found")


def sbatch_file(launch: Launch, *, job_name: str = "megatune") -> str:
    """Return a file for Slurm's sbatch: one task a machine, which meet at the first one.

    Raises:
        MegatuneError: SETTINGS, where processes do not fill whole machines.
    """
    gpus = launch.processes_per_node if launch.machine.device.generation != "cpu" else 0
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(job_name)}",
        f"#SBATCH --nodes={launch.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        "",
        "set -euo pipefail",
        "",
    ]
    environment = [*environment_lines(launch), *suggested_lines(launch)]
    # The port is the job's own, so that two jobs that share a machine do not meet.
    meeting = [
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "",
    ]
    # A step gets one core a task unless it asks for more.
    step = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"'
    line = _torchrun(launch, '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    return "\n".join([*head, *environment, *meeting, f"{step} bash -c {shlex.quote(line)}", ""])


def _torchrun(launch: Launch, node_rank: str, addr: str, port: str) -> str:
    return (
        f"torchrun --nnodes {launch.num_nodes} --node_rank {node_rank} --nproc_per_node {launch.processes_per_node}"
        f" --master_addr {addr} --master_port {port} -m megatune train {shlex.quote(launch.file)}"
    )
