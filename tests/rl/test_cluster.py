"""Actors of a run: calls, weights on their way, and how the death or the silence of each is told."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.rl.cluster import session
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.cluster.role import RoleSpec, Seat, seats
from megatune.rl.cluster.weights import sync_weights

WORKER = "cluster_workers:Worker"


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray, once for all tests here."""
    with session.ray_session(4, 0, 256 * 2**20, tmp_path_factory.mktemp("ray")):
        yield


def ended(pids: list[int]) -> bool:
    """Whether processes are gone, or will be in a moment."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_calls_and_weights(ray: None, tmp_path: Path) -> None:
    train = RoleSpec("actor_train", WORKER, devices=(0, 1), rendezvous=True, environment={"MARK": "a"})
    infer = RoleSpec("actor_infer", WORKER, {"start": 10}, devices=(0, 1), devices_per_actor=2)
    with Cluster(tmp_path, {0, 1}) as cluster:
        groups = cluster.start([train, infer])
        trainer, engine = groups["actor_train"], groups["actor_infer"]
        assert (trainer.size, engine.size) == (2, 1)
        assert trainer.call("add", 2) == [(0, 2), (1, 2)]
        assert trainer.call_each("add", [(1,), (5,)]) == [(0, 3), (1, 7)]
        assert trainer.call_one(1, "add", 1) == (1, 8)
        assert engine.call("add", 1) == [(0, 11)]
        (world, local, address, port, mark), (_, other_local, _, other_port, _) = trainer.call("where")
        assert (world, local, other_local, address, mark) == (2, 0, 1, "127.0.0.1", "a")
        assert port == other_port
        assert engine.call("where")[0][3:] == (None, None)
        assert trainer.call("size", np.zeros(10**6)) == [(10**6, False)] * 2
        slow, quick = trainer.start_one(0, "work", "a", 1, 1.0), trainer.start_one(1, "work", "b", 1, 0.0)
        assert cluster.wait([slow, quick], seconds=0.9) == [quick]
        assert slow.result() == [None]

        sync = sync_weights(trainer, engine, 5, [1000, 2000, 3000], num_tensors=3)
        assert (sync.tensors, sync.bytes, sync.buckets) == (3, 6000 * 2 * 2, 3)
        taken = {"w0": ((1000, 2), 0.0), "w1": ((2000, 2), 4000.0), "w2": ((3000, 2), 12000.0)}
        assert engine.call("state") == [(5, taken)]
        # The trainer is held up while the engine has not taken what is there: far more than the store holds goes through.
        sizes = [5 * 2**20] * 30  # of 20 MiB each
        assert sync_weights(trainer, engine, 6, sizes, num_tensors=30).bytes == 30 * 20 * 2**20

        pids = [*trainer.call("pid"), *engine.call("pid"), *trainer.call("child")]
    assert ended(pids)
    assert "=== actor_infer 0, process" in (tmp_path / "logs" / "actor_infer-0.log").read_text()


Deed = Callable[[int], None]


@pytest.mark.parametrize(
    ("role", "deed", "says"),
    [
        ("actor_infer", lambda pid: os.kill(pid, signal.SIGKILL), "at step 4 (generate), was killed"),
        ("reward", lambda pid: os.kill(pid, signal.SIGKILL), "was killed"),  # it has nothing to do meanwhile
        ("actor_infer", lambda pid: os.kill(pid, signal.SIGSTOP), "hung at step 4 (generate)"),
    ],
)
def test_a_dead_or_stopped_actor(ray: None, tmp_path: Path, role: str, deed: Deed, says: str) -> None:
    specs = [RoleSpec("actor_infer", WORKER, devices=(0,)), RoleSpec("reward", WORKER)]
    with Cluster(tmp_path, {0}) as cluster:
        groups = cluster.start(specs)
        pids = [groups[name].call_one(0, "pid") for name in groups]
        call = groups["actor_infer"].start("work", "generate", 4, 60.0)
        cluster.wait([call], seconds=1.0)
        deed(pids[list(groups).index(role)])
        begun = time.monotonic()
        with pytest.raises(MegatuneError, match=rf"{role}-0 on host") as caught:
            call.result()
        assert time.monotonic() - begun < 12
        assert says in str(caught.value)
        assert caught.value.exit_code == ExitCode.PROCESS_DIED
        with pytest.raises(MegatuneError, match=f"{role}-0"):
            groups["reward"].call("pid")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["culprit"], report["exit_code"]) == (f"{role}-0", 76)
    assert ended(pids)


def test_the_first_cause(ray: None, tmp_path: Path) -> None:
    """A rank that crashes is blamed, not the one that lost it; one that hangs is shown where it is; a stream breaks."""
    train = RoleSpec("actor_train", WORKER, devices=(0, 1), rendezvous=True)
    with Cluster(tmp_path, {0, 1}) as cluster:
        trainer = cluster.start([train])["actor_train"]
        calls = [trainer.start_one(0, "fail", "Connection closed by peer"), trainer.start_one(1, "fail", "odd", 1.0)]
        with pytest.raises(MegatuneError, match=r"actor_train-1 .*at step 7 \(train\).*RuntimeError: odd") as caught:
            cluster.wait(calls)
        assert caught.value.exit_code == ExitCode.INTERNAL
        assert "in fail" in (tmp_path / "logs" / "actor_train-1.log").read_text()
