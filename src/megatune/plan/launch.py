"""What starts a planned run: a line for each machine, its settings file, and files for clusters.

Of a file for Slurm, SkyPilot or Kubernetes (the templates of `jobs`) one task a machine runs `megatune train`, which
starts the processes of its machine. A run that is told to stop saves a whole checkpoint, for which each file leaves it
GRACE_SECONDS; started again, it resumes.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.load import dump
from megatune.config.settings import all_settings, is_default, setting_value
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.changes import FREE
from megatune.plan.estimate import Estimate
from megatune.plan.pages.words import describe_layout, fullest, percent, seconds

GRACE_SECONDS = 900  # for the step that a run is at, and a checkpoint
# What takes each kind of file. Slurm requeues a run that saved before its time was over, unless somebody stopped it;
# SkyPilot's `jobs` and Kubernetes start the tasks of all machines again together.
JOB_FILES = {"slurm": "sbatch", "skypilot": "sky jobs launch", "kubernetes": "kubectl apply"}
# What SkyPilot calls devices of the catalogue; it is asked for others by the first word of their name.
_SKYPILOT = {"a100-80g": "A100-80GB", "a100-80g-pcie": "A100-80GB", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090",
             "rtx-5090": "RTX5090", "rtx-a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada"}  # fmt: skip
DEFAULT_PORT = 29500  # torchrun's
FIRST_MACHINE = "node-0"  # means the first machine's name, where the user did not say it
# Generations on which Megatron-Core's overlaps need no single queue of kernels.
_MANY_QUEUES = ("blackwell", "blackwell-rtx", "cpu")
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


def torchrun_lines(
    case: Case, file: str, *, master_addr: str = FIRST_MACHINE, master_port: int = DEFAULT_PORT
) -> tuple[str, ...]:
    """Return what to type on each machine, by its rank. On one machine megatune starts its own processes.

    Args:
        file: the YAML that `megatune train` runs, as every machine names it.
        master_addr, master_port: the address of the first machine, as the others reach it.

    Raises:
        MegatuneError: SETTINGS, where processes do not fill whole machines.
    """
    command = f"megatune train {shlex.quote(file)}"
    nodes, _ = machines_of(case)
    if nodes == 1:
        # It starts one for each GPU unless num_processes says otherwise.
        fits = case.world_size in (case.settings.run.num_processes, case.machine.gpus_per_node)
        return (command if fits else f"{command} num_processes={case.world_size}",)
    environment = [*environment_lines(case), *suggested_lines(case)]
    if master_addr == FIRST_MACHINE:
        environment.append(f"# {FIRST_MACHINE} is the first machine: its name or address, as the others reach it")
    addr, port = shlex.quote(master_addr), str(master_port)
    return tuple("\n".join((*environment, _torchrun(case, file, str(rank), addr, port))) for rank in range(nodes))


def machines_of(case: Case) -> tuple[int, int]:
    """Return the machines that a run fills, and the processes of each.

    Raises:
        MegatuneError: SETTINGS, where it leaves one half full: each then needs a line that torchrun does not have.
    """
    size = min(case.world_size, case.machine.gpus_per_node)
    if case.world_size % size:
        near = case.world_size // size * size
        what = f"{case.world_size} GPUs do not fill machines of {size}"
        fix = f"{near} or {near + size} GPUs, or gpus_per_node: a divisor of {case.world_size}"
        why = "torchrun starts as many processes on every machine"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)
    return case.world_size // size, size


def environment_lines(case: Case) -> tuple[str, ...]:
    """Return what must be set where torchrun starts the processes; megatune's own launcher sets it itself."""
    parallel = case.settings.parallel
    splits = parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1
    overlaps = splits or parallel.overlap_grad_reduce or parallel.overlap_param_gather
    if case.machine.device.generation in _MANY_QUEUES or not overlaps:
        return ()
    return ("export CUDA_DEVICE_MAX_CONNECTIONS=1  # kernels run in launch order, which overlaps count on",)


def suggested_lines(case: Case) -> tuple[str, ...]:
    """Return what may be set, commented out: NCCL finds most of it itself."""
    network = case.machine.network.name
    if case.machine.device.on_cpu:
        return ("# export GLOO_SOCKET_IFNAME=eth0  # the interface by which the machines reach each other",)
    lines = ["# export NCCL_SOCKET_IFNAME=eth0  # the interface by which the machines reach each other"]
    if network.startswith(("ib-", "roce-")):
        lines += [
            "# export NCCL_IB_DISABLE=0  # InfiniBand and RoCE are used, which is NCCL's default",
            "# export NCCL_NET_GDR_LEVEL=PHB  # network cards read GPU memory under the same PCIe host bridge",
        ]
    if network.startswith("roce-"):
        lines.append("# export NCCL_IB_GID_INDEX=3  # RoCE v2, on most networks")
    return (*lines, "# export NCCL_DEBUG=INFO  # prints which network NCCL found")


def _torchrun(case: Case, file: str, node_rank: str, addr: str, port: str) -> str:
    nodes, per_node = machines_of(case)
    return (
        f"torchrun --nnodes {nodes} --node_rank {node_rank} --nproc_per_node {per_node}"
        f" --master_addr {addr} --master_port {port} -m megatune train {shlex.quote(file)}"
    )


# --- the settings file -----------------------------------------------------------------------------------------------


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
        return f"{planned_lines(estimate)}{_short(estimate.case, written)}"
    chosen = {
        path: "plan" for path in _CHOSEN if origins.get(path, "default") != "default" or not is_default(settings, path)
    }
    chosen |= {
        path: "plan" for path in _FREE if origins.get(path, "default") == "default" and not is_default(settings, path)
    }
    return f"{planned_lines(estimate)}{dump(settings, {**origins, **chosen})}"


def layout_settings(case: Case) -> dict[str, Any]:
    """Return what a search decided by keys of a settings file, without what has its default."""
    paths = (*_CHOSEN, *_FREE, "precision.bf16", "precision.fp16")
    kept = [path for path in paths if path in _ALWAYS or not is_default(case.settings, path)]
    return {LLAMAFACTORY.key_of(path): setting_value(case.settings, path) for path in kept}


def planned_lines(estimate: Estimate) -> str:
    """Return comments on the machines and the numbers that are predicted on them."""
    case, time = estimate.case, estimate.time
    return (
        f"# Planned for {case.world_size} × {case.machine.device.name}: {describe_layout(case)}\n"
        f"# Predicted: {fullest(estimate)}; {seconds(time.total)} a step ±{percent(time.uncertainty)}\n"
    )


def _short(case: Case, user: Collection[str]) -> str:
    """Write only what differs from the defaults, and comments in place of what is not known."""
    settings = case.settings
    rows = counted(case.global_batch_size, "row")
    lines = [f"# {case.model.name} on {case.world_size} processes, a global batch of {rows}"]
    if missing := [entry for entry in _PLACEHOLDERS if is_default(settings, entry[0])]:
        lines.append("# To be filled in:")
        lines += [
            f"{f'# {LLAMAFACTORY.key_of(path)}: {example}':<52}  # {note.format(name=case.model.name)}"
            for path, example, note in missing
        ]
    chosen = {path: "plan" for path in all_settings() if not is_default(settings, path) or path in (*_CHOSEN, *_FREE)}
    written = dump(settings, {**chosen, **dict.fromkeys((*user, "model.model_name_or_path"), "asked for")}).splitlines()
    keys = {LLAMAFACTORY.key_of(path) for path in all_settings() if path in _ALWAYS or not is_default(settings, path)}
    lines += [line for line in written if line.partition(":")[0] in keys]
    return "\n".join(lines) + "\n"


# --- files for clusters -----------------------------------------------------------------------------------------------


def job_file(kind: str, case: Case, file: str) -> str:
    """Return the text of a file of one of `JOB_FILES`.

    Args:
        file: the YAML that `megatune train` runs, as every machine names it.

    Raises:
        MegatuneError: SETTINGS, where processes do not fill whole machines.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )
    environment.filters["quote"] = shlex.quote
    template = environment.from_string(files(__package__).joinpath("jobs", f"{kind}.jinja").read_text(encoding="utf-8"))
    nodes, per_node = machines_of(case)
    device = case.machine.device
    return template.render(
        nodes=nodes,
        per_node=per_node,
        on_cpu=device.on_cpu,
        accelerator=_SKYPILOT.get(device.name, device.name.partition("-")[0].upper()),
        suggested=suggested_lines(case),
        file=file,
        command=f"megatune train {shlex.quote(file)}",
        output_dir=case.settings.run.output_dir,
        grace_seconds=GRACE_SECONDS,
        stopped=int(ExitCode.STOPPED),
        port=DEFAULT_PORT,
    )
