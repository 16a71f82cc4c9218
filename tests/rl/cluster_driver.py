"""A driver of its own: starts an actor, says which processes there are, and waits to be told to end, or with a second
word for its actor, which is at work for long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from megatune.errors import MegatuneError
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.cluster.role import RoleSpec


def main() -> None:
    with Cluster(Path(sys.argv[1]), {0}) as cluster:
        group = cluster.start([RoleSpec("policy", "cluster_workers:Worker", devices=(0,), rendezvous=True)])["policy"]
        where = group.call("where")[0]
        actors = [*group.call("pid"), *group.call("child")]
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps({"where": where, "actors": actors, "pids": [*pids, *actors]}), flush=True)
        if sys.argv[2:]:
            cluster.note("rollout", 3)
            group.call("work", "step", 0, 600.0)
        sys.stdin.readline()


if __name__ == "__main__":
    try:
        main()
    except MegatuneError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
