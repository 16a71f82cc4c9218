"""Writes what starts a planned run: a line for each machine, its settings file, and files for clusters.

Files for Slurm, SkyPilot and Kubernetes (templates in `jobs`) run one task per machine: `megatune train`, which starts
the processes of its machine. A run that is asked to stop saves a whole checkpoint, for which each file allows
GRACE_SECONDS; when it is started again, it resumes.
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

GRACE_SECONDS = 900  # to finish the current step and save a checkpoint
# The command for each kind of file. Slurm requeues a run that saved before its time limit, unless it was cancelled;
# SkyPilot's `jobs` and Kubernetes restart the tasks of all machines together.
JOB_FILES = {"slurm": "sbatch", "skypilot": "sky jobs launch", "kubernetes": "kubectl apply"}
# SkyPilot's names of devices in the catalogue; for others, the first word of the name is used.
_SKYPILOT = {"a100-80g": "A100-80GB", "a100-80g-pcie": "A100-80GB", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090",
             "rtx-5090": "RTX5090", "rtx-a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada"}  # fmt: skip
DEFAULT_PORT = 29500  # torchrun's
FIRST_MACHINE = "node-0"  # placeholder for the name of the first machine
# Generations on which Megatron-Core's overlaps do not need a single hardware queue of kernels.
_MANY_QUEUES = ("blackwell", "blackwell-rtx", "cpu")
# Settings that a search decides.
_CHOSEN = (
    "run.num_processes",
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    *(path for path in all_settings() if path.startswith(("parallel.", "recompute."))),
)
# Settings that a search turns on because they have no cost, or tries both ways.
_FREE = (*FREE, "experts.moe_token_dispatcher_type")
# For a model without a file, written even if they are the defaults: they are the answer.
_ALWAYS = (
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
)
_PLACEHOLDERS = (
    ("model.model_name_or_path", "FOLDER", "the Hugging Face checkpoint of {name}"),
    ("data.dataset", "NAME", "one or more of the names in dataset_info.json, in dataset_dir"),
    ("run.output_dir", "FOLDER", "for checkpoints, logs and the final model"),
    ("optimizer.learning_rate", "1.0e-5", "default: 5.0e-5"),
    ("optimizer.num_train_epochs", "3.0", "default: 3.0"),
)


def torchrun_lines(case: Case, file: str) -> tuple[str, ...]:
    """Return the command for each machine, by its rank. On one machine megatune starts the processes itself.

    Args:
        file: the YAML for `megatune train`, with the same path on every machine.

    Raises:
        MegatuneError: SETTINGS if the processes do not fill whole machines.
    """
    command = f"megatune train {shlex.quote(file)}"
    nodes, per_node = machines_of(case)
    if nodes == 1:
        # It starts one process for each GPU unless num_processes is set.
        fits = case.world_size in (case.settings.run.num_processes, case.machine.gpus_per_node)
        return (command if fits else f"{command} num_processes={case.world_size}",)
    first = f"# {FIRST_MACHINE} is the first machine: its name or address, as the others reach it"
    environment = (*environment_lines(case), *suggested_lines(case), first)
    address = f"--master_addr {FIRST_MACHINE} --master_port {DEFAULT_PORT}"
    starts = (f"torchrun --nnodes {nodes} --node_rank {rank} --nproc_per_node {per_node}" for rank in range(nodes))
    return tuple("\n".join((*environment, f"{start} {address} -m {command}")) for start in starts)


def machines_of(case: Case) -> tuple[int, int]:
    """Return the number of machines of a run, and the processes of each.

    Raises:
        MegatuneError: SETTINGS if one is not full: torchrun starts the same number of processes on each.
    """
    size = min(case.world_size, case.machine.gpus_per_node)
    if case.world_size % size:
        near = case.world_size // size * size
        what = f"{case.world_size} GPUs do not fill machines of {size}"
        fix = f"{near} or {near + size} GPUs, or gpus_per_node: a divisor of {case.world_size}"
        why = "torchrun starts the same number of processes on every machine"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)
    return case.world_size // size, size


def environment_lines(case: Case) -> tuple[str, ...]:
    """Return the environment variables that torchrun needs; megatune's own launcher sets them itself."""
    parallel = case.settings.parallel
    splits = parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1
    overlaps = splits or parallel.overlap_grad_reduce or parallel.overlap_param_gather
    if case.machine.device.generation in _MANY_QUEUES or not overlaps:
        return ()
    return ("export CUDA_DEVICE_MAX_CONNECTIONS=1  # kernels run in launch order, as overlaps expect",)


def suggested_lines(case: Case) -> tuple[str, ...]:
    """Return optional environment variables, commented out: NCCL detects most of them."""
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


# --- the settings file -----------------------------------------------------------------------------------------------


def winner_yaml(estimate: Estimate, origins: Mapping[str, str], written: Collection[str] = ()) -> str:
    """Return a settings file for `megatune train`, with the predicted memory and time in comments at its head.

    Args:
        origins: of each setting, as `Loaded.origins`. If the plan is of a file, the text has every setting; if not,
            only those that differ from the defaults, and comments for those that only the user knows.
        written: settings that the user set on a command line without a file, by "group.name".
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
    """Return the settings that a search decided, by keys of a settings file, without the defaults."""
    paths = (*_CHOSEN, *_FREE, "precision.bf16", "precision.fp16")
    kept = [path for path in paths if path in _ALWAYS or not is_default(case.settings, path)]
    return {LLAMAFACTORY.key_of(path): setting_value(case.settings, path) for path in kept}


def planned_lines(estimate: Estimate) -> str:
    """Return comments with the machines and the predicted memory and time."""
    case, time = estimate.case, estimate.time
    return (
        f"# Planned for {case.world_size} × {case.machine.device.name}: {describe_layout(case)}\n"
        f"# Predicted: {fullest(estimate)}; {seconds(time.total)} a step ±{percent(time.uncertainty)}\n"
    )


def _short(case: Case, user: Collection[str]) -> str:
    """Write only settings that differ from the defaults, and comments for unknown ones."""
    settings = case.settings
    rows = counted(case.global_batch_size, "row")
    lines = [f"# {case.model.name} on {case.world_size} processes, a global batch of {rows}"]
    if missing := [entry for entry in _PLACEHOLDERS if is_default(settings, entry[0])]:
        lines.append("# Fill in:")
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
    """Return the text of a file of one of `JOB_FILES`; `file` as in `torchrun_lines`.

    Raises:
        MegatuneError: SETTINGS if the processes do not fill whole machines.
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
