"""The world of a run: its processes, its machines, and the address of the rendezvous."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.references import assign

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # for several machines without MASTER_PORT; torchrun's default, too
# Below the kernel's ephemeral range, so that no outgoing connection takes the port before it is used.
FREE_PORTS = range(20000, 30000)


@dataclass(frozen=True, slots=True)
class RankEnv:
    """One process of a run, as in torchrun's environment variables."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    node_rank: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True, slots=True)
class World:
    """All processes of a run, seen from one machine ("node")."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def rank_env(self, local_rank: int) -> RankEnv:
        """Return the RankEnv of this machine's process `local_rank`."""
        rank = self.node_rank * self.nproc_per_node + local_rank
        local = self.nproc_per_node
        return RankEnv(rank, local_rank, self.world_size, local, self.master_addr, self.master_port, self.node_rank)


def _integer(
    env: Mapping[str, str], findings: list[Finding], key: str, default: int = 0, low: int = 0, high: float = math.inf
) -> int:
    """Read an integer from an environment. Invalid values are added to `findings`."""
    text = env.get(key, "").strip()
    with contextlib.suppress(ValueError):
        if not text or low <= int(text) <= high:
            return int(text or default)
    allowed = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
    findings.append(Finding(f"{key}={text} is not a whole number {allowed}", "environment"))
    return default


def decide_world(
    model_parallel_size: int, *, num_processes: int | None, num_devices: int, env: Mapping[str, str]
) -> World:
    """Decide the world of a run that this process starts.

    Without num_processes and NPROC_PER_NODE, a machine with GPUs starts one process for each GPU, and a CPU machine the
    fewest processes that hold the model.

    Args:
        model_parallel_size: processes of one copy of the model and of its experts.
        num_processes: the user's total number of processes on all machines, or None.
        num_devices: GPUs of this machine, 0 on a CPU machine (`devices.count_gpus`).
        env: has NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT, if set.

    Raises:
        MegatuneError: SETTINGS, with all contradictions; settings are in backticks, see `config.settings`.
    """
    findings: list[Finding] = []
    nnodes = _integer(env, findings, "NNODES", 1, low=1)
    node_rank = _integer(env, findings, "NODE_RANK")
    nproc_set = _integer(env, findings, "NPROC_PER_NODE", low=1) or None
    port_set = _integer(env, findings, "MASTER_PORT", low=1, high=65535)
    addr_set = env.get("MASTER_ADDR", "").strip()
    findings += _check_nodes(nnodes, node_rank, addr_set, env)
    nproc, contradictions = _decide_nproc(model_parallel_size, nnodes, num_processes, nproc_set, num_devices)
    if findings := findings + contradictions:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if nnodes == 1:
        return World(1, 0, nproc, addr_set or LOOPBACK, port_set or find_free_port())
    return World(nnodes, node_rank, nproc, addr_set, port_set or DEFAULT_PORT)


def _check_nodes(nnodes: int, node_rank: int, addr: str, env: Mapping[str, str]) -> list[Finding]:
    findings = []
    numbers = f"NODE_RANK from 0 to {nnodes - 1}, a different one on each machine"
    if node_rank >= nnodes:
        what, fix = f"NODE_RANK={node_rank} is outside of NNODES={nnodes}", f"{numbers}, or NNODES={node_rank + 1}"
        findings.append(Finding(what, "environment", "machines are numbered from 0", fix))
    if nnodes > 1 and not addr:
        fix = "MASTER_ADDR=<host name or address of the machine with NODE_RANK=0>, the same on every machine"
        what = f"NNODES={nnodes} without MASTER_ADDR"
        findings.append(Finding(what, "environment", "the machines cannot find each other", fix))
    if nnodes > 1 and not env.get("NODE_RANK", "").strip():
        what = f"NNODES={nnodes} without NODE_RANK"
        findings.append(Finding(what, "environment", "every machine would act as the first one", numbers))
    return findings


def _decide_nproc(
    model_parallel_size: int, nnodes: int, num_processes: int | None, nproc_set: int | None, num_devices: int
) -> tuple[int, list[Finding]]:
    """Decide the number of processes of this machine, and find contradictions."""
    findings = []
    smallest = math.lcm(model_parallel_size, nnodes) // nnodes
    if num_processes is not None and (num_processes < nnodes or num_processes % nnodes):
        nearest = max(1, round(num_processes / nnodes)) * nnodes
        what = f"num_processes: {num_processes} cannot be spread evenly over NNODES={nnodes} machines"
        findings.append(Finding(what, fix=assign("num_processes", nearest)))
        num_processes = None
    if num_processes is not None and nproc_set is not None and num_processes != nproc_set * nnodes:
        what = f"num_processes: {num_processes} contradicts NPROC_PER_NODE={nproc_set}"
        why = f"{nproc_set} processes on each of {nnodes} machines are {nproc_set * nnodes}"
        findings.append(
            Finding(what, "", why, f"leave one of them out, or {assign('num_processes', nproc_set * nnodes)}")
        )
        return nproc_set, findings
    nproc = num_processes // nnodes if num_processes is not None else nproc_set or num_devices or smallest
    if num_devices and nproc > num_devices:
        what = f"{nproc} processes on a machine that shows {num_devices} GPUs"
        fix = f"{assign('num_processes', num_devices * nnodes)}, or CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        findings.append(Finding(what, "", "each process needs a GPU of its own", fix))
    if nproc % smallest:
        nearest, total = max(1, nproc // smallest) * smallest * nnodes, nproc * nnodes
        what = f"{total} processes cannot hold whole copies of a model that is spread over {model_parallel_size}"
        why = "it must be a multiple of the processes of one copy of the model and of its experts"
        fix = f"{assign('num_processes', nearest)}, or parallel sizes whose product divides {total}"
        findings.append(Finding(what, "", why, fix))
    return nproc, findings


def torchrun_env(env: Mapping[str, str]) -> RankEnv | None:
    """Return this process's RankEnv if torchrun, or a launcher with the same variables, started it, else None.

    It is detected by RANK, LOCAL_RANK and WORLD_SIZE: some clusters set only RANK and WORLD_SIZE, for machines.

    Raises:
        MegatuneError: SETTINGS, if the variables contradict each other.
    """
    if not all(env.get(key) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return None
    findings: list[Finding] = []
    world_size = _integer(env, findings, "WORLD_SIZE", 1, low=1)
    rank = _integer(env, findings, "RANK", high=world_size - 1)
    local_world_size = _integer(env, findings, "LOCAL_WORLD_SIZE", world_size, low=1, high=world_size)
    local_rank = _integer(env, findings, "LOCAL_RANK", high=local_world_size - 1)
    node_rank = _integer(env, findings, "GROUP_RANK", rank // local_world_size)
    port = _integer(env, findings, "MASTER_PORT", low=1, high=65535)
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not env.get(key, "").strip()]
    findings += [Finding(f"RANK is set without {key}", "environment", fix="start with torchrun") for key in missing]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return RankEnv(rank, local_rank, world_size, local_world_size, env["MASTER_ADDR"], port, node_rank)


def find_free_port() -> int:
    """Find a free TCP port of this machine."""
    for port in random.SystemRandom().sample(FREE_PORTS, 100):
        if is_port_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    """Return whether a process could listen on `port` on all interfaces."""
    with socket.socket() as probe:
        # As torch.distributed's store does: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def ensure_port_free(port: int) -> None:
    """Check that rank 0 can listen on a port.

    Raises:
        MegatuneError: UNAVAILABLE, naming the port and the process that uses it.
    """
    if not is_port_free(port):
        what, why = f"port {port} of this machine is taken{_holder(port)}", "rank 0 would listen there for the others"
        fix = "another MASTER_PORT, the same on every machine"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.UNAVAILABLE)


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
