"""Derives the requirements of a run from its settings, checks this machine, and starts the checks of all ranks."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.doctor.check import Check, Verdict, check, failures, from_json
from megatune.doctor.folders import folders
from megatune.doctor.machine import gpus, machine, variables
from megatune.doctor.network import hub, network
from megatune.doctor.software import software
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.launch.devices import count_gpus
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import RankEnv, World
from megatune.training.checks import DiskSpace, check_files

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.load import Loaded
    from megatune.config.settings import Settings
    from megatune.hub.repository import Hub

RENDEZVOUS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a run; the defaults are those of any run.

    Attributes:
        output_dir: None if no file names one.
        timeout: seconds for the rendezvous of the ranks.
        workers: data-loading processes of each rank.
        room: space for its checkpoints.
        hubs: ("hf" or "ms", id of the model).
        checks: checks of the settings file.
    """

    output_dir: Path | None = None
    timeout: float = RENDEZVOUS_SECONDS
    workers: int = 0
    bf16: bool = False
    tensor_parallel: bool = False
    room: DiskSpace = field(default_factory=DiskSpace)
    hubs: tuple[tuple[Hub, str], ...] = ()
    checks: tuple[Check, ...] = ()


def needs_of(loaded: Loaded, world_size: int, *, whole: bool) -> Needs:
    """Return the requirements of a run; findings about its settings become checks.

    Args:
        world_size: processes of the whole run.
        whole: whether the settings are those of a run, or only define which ranks to start.
    """
    settings = loaded.settings
    timeout = min(settings.run.ddp_timeout, RENDEZVOUS_SECONDS)
    if not whole:
        return Needs(timeout=timeout)
    architecture, hubs, checks = None, tuple(_hubs(settings)), []
    if settings.model.model_name_or_path and not hubs:
        try:
            architecture = _architecture(settings)
        except MegatuneError as error:
            checks += failures("model", error.findings)
    findings = loaded.check(architecture, world_size)
    for each in check_files(settings, loaded.invalid, world_size=world_size).errors:
        findings += each.findings
    checks = [replace(each, group="settings") for each in [*checks, *failures("settings", findings)]]
    found = "valid for this layout and model; data, weights and folders exist"
    return Needs(
        output_dir=Path(settings.run.output_dir) if settings.run.output_dir else None,
        timeout=timeout,
        workers=settings.data.dataloader_num_workers or 0,
        bf16=settings.precision.bf16,
        tensor_parallel=settings.parallel.tensor_model_parallel_size > 1,
        room=DiskSpace.of(settings, architecture),
        hubs=hubs,
        checks=tuple(checks or [check("settings", "settings", found)]),
    )


def _architecture(settings: Settings) -> Architecture:
    from megatune.config.model import open_changed
    from megatune.families import load_architecture

    model = settings.model
    assert model.model_name_or_path is not None
    found = open_changed(settings, model.model_name_or_path, model.model_revision, model.mcore_model)
    return load_architecture(found.config_dir(), *settings.task)


def _hubs(settings: Settings) -> Iterator[tuple[Hub, str]]:
    from megatune.hub.models import is_hub_id
    from megatune.hub.repository import use_modelscope

    name = settings.model.model_name_or_path
    if name and is_hub_id(name) and settings.model.mcore_model is None:
        yield "ms" if use_modelscope() else "hf", name


def machine_checks(needs: Needs, world: World | RankEnv) -> list[Check]:
    """Check this machine.

    Args:
        world: the ranks to start, or this process's place among those that torchrun started.
    """
    local = world.nproc_per_node if isinstance(world, World) else world.local_world_size
    several, num_gpus = world.world_size > local, count_gpus()
    checks = [*needs.checks] if world.node_rank == 0 else []
    checks += software()
    checks += machine(local, needs.workers)
    checks += gpus(local if num_gpus else 0, bf16=needs.bf16)
    checks += folders(needs.output_dir or Path(), needs.room)
    # Under torchrun, torchrun listens on the port.
    first = world.node_rank == 0 and isinstance(world, World)
    checks += network(world.master_addr, world.master_port, first=first, several=several)
    checks += (hub(kind, what) for kind, what in needs.hubs)
    checks += variables(os.environ, tensor_parallel=needs.tensor_parallel, gpus=num_gpus > 0)
    host = f"{socket.gethostname()} (NODE_RANK {world.node_rank})" if several else socket.gethostname()
    return [replace(check, host=host) for check in checks]


def check_started(needs: Needs, world: World) -> list[Check]:
    """Check this machine, start its ranks, and return all checks on the first machine, or its own checks on others."""
    own = machine_checks(needs, world)
    if any(check.name == f"port {world.master_port}" and check.verdict is Verdict.FAIL for check in own):
        return [*own, Check("ranks", "ranks", Verdict.SKIP, "not started: their port is in use")]
    output_dir = needs.output_dir and needs.output_dir.absolute()
    with tempfile.TemporaryDirectory(prefix="megatune-doctor-") as name:
        report = Path(name, "report.json")
        payload = {"checks": own, "output_dir": output_dir, "timeout": needs.timeout, "report": str(report)}
        code = run_ranks("megatune.doctor.ranks:run_rank", payload, world, Path(name, "launch"))
        if code != ExitCode.DONE:
            found, why = f"ended with exit code {code}", "the lines above report which rank failed, and why"
            return [*own, Check("ranks", "ranks", Verdict.FAIL, found, why, "fix that problem first")]
        return from_json(report.read_text()) if report.is_file() else own


def check_joined(needs: Needs, env: RankEnv) -> list[Check]:
    """Check in one of torchrun's processes; return the same checks in all of them.

    Raises:
        MegatuneError: UNAVAILABLE if the rendezvous fails.
    """
    from megatune.doctor.ranks import check_together

    own = machine_checks(needs, env) if env.local_rank == 0 else []
    output_dir = needs.output_dir and needs.output_dir.absolute()
    with tempfile.TemporaryDirectory(prefix="megatune-doctor-") as name:
        payload = {"checks": own, "output_dir": output_dir, "timeout": needs.timeout}
        return check_together(RankContext(env, Path(name)), payload)
