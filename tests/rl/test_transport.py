"""How weights travel: which way is chosen, and that every byte arrives by each of them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from pool import RankPool
from torch.distributed import TCPStore

from megatune.errors import ExitCode, MegatuneError
from megatune.rl import transport
from megatune.rl.broadcast import LostPeerError
from megatune.rl.transport import PackedBucket, Receiver, Route, Sender, choose_route, merge_buckets


def chosen(trainer: list[int], engines: list[int], *, on_gpus: bool) -> Route:
    return choose_route(trainer, engines, 8, on_gpus=on_gpus, seconds=60.0)


def test_the_way_follows_from_where_the_processes_are() -> None:
    # A CPU: memory of the machine, between machines gloo.
    assert chosen([0, 1], [0, 2], on_gpus=False) == Route("file", (0,), (), seconds=60.0)
    assert chosen([0, 1], [0, 8], on_gpus=False) == Route("device", (0,), (0, 1), seconds=60.0)
    # GPUs: each engine reads the buffer on its own GPU; from others NCCL brings it, and no GPU is in a group twice.
    ranks = (0, 1, 2, 3)
    assert chosen([*ranks], [*ranks], on_gpus=True) == Route("device", ranks, (), ranks, seconds=60.0)
    assert chosen([0, 1], [2, 3], on_gpus=True) == Route("device", (0,), (0, 1), (), seconds=60.0)
    assert chosen([0, 1], [1, 2, 9], on_gpus=True) == Route("device", (0, 1), (1, 2), (1,), seconds=60.0)
    assert chosen([8, 9], [9], on_gpus=True) == Route("device", (1,), (), (1,), seconds=60.0)


def buckets(device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Of several dtypes and sizes, a scalar and an odd number of bytes among them; the second one is the largest."""
    drawn = torch.Generator().manual_seed(0)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(device, dtype)

    return [
        {"a": made(7, dtype=torch.float16), "b": made(3, 5), "c": torch.tensor(4, device=device)},
        {"d": made(300, 70, dtype=torch.bfloat16), "e": made(9).to(torch.float8_e4m3fn), "f": made(0, 4)},
        {"g": made(2, 2, dtype=torch.float64).T},
        {"h": torch.arange(200, dtype=torch.uint8, device=device)},
    ]


def receive(route: Route, number: int, device: str, pipe: Connection) -> None:
    """In a process of its own: send back what arrives, as bytes."""
    receiver = Receiver(route, number, torch.device(device))
    while (packed := pipe.recv()) is not None:
        with receiver.opened(packed) as tensors:
            pipe.send({name: (each.dtype, each.shape, raw(each)) for name, each in tensors.items()})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(route: Route, receivers: int, device: str = "cpu") -> list[PackedBucket]:
    """Send buckets to receivers in processes of their own, and compare every bit."""
    # The server of the pool has imported torch already; a process that has forked cannot use CUDA.
    context = get_context("spawn" if device == "cuda" else "forkserver")
    sender, sent = Sender(route, torch.device(device)), list[PackedBucket]()
    route = sender.open("127.0.0.1")
    pipes, processes = [], []
    for number in range(receivers):
        pipe, theirs = context.Pipe()
        places = torch.cuda.device_count() if device == "cuda" else 0
        own = f"cuda:{(number + (1 if route.listeners else 0)) % places}" if places else "cpu"
        processes.append(context.Process(target=receive, args=(route, number, own, theirs), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    sender.join()
    for bucket in [*buckets(device), *buckets(device)]:
        packed = merge_buckets([sender.pack(bucket), None])
        assert packed is not None
        sent.append(packed)
        for pipe in pipes:
            pipe.send(packed)
        sender.broadcast()
        expected = {name: (each.dtype, each.shape, raw(each)) for name, each in bucket.items()}
        for pipe in pipes:
            assert pipe.poll(120), "nothing arrived"
            assert pipe.recv() == expected
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(60)
    sender.free()
    return sent


def test_through_the_memory_of_a_machine(pool: RankPool) -> None:
    sent = check(Route("file"), 2)
    numbers = {name: each for bucket in buckets() for name, each in bucket.items()}
    assert sum(each.tensor_bytes for each in sent) == 2 * sum(each.nbytes for each in numbers.values())
    # A buffer is used again where it is large enough: bytes are in memory twice at most.
    assert len({each.file for each in sent}) < len(sent)
    assert all(not each.handles for each in sent)


def test_by_gloo(pool: RankPool) -> None:
    sent = check(Route("device", (0,), (0, 1), seconds=60.0), 2)
    assert all(not each.file and not each.handles for each in sent), "Ray carries no bytes"


def test_nobody_waits_in_a_meeting_for_an_engine_that_was_lost() -> None:
    """One of two listeners comes; both processes that are there learn of the other in their first broadcast."""
    cpu, sent = torch.device("cpu"), Route("device", (0,), (0, 1), seconds=60.0)
    sender = Sender(sent, cpu)
    route = sender.open("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        meeting, coming = threads.submit(sender.join), threads.submit(Receiver, route, 0, cpu)
        route.abort()
        meeting.result(60)
        receiver = coming.result(60)
    packed = sender.pack(buckets()[0])
    with pytest.raises(LostPeerError):
        sender.broadcast()
    with pytest.raises(LostPeerError), receiver.opened(packed):
        pass


def test_versions_of_nccl_that_do_not_connect_are_named() -> None:
    sender = Sender(Route("device", (0,), (0,), seconds=60.0), torch.device("cpu"))
    route = sender.open("127.0.0.1")
    TCPStore(route.address, route.port, None, wait_for_workers=False).set("joined1", "2.29.3")  # as a listener does
    with pytest.raises(MegatuneError, match=r"a rollout engine 2\.29\.3[^?]*py_executable") as caught:
        sender.join()
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_only_a_rank_whose_gpu_an_engine_shares_gives_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees no memory of which a handle was given that nobody has opened."""
    ensure, cpu = transport._Memory.ensure, torch.device("cpu")
    monkeypatch.setattr(transport._Memory, "ensure", lambda self, nbytes, device: ensure(self, nbytes, cpu))
    monkeypatch.setattr(transport, "_uuid", lambda: "gpu")
    monkeypatch.setattr(transport, "_handle", lambda buffer: len(buffer))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    route = chosen([0, 1], [1, 2], on_gpus=True)
    first, second = (Sender(route, torch.device("cuda"), rank).pack(buckets()[0]) for rank in route.senders)
    assert not first.handles
    assert second.handles == {"gpu": second.nbytes}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_that_both_use() -> None:
    sent = check(Route("device", (0,), (), (0,)), 1, "cuda")
    assert all(len(each.handles) == 1 for each in sent)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_by_nccl() -> None:
    check(Route("device", (0,), (0,), seconds=60.0), 1, "cuda")


def test_the_buffer_of_each_gpu_is_in_the_parcel() -> None:
    contents = buckets()[0]
    sender = Sender(Route("file"), torch.device("cpu"))
    packed = sender.pack(contents)
    found: Any = merge_buckets(
        [None, PackedBucket(packed.contents, 8, "", {"x": 1}), PackedBucket(packed.contents, 8, "", {"y": 2})]
    )
    assert found.handles == {"x": 1, "y": 2}
    assert merge_buckets([None, None]) is None
    assert packed.nbytes >= sum(math.prod(each.shape) for each in contents.values())
