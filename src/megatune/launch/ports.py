"""TCP ports of this machine, for the store where the ranks of a run meet."""

from __future__ import annotations

import random
import socket

from megatune.errors import ExitCode, Finding, MegatuneError

# Below the kernel's ephemeral range, so that no outgoing connection takes the port between the choice and its use.
FREE_PORTS = range(20000, 30000)


def find_free_port() -> int:
    """A TCP port that nothing on this machine holds."""
    for port in random.SystemRandom().sample(FREE_PORTS, 100):
        if is_port_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    """Whether a process of this machine could listen on `port`, on every interface."""
    with socket.socket() as probe:
        # As the store of torch.distributed does: a port left in TIME_WAIT by an earlier run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def ensure_port_free(port: int) -> None:
    """Refuses a port on which rank 0 could not listen.

    Raises:
        MegatuneError: UNAVAILABLE, naming the port and who holds it.
    """
    if not is_port_free(port):
        raise MegatuneError(
            Finding(
                f"port {port} of this machine is taken{_holder(port)}",
                why="rank 0 would listen there for the other ranks",
                fix="another MASTER_PORT, the same on every machine",
            ),
            ExitCode.UNAVAILABLE,
        )


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""
