"""Checks this machine, then has all ranks check together."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from megatune.doctor.check import Check, Verdict
from megatune.doctor.folders import folders
from megatune.doctor.gpus import gpus
from megatune.doctor.machine import machine
from megatune.doctor.needs import Needs
from megatune.doctor.network import hub, network
from megatune.doctor.report import from_json
from megatune.doctor.software import software
from megatune.doctor.variables import variables
from megatune.errors import ExitCode
from megatune.launch.context import RankContext
from megatune.launch.devices import count_gpus
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import RankEnv, World


def machine_checks(needs: Needs, place: World | RankEnv) -> list[Check]:
    """Check this machine, which the caller is a process of.

    Args:
        place: the ranks to start here, or this process's among those that torchrun started.
    """
    local = place.nproc_per_node if isinstance(place, World) else place.local_world_size
    several, num_gpus = place.world_size > local, count_gpus()
    checks = [*needs.checks] if place.node_rank == 0 else []
    checks += software()
    checks += machine(local, needs.workers)
    checks += gpus(local if num_gpus else 0, bf16=needs.bf16)
    checks += folders(needs.output_dir or Path(), needs.room)
    # torchrun itself listens at its port.
    first = place.node_rank == 0 and isinstance(place, World)
    checks += network(place.master_addr, place.master_port, first=first, several=several)
    checks += (hub(kind, what) for kind, what in needs.hubs)
    checks += variables(os.environ, tensor_parallel=needs.tensor_parallel, gpus=num_gpus > 0)
    host = f"{socket.gethostname()} (NODE_RANK {place.node_rank})" if several else socket.gethostname()
    return [replace(check, host=host) for check in checks]


def check_started(needs: Needs, world: World) -> list[Check]:
    """Check this machine, start its ranks, and return all checks on the first machine, this one's on others."""
    own = machine_checks(needs, world)
    if any(check.name == f"port {world.master_port}" and check.verdict is Verdict.FAIL for check in own):
        return [*own, Check("ranks", "ranks", Verdict.SKIP, "not started: their port is taken")]
    output_dir = needs.output_dir and needs.output_dir.absolute()
    with tempfile.TemporaryDirectory(prefix="megatune-doctor-") as name:
        report = Path(name, "report.json")
        payload = {"checks": own, "output_dir": output_dir, "timeout": needs.timeout, "report": str(report)}
        code = run_ranks("megatune.doctor.ranks:run_rank", payload, world, Path(name, "launch"))
        if code != ExitCode.DONE:
            found, why = f"ended with exit code {code}", "the lines above say which rank failed, and why"
            return [*own, Check("ranks", "ranks", Verdict.FAIL, found, why, "fix that first")]
        return from_json(report.read_text()) if report.is_file() else own


def check_joined(needs: Needs, place: RankEnv) -> list[Check]:
    """Check as one of torchrun's processes; return the same checks in all of them.

    Raises:
        MegatuneError: UNAVAILABLE, where ranks do not meet.
    """
    from megatune.doctor.ranks import check_together

    own = machine_checks(needs, place) if place.local_rank == 0 else []
    output_dir = needs.output_dir and needs.output_dir.absolute()
    with tempfile.TemporaryDirectory(prefix="megatune-doctor-") as name:
        payload = {"checks": own, "output_dir": output_dir, "timeout": needs.timeout}
        return check_together(RankContext(place, Path(name)), payload)
