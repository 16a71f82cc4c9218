"""Runs `run_ranks` as a command does: launch_driver.py TARGET RUN_DIR NPROC PAYLOAD OPTIONS (both JSON)."""

import json
import signal
import sys
from pathlib import Path

from megatune.launch import devices
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import decide_world

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    target, run_dir, nproc, payload, options = sys.argv[1:]
    world = decide_world(int(nproc), num_processes=None, num_devices=0, env={})
    arguments = json.loads(options)
    if name := arguments.pop("stop_file_name", None):
        arguments["stop_file"] = Path(name)
    payload = json.loads(payload)
    if "counters" in payload:
        devices._CGROUPS = Path(payload["counters"])
    sys.exit(run_ranks(target, payload, world, Path(run_dir), **arguments))
