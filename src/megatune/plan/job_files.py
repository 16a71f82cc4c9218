"""Files that start a planned run on a cluster: for Slurm's sbatch, for SkyPilot, and for Kubernetes.

One task a machine runs `megatune train`, which starts the processes of its machine. A run that is told to stop saves a
whole checkpoint, for which each file leaves it GRACE_SECONDS; started again, it resumes. The files are those of `jobs`.
"""

from __future__ import annotations

import shlex
from importlib.resources import files

from megatune.errors import ExitCode
from megatune.plan.case import Case
from megatune.plan.launch_lines import DEFAULT_PORT, machines_of, suggested_lines

GRACE_SECONDS = 900  # for the step that a run is at, and a checkpoint
# What takes each kind of file. Slurm requeues a run that saved before its time was over, unless somebody stopped it;
# SkyPilot's `jobs` and Kubernetes start the tasks of all machines again together.
JOB_FILES = {"slurm": "sbatch", "skypilot": "sky jobs launch", "kubernetes": "kubectl apply"}
# What SkyPilot calls devices of the catalogue; it is asked for others by the first word of their name.
_SKYPILOT = {"a100-80g": "A100-80GB", "a100-80g-pcie": "A100-80GB", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090",
             "rtx-5090": "RTX5090", "rtx-a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada"}  # fmt: skip


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
