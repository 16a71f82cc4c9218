"""Actors of a run: calls, weights on their way, and how the death or the silence of each is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import psutil
import pytest
import ray as module  # before any session: it has no token yet
from ray._raylet import AuthenticationMode, get_authentication_mode

from megatune.errors import ExitCode, MegatuneError
from megatune.launch.world import RankEnv
from megatune.rl.cluster import session
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.cluster.machine import Machine
from megatune.rl.cluster.role import ActorPlacement, RoleGroup, RoleSpec, placements, store
from megatune.rl.pipeline import weights
from megatune.rl.pipeline.weights import Weights
from megatune.rl.transport import Route

WORKER, SERVER = "cluster_workers:Worker", "cluster_workers:server"


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray, once for all tests here, on a disk that passes for full: nothing is there but its store."""
    with (
        mock.patch.dict(os.environ, {"RAY_local_fs_capacity_threshold": "0.0001"}),
        session.ray_session(4, 0, 256 * 2**20, tmp_path_factory.mktemp("ray")),
    ):
        yield
    assert get_authentication_mode() == AuthenticationMode.DISABLED  # as what comes after the run has it


def ended(pids: list[int]) -> bool:
    """Whether processes are gone, or will be in a moment."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_calls_and_one_that_fails(ray: None, tmp_path: Path) -> None:
    train = RoleSpec("actor_train", WORKER, devices=(0, 1), rendezvous=True, environment={"MARK": "a"})
    infer = RoleSpec("actor_infer", SERVER, {"start": 10}, devices=(0, 1), devices_per_actor=2, is_server=True)
    with Cluster(tmp_path, {0, 1}) as cluster:
        groups = cluster.start([train, infer])
        trainer, engine = groups["actor_train"], groups["actor_infer"]
        assert (trainer.size, engine.size) == (2, 1)
        assert trainer.call("add", 2) == [(0, 2), (1, 2)]
        assert trainer.start_each("add", [(1,), (5,)]).result() == [(0, 3), (1, 7)]
        assert trainer.start_one(1, "add", 1).result() == [(1, 8)]
        assert engine.call("add", 1) == [(0, 11)]
        (world, local, address, port, mark), (_, other_local, _, other_port, _) = trainer.call("where")
        assert (world, local, other_local, address, mark) == (2, 0, 1, "127.0.0.1", "a")
        assert port == other_port
        assert engine.call("where")[0][3:] == (None, None)
        with mock.patch("megatune.rl.cluster.role.store", wraps=store) as stored:  # once, for both
            assert trainer.call("size", np.zeros(10**6)) == [(10**6, False)] * 2
        assert stored.call_count == 1
        slow, quick = trainer.start_one(0, "work", "a", 1, 5.0), trainer.start_one(1, "work", "b", 1, 0.0)
        begun = time.monotonic()
        assert quick.result() == [None]
        assert time.monotonic() - begun < 4.5
        assert slow.result() == [None]

        pids = [*trainer.call("pid"), *engine.call("pid"), *trainer.call("child")]
        assert "actor_train-0" in " ".join(psutil.Process(pids[0]).cmdline()), "ps names the role"

        # The rank that failed is blamed, not the one that lost it, though it notices first.
        calls = [trainer.start_one(0, "fail", "Connection closed by peer"), trainer.start_one(1, "fail", "odd", 1.0)]
        with pytest.raises(MegatuneError, match=r"actor_train-1 .*at step 7 \(train\).*RuntimeError: odd") as caught:
            calls[0].result()
        assert caught.value.exit_code == ExitCode.INTERNAL
        assert "in fail" in (tmp_path / "logs" / "actor_train-1.log").read_text()
    assert ended(pids)
    assert "=== actor_infer 0, process" in (tmp_path / "logs" / "actor_infer-0.log").read_text()


def test_only_ranks_launch_kernels_in_order(tmp_path: Path) -> None:
    """Megatron-Core's overlaps count on it; an engine of another project would copy tokens after the next step."""
    cluster = SimpleNamespace(_folder=tmp_path, _gpus={0: "0"}, _joined=False)
    placement, env = ActorPlacement(0, 0, (0,), 0, 1), RankEnv(0, 0, 1, 1, "127.0.0.1", 1, 0)
    variables = [
        Cluster._environment(cluster, RoleSpec(name, WORKER, devices=(0,), rendezvous=meets), placement, env)  # type: ignore[arg-type]
        for name, meets in (("actor_train", True), ("actor_infer", False))
    ]
    assert [each.get("CUDA_DEVICE_MAX_CONNECTIONS") for each in variables] == ["1", None]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == ["0", "0"]


class Loaded(NamedTuple):
    """What `Weights` reads of a role's group."""

    group: RoleGroup
    role: Any
    info: Any = None


@dataclass
class EngineWeights:
    """What `Weights` reads of engines, and sets."""

    group: RoleGroup
    role: Any
    number: int
    on_loss: Any = None


def weights_of(groups: dict[str, RoleGroup], num_tensors: int, number: int = 2) -> Weights:
    run = SimpleNamespace(num_gpus_per_node=8, rpc_timeout=60.0)
    info = SimpleNamespace(num_tensors=num_tensors, on_gpu=False)
    policy = Loaded(groups["actor_train"], SimpleNamespace(devices=(0, 1)), info)
    role = SimpleNamespace(devices=tuple(range(number)), devices_per_engine=1, engine="builtin")
    engines = EngineWeights(groups["actor_infer"], role, number)
    return Weights(SimpleNamespace(run=run), None, policy, engines)  # type: ignore[arg-type]


def test_weights(ray: None, tmp_path: Path) -> None:
    """By both ways that need no GPU: every engine that is there has every bucket, bit for bit, and buffers are used
    again; an engine that was lost is left out, and meets the others again once it is admitted. Where a stream breaks
    off, the trainer is blamed."""
    specs = [
        RoleSpec("actor_train", WORKER, devices=(0, 1), rendezvous=True),
        RoleSpec("actor_infer", SERVER, devices=(0, 1), is_server=True),
    ]
    sizes = [1000, 5, 300_000, 7, 3000]
    taken = {f"n{place}": ((), "torch.int64", [3]) for place in range(5)}
    for place, size in enumerate(sizes):
        taken[f"w{place}"] = (size, 2), "torch.bfloat16", [place + 0.5]
    with Cluster(tmp_path, {0, 1}) as cluster:
        groups = cluster.start(specs)
        trainer, engines = groups["actor_train"], groups["actor_infer"]
        trainer.call("plan", sizes)
        for first, route in ((5, Route("file")), (9, Route("device", (0,), (0, 1), seconds=60.0))):
            with mock.patch.object(weights, "choose_route", return_value=route):
                carried = weights_of(groups, 10)
                for version, present in ((first, 2), (first + 1, 2), (first + 2, 1), (first + 3, 2)):
                    if version == first + 2:
                        engines._actors[1].on_loss()
                    if version == first + 3:
                        engines.admit(1)
                    sent = carried._send_all(version)
                    assert [len(each.contents) for each in sent] == [2] * 5
                    assert sum(each.tensor_bytes for each in sent) == sum(sizes) * 4 + 5 * 8
                    assert engines.call("state") == [(version, taken)] * present
        trainer.call("plan", [10, 10, 10], 1)
        with pytest.raises(MegatuneError, match=r"actor_train-\d .*step 1 \(weights\).*a tensor is missing") as caught:
            weights_of(groups, 6)._send_all(1)
        assert caught.value.exit_code == ExitCode.INTERNAL


RAISES = -1


@pytest.mark.extended(signal.SIGKILL)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, RAISES])
def test_an_engine_is_lost_in_a_broadcast_and_one_in_a_meeting(
    signum: int, ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies, hangs or raises: what the others wait in breaks off, they get all from the first bucket, and it meets
    them again with the next weights."""
    monkeypatch.setattr("megatune.rl.cluster.watch.STOPPED_SECONDS", 1.0)
    specs = [
        RoleSpec("actor_train", WORKER, devices=(0,), rendezvous=True),
        RoleSpec("actor_infer", SERVER, devices=(0, 1, 2), is_server=True, restarts=1),
    ]
    route = Route("device", (0,), (0, 1, 2), seconds=600.0)
    with Cluster(tmp_path, {0, 1, 2}) as cluster, mock.patch.object(weights, "choose_route", return_value=route):
        groups = cluster.start(specs)
        engines = groups["actor_infer"]
        carried = weights_of(groups, 10, 3)
        engines.on_loss = lambda rank: carried._abort()
        groups["actor_train"].call("plan", [1000, 5, 300_000, 7, 3000])
        engines.start_one(1, "doom", signum, False).result()
        began = time.monotonic()
        assert len(carried._send_all(5)) == 5
        assert time.monotonic() - began < 300, "nobody waits for the timeout of a broadcast"
        assert engines.ranks == [0, 2]
        assert engines.run(engines.restart(1))
        engines.admit(1)
        assert len(carried._send_all(6)) == 5
        states = engines.call("state")
        assert [version for version, _ in states] == [6, 6, 6]
        assert states[0] == states[1] == states[2]
        engines.start_one(2, "doom", signum, True).result()
        engines.changes += 1  # they meet anew
        began = time.monotonic()
        assert len(carried._send_all(7)) == 5
        assert time.monotonic() - began < 100, "nobody waits for the timeout of a meeting"
        assert [version for version, _ in engines.call("state")] == [7, 7]


NOTHING = 0


@pytest.mark.extended(signal.SIGSEGV)
@pytest.mark.parametrize(
    ("role", "signum", "says"),
    [
        ("actor_infer", signal.SIGKILL, r"at step 4 \(generate\), was killed: the kernel's out-of-memory killer, or"),
        ("actor_infer", signal.SIGSEGV, r"at step 4 \(generate\), died: Segmentation fault"),
        ("reward", signal.SIGKILL, r"before the first step \(idle\), was killed"),  # it has nothing to do meanwhile
        ("actor_infer", signal.SIGSTOP, r"hung at step 4 \(generate\): no progress .*\n.*its process is stopped"),
        (
            "actor_infer",
            NOTHING,
            r"hung at step 4 \(generate\): no progress for \d+ s\n.*it is in work \(.*cluster_w",
        ),
    ],
)
def test_an_actor_dies_or_hangs(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, signum: int, says: str
) -> None:
    monkeypatch.setattr("megatune.rl.cluster.watch.STOPPED_SECONDS", 1.0)
    specs = [RoleSpec("actor_infer", SERVER, devices=(0,), is_server=True), RoleSpec("reward", WORKER, devices=(0,))]
    with Cluster(tmp_path, {0}) as cluster:
        groups = cluster.start(specs)
        pids = [groups[name].call("pid")[0] for name in groups]
        call = groups["actor_infer"].start("work", "generate", 4, 60.0, 30.0 if signum else 4.0)
        groups["reward"].run(asyncio.sleep(1.0))
        os.kill(pids[list(groups).index(role)], signum)
        with pytest.raises(MegatuneError, match=rf"{role}-0 on host \S+?,? {says}") as caught:
            call.result()
        assert caught.value.exit_code == ExitCode.PROCESS_DIED
        with pytest.raises(MegatuneError, match=f"{role}-0"):
            groups["reward"].call("pid")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["culprit"], report["exit_code"]) == (f"{role}-0", 76)
    assert ended(pids)


def test_an_actor_that_may_be_started_again(ray: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Calls go on with the other one until it is admitted; as often as it may, and then its death ends the run."""
    spec = RoleSpec("actor_infer", SERVER, {"start": 10}, devices=(0, 1), is_server=True, restarts=1)
    lost: list[int] = []
    with Cluster(tmp_path, {0, 1}) as cluster:
        engines = cluster.start([spec])["actor_infer"]
        engines.on_loss = lost.append
        first = engines.call("pid")[1]
        call = engines.start("work", "generate", 4, 3.0)
        os.kill(first, signal.SIGKILL)
        assert call.result() == [None]
        assert (lost, engines.ranks) == ([1], [0])
        assert engines.call("add", 1) == [(0, 11)]
        assert engines.run(engines.restart(1))
        assert engines.call("add", 1) == [(0, 12)]
        engines.admit(1)
        assert engines.call("add", 1) == [(0, 13), (1, 11)]
        os.kill(engines.call("pid")[1], signal.SIGKILL)
        with pytest.raises(MegatuneError, match=r"actor_infer-1 on host \S+, .* was killed"):
            engines.run(asyncio.sleep(60))
    said = capfd.readouterr().err
    assert said.startswith("warning: actor_infer-1 on host ")
    assert "started again (no more restarts of it: max_engine_restarts)" in said


def test_an_actor_that_raises(ray: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it did not expect counts as its death; what its message explains ends the run."""
    spec = RoleSpec("actor_infer", SERVER, {"start": 10}, devices=(0, 1), is_server=True, restarts=2)
    with Cluster(tmp_path, {0, 1}) as cluster:
        engines = cluster.start([spec])["actor_infer"]
        failing = engines.start_one(1, "fail", "an illegal memory access was encountered")
        waiting = engines.start("work", "generate", 4, 3.0)  # of the other one, it comes after what fails
        assert failing.result() == []
        assert waiting.result() == [None]
        assert engines.run(engines.restart(1))
        engines.admit(1)
        assert engines.call("add", 1) == [(0, 11), (1, 11)]
        with pytest.raises(MegatuneError, match="this model has no such layer") as caught:
            engines.start_one(1, "refuse", "this model has no such layer").result()
        assert caught.value.exit_code == ExitCode.INPUT
    (said,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: "))
    assert "failed: RuntimeError: an illegal memory access was encountered. It is started again" in said


def test_an_error_of_the_driver_that_nothing_awaits(ray: None, tmp_path: Path) -> None:
    """A callback that raises would leave the run waiting for what it was to bring."""

    def dispatch() -> None:
        raise KeyError("engine 7")

    with Cluster(tmp_path, {0}) as cluster:
        engines = cluster.start([RoleSpec("actor_infer", SERVER, devices=(0,), is_server=True)])["actor_infer"]
        engines.loop.call_soon(dispatch)
        with pytest.raises(KeyError, match="engine 7"):
            engines.run(asyncio.sleep(60))


def test_an_engine_that_never_answers(ray: None, tmp_path: Path) -> None:
    with Cluster(tmp_path, {0}, call_limit=2.0) as cluster:
        engine = cluster.start([RoleSpec("actor_infer", WORKER, devices=(0,))])["actor_infer"]
        cluster.note("rollout", 3)
        where = r"actor_infer-0 on host \S+ hung at step 3 \(rollout: step\): no answer to work within 2 s"
        with pytest.raises(MegatuneError, match=rf"{where}\n.*it is in work") as caught:
            engine.call("work", "step", 0, 600.0)
        assert caught.value.exit_code == ExitCode.PROCESS_DIED


def test_an_actor_whose_process_does_not_come(tmp_path: Path) -> None:
    """It has no number yet; 0 would be the driver and all that its shell has started with it."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        (activity,) = Machine(tmp_path, "127.0.0.1").stacks({"actor_infer-0": 0}).values()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not got
    assert not activity.stack


@pytest.mark.extended
def test_a_stranger_has_the_port(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = RoleSpec("actor_train", WORKER, devices=(0, 1), rendezvous=True)
    with socket.create_server(("127.0.0.1", 0)) as stranger, Cluster(tmp_path, {0, 1}) as cluster:
        port = stranger.getsockname()[1]
        monkeypatch.setattr(Machine, "free_port", lambda machine: port)
        trainer = cluster.start([train])["actor_train"]
        says = rf"rank 0 on \S+ could not connect to the other 1 ranks at 127.0.0.1:{port}"
        with pytest.raises(MegatuneError, match=rf"{says}\n.*why: .*(in use|listen)(.|\n)*start again") as caught:
            trainer.start_one(0, "join").result()
        assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_a_store_that_is_full(ray: None) -> None:
    """And a disk without room for what does not fit."""
    part = np.zeros(64 * 2**20, np.uint8)
    with pytest.raises(MegatuneError, match="store has no room for the arguments of a call") as caught:
        [store(part) for _ in range(8)]
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY


def driver(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("cluster_driver.py")), str(folder), *words]
    pipe, env = subprocess.PIPE, {**os.environ, **environment}
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe if words else None, text=True)


def test_a_cluster_that_is_running(ray: None, tmp_path: Path) -> None:
    """Another driver joins it, and leaves it as it was."""
    with driver(tmp_path, RAY_ADDRESS=module.get_runtime_context().gcs_address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["where"][:2] == [1, 0]
        assert told["where"][2] != "127.0.0.1"  # where other machines reach it
        process.stdin.close()
        assert process.wait(60) == 0
    assert ended(told["actors"])
    assert module.available_resources()["CPU"] == module.cluster_resources()["CPU"]


def test_nothing_outlives_a_driver(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        time.sleep(6)
        process.kill()
    assert len(told["pids"]) > 5
    assert ended(told["pids"])
    assert not list(Path(tempfile.gettempdir()).glob(f"mt-{process.pid}-*"))


@pytest.mark.extended("raylet")
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_process_of_rays_own_dies(tmp_path: Path, name: str) -> None:
    with driver(tmp_path, "work") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        time.sleep(6)  # until it is known what the actor has started
        next(each for each in psutil.Process(process.pid).children() if each.name() == name).kill()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == ExitCode.PROCESS_DIED  # Ray would look for it for a minute, and abort
    assert f"Ray's {name} (process " in errors
    assert "at step 3 (rollout), died" in errors
    assert ended(told["pids"])
    assert not list(Path(tempfile.gettempdir()).glob(f"mt-{process.pid}-*"))


def test_where_actors_are() -> None:
    ranks = placements(RoleSpec("a", "", devices=(0, 1, 8, 9), rendezvous=True), 8, [0, 1])
    assert ranks[2] == ActorPlacement(2, 1, (8, 9), 0, 2)
    engines = placements(RoleSpec("a", "", devices=(8, 9, 10, 11), devices_per_actor=2), 8, [1])
    assert engines == [ActorPlacement(0, 0, (8, 9), 0, 2), ActorPlacement(1, 0, (10, 11), 1, 2)]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(MegatuneError, match="2 machines, of 8 devices") as caught:
        Cluster(tmp_path, {0, 8})
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9 2.0.0\n")
    other.chmod(0o755)
    with pytest.raises(MegatuneError, match=r"python has 3\.9 2\.0\.0(.|\n)*nowhere does not run") as caught:
        session.ensure_pythons([str(other), "nowhere"])
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MegatuneError, match=r"megatune\[rl\]") as caught:
        Cluster(tmp_path, {0})
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
