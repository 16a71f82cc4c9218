"""Which world a run gets, and which contradictions are refused."""

from __future__ import annotations

import socket

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.launch.devices import count_gpus
from megatune.launch.world import World, decide_world, is_port_free, torchrun_env

TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}


@pytest.mark.parametrize(
    ("model_parallel_size", "num_processes", "num_devices", "env", "nproc", "world_size"),
    [
        (1, None, 0, {}, 1, 1),
        (4, None, 0, {}, 4, 4),  # a CPU: the smallest that holds the model
        (4, 8, 0, {}, 8, 8),
        (2, None, 8, {}, 8, 8),  # GPUs: all of them
        (2, 4, 8, {}, 4, 4),
        (2, None, 0, {"NPROC_PER_NODE": "6"}, 6, 6),
        (2, 6, 0, {"NPROC_PER_NODE": "6"}, 6, 6),
        (4, None, 0, TWO_NODES, 2, 4),
        (1, None, 0, TWO_NODES, 1, 2),
        (16, None, 8, TWO_NODES, 8, 16),
        (2, 8, 8, TWO_NODES, 4, 8),
    ],
)
def test_worlds(model_parallel_size, num_processes, num_devices, env, nproc, world_size):
    world = decide_world(model_parallel_size, num_processes=num_processes, num_devices=num_devices, env=env)
    assert (world.nproc_per_node, world.world_size) == (nproc, world_size)


def test_places_of_a_second_machine():
    world = decide_world(1, num_processes=None, num_devices=4, env=TWO_NODES | {"MASTER_PORT": "1234"})
    assert world == World(nnodes=2, node_rank=1, nproc_per_node=4, master_addr="node-0", master_port=1234)
    env = world.rank_env(3)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (7, 3, 8, 4)
    assert torchrun_env(env.variables()) == env


def test_a_free_port_is_chosen_on_one_machine():
    world = decide_world(1, num_processes=None, num_devices=0, env={})
    assert world.master_addr == "127.0.0.1"
    assert is_port_free(world.master_port)
    with socket.create_server(("127.0.0.1", world.master_port)):
        assert not is_port_free(world.master_port)


@pytest.mark.parametrize(
    ("model_parallel_size", "num_processes", "num_devices", "env", "texts"),
    [
        (1, 4, 0, {"NPROC_PER_NODE": "2"}, ["num_processes: 4 contradicts NPROC_PER_NODE=2"]),
        (1, 3, 0, TWO_NODES, ["num_processes: 3 cannot be spread evenly over NNODES=2", "fix: num_processes: 4"]),
        (1, None, 0, {"NNODES": "2", "NODE_RANK": "0"}, ["NNODES=2 without MASTER_ADDR"]),
        (1, None, 0, {"NNODES": "2", "MASTER_ADDR": "a"}, ["NNODES=2 without NODE_RANK"]),
        (1, None, 0, TWO_NODES | {"NODE_RANK": "2"}, ["NODE_RANK=2 is outside of NNODES=2"]),
        (1, None, 0, {"NODE_RANK": "1"}, ["NODE_RANK=1 is outside of NNODES=1"]),
        (1, None, 0, {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is not a whole number from 1 to 65535"]),
        (4, 6, 0, {}, ["6 processes cannot hold whole copies", "num_processes: 4"]),
        (3, None, 8, {}, ["8 processes cannot hold whole copies", "num_processes: 6"]),
        (1, 4, 2, {}, ["4 processes on a machine that shows 2 GPUs"]),
        # all at once
        (2, 3, 0, {"NNODES": "x", "MASTER_PORT": "0"}, ["NNODES=x", "MASTER_PORT=0", "3 processes cannot hold"]),
    ],
)
def test_contradictions_are_refused(model_parallel_size, num_processes, num_devices, env, texts):
    with pytest.raises(MegatuneError) as caught:
        decide_world(model_parallel_size, num_processes=num_processes, num_devices=num_devices, env=env)
    assert caught.value.exit_code == ExitCode.SETTINGS
    for text in texts:
        assert text in str(caught.value)


def test_only_a_whole_torchrun_environment_counts_as_joined():
    assert torchrun_env({}) is None
    assert torchrun_env({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "2"}, "RANK=2 is not a whole number from 0 to 1"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one"),
        ({"MASTER_ADDR": ""}, "RANK is set without MASTER_ADDR"),
        ({"MASTER_PORT": ""}, "RANK is set without MASTER_PORT"),
    ],
)
def test_a_torchrun_environment_that_contradicts_is_refused(change, text):
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert torchrun_env(env) is not None
    with pytest.raises(MegatuneError, match=text) as caught:
        torchrun_env(env | change)
    assert caught.value.exit_code == ExitCode.SETTINGS


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("0,9,1", 1), ("GPU-6c1d2c5f,GPU-0a9b", 2)],
)
def test_visible_gpus_are_counted_as_cuda_does(tmp_path, monkeypatch, visible, count):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count
