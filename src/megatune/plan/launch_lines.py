"""What starts a planned run: a line for each machine, or a file for Slurm; and its settings file."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.load import dump
from megatune.config.settings import Settings, all_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.changes.table import FREE
from megatune.plan.changes.variation import setting_of
from megatune.plan.estimate import Estimate
from megatune.plan.machine import Machine
from megatune.plan.pages.words import fullest, layout_words, percent, seconds

DEFAULT_PORT = 29500  # torchrun's
FIRST_MACHINE = "node-0"  # means the first machine's name, where the user did not say it
# Generations on which Megatron-Core's overlaps need no single queue of kernels.
_MANY_QUEUES = ("blackwell", "blackwell-rtx", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to start: the YAML that `megatune train` runs, as every machine names it, and the address of the first
    machine, as the others reach it."""

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
            what = f"{self.world_size} GPUs do not fill machines of {self.machine.gpus_per_node}"
            why = "torchrun starts as many processes on every machine"
            fix = f"{near} or {near + size} GPUs, or gpus_per_node: a divisor of {self.world_size}"
            raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)
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
    stands = f"# {FIRST_MACHINE} is the first machine: its name or address, as the others reach it"
    named = launch.master_addr != FIRST_MACHINE
    environment = (*environment_lines(launch), *_suggested_lines(launch), *(() if named else (stands,)))
    addr, port = shlex.quote(launch.master_addr), str(launch.master_port)
    return tuple(
        "\n".join((*environment, _torchrun(launch, str(rank), addr, port))) for rank in range(launch.num_nodes)
    )


def environment_lines(launch: Launch) -> tuple[str, ...]:
    """Return what must be set where torchrun starts the processes; megatune's own launcher sets it itself."""
    parallel = launch.settings.parallel
    splits = parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1
    overlaps = splits or parallel.overlap_grad_reduce or parallel.overlap_param_gather
    if launch.machine.device.generation in _MANY_QUEUES or not overlaps:
        return ()
    return ("export CUDA_DEVICE_MAX_CONNECTIONS=1  # kernels run in launch order, which overlaps count on",)


def _suggested_lines(launch: Launch) -> tuple[str, ...]:
    """Return what may be set, commented out: NCCL finds most of it itself."""
    if launch.machine.device.on_cpu:
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
    gpus = launch.processes_per_node if not launch.machine.device.on_cpu else 0
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
    environment = [*environment_lines(launch), *_suggested_lines(launch)]
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


# --- the settings file -----------------------------------------------------------------------------------------------

# What a search decides.
_CHOSEN = (
    "run.num_processes",
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    *(path for path in all_settings() if path.startswith(("parallel.", "recompute."))),
)
# What a search turns on because it costs nothing, or tries both ways.
_FREE = (*FREE, "experts.moe_token_dispatcher_type")
# Written from a bare model even where they are the defaults: they are what was asked for.
_ALWAYS = (
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
)
_PLACEHOLDERS = (
    ("model.model_name_or_path", "FOLDER", "the Hugging Face checkpoint of {name}"),
    ("data.dataset", "NAME", "one or more of the names in dataset_info.json, which lies in dataset_dir"),
    ("run.output_dir", "FOLDER", "for checkpoints, logs and the final model"),
    ("optimizer.learning_rate", "1.0e-5", "5.0e-5 where nothing is written"),
    ("optimizer.num_train_epochs", "3.0", "as many where nothing is written"),
)


def winner_yaml(estimate: Estimate, origins: Mapping[str, str], written: Collection[str] = ()) -> str:
    """Write a settings file that `megatune train` runs, with what was planned for at its head.

    Args:
        written: "group.name" of what a user gave a value on a command line without a file.
        origins: "group.name" -> where a user wrote it, as `Loaded.origins`. Where some were written in a file, the text
            holds every setting; where none was, only those that differ from the defaults, and comments in place of
            what only the user knows.
    """
    settings = estimate.case.settings
    if all(origin == "default" for origin in origins.values()):
        return f"{_planned(estimate)}{_short(estimate.case, written)}"
    chosen = {
        path: "plan" for path in _CHOSEN if origins.get(path, "default") != "default" or _is_written(settings, path)
    }
    chosen |= {
        path: "plan" for path in _FREE if origins.get(path, "default") == "default" and _is_written(settings, path)
    }
    return f"{_planned(estimate)}{dump(settings, {**origins, **chosen})}"


def _planned(estimate: Estimate) -> str:
    """Return comments on the machines and the numbers that are predicted on them."""
    case, time = estimate.case, estimate.time
    return (
        f"# Planned for {case.world_size} × {case.machine.device.name}: {layout_words(case)}\n"
        f"# Predicted: {fullest(estimate)}; {seconds(time.total)} a step ±{percent(time.uncertainty)}\n"
    )


def _short(case: Case, user: Collection[str]) -> str:
    """Write only what differs from the defaults, and comments in place of what is not known."""
    settings = case.settings
    lines = [f"# {case.model.name} on {case.world_size} processes, a global batch of {case.global_batch_size} rows"]
    if missing := [entry for entry in _PLACEHOLDERS if not _is_written(settings, entry[0])]:
        lines.append("# To be filled in:")
        lines += [
            f"{f'# {LLAMAFACTORY.key_of(path)}: {example}':<52}  # {note.format(name=case.model.name)}"
            for path, example, note in missing
        ]
    chosen = {path: "plan" for path in all_settings() if _is_written(settings, path) or path in (*_CHOSEN, *_FREE)}
    written = dump(settings, {**chosen, **dict.fromkeys((*user, "model.model_name_or_path"), "asked for")}).splitlines()
    keys = {LLAMAFACTORY.key_of(path) for path in all_settings() if path in _ALWAYS or _is_written(settings, path)}
    lines += [line for line in written if line.partition(":")[0] in keys]
    return "\n".join(lines) + "\n"


def _is_written(settings: Settings, path: str) -> bool:
    return bool(setting_of(settings, path) != all_settings()[path].default)
