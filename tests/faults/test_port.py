"""A port that another program holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch_run import LIMIT

from megatune.errors import ExitCode


def test_a_taken_port_is_named_before_any_rank_starts(tmp_path: Path, told: Callable[..., None]) -> None:
    script = (
        "import sys; from pathlib import Path; from megatune.errors import MegatuneError\n"
        "from megatune.launch.supervisor import run_ranks; from megatune.launch.world import World\n"
        "world = World(1, 0, 2, '127.0.0.1', int(sys.argv[1]))\n"
        "try: run_ranks('launch_targets:finish', {}, world, Path(sys.argv[2]))\n"
        "except MegatuneError as error: print(error); sys.exit(error.exit_code)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", script, str(port), str(tmp_path)], capture_output=True, text=True, timeout=LIMIT
        )
    seconds = time.monotonic() - began
    assert ended.returncode == ExitCode.UNAVAILABLE
    assert f"port {port} of this machine is taken by process {os.getpid()}" in ended.stdout
    assert not any(Path(tmp_path).iterdir())
    got = ended.stdout.splitlines()[0].replace(f"port {port}", "port 29500")
    told(case="T9", fault="another program holds the port of MASTER_PORT", got=got, seconds=seconds)
