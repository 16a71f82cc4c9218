"""Process groups: which rank holds which part of the model, and how ranks find each other."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroupGloo

from megatune.config.settings import ParallelSettings
from megatune.engine import device
from megatune.errors import ExitCode, Finding, MegatuneError

T = TypeVar("T")

# Ranks that hold slices of the same weights, that get different rows, and that hold copies of the same slices; for
# weights outside experts, then for experts.
tensor_parallel_group = parallel_state.get_tensor_model_parallel_group
data_parallel_group = parallel_state.get_data_parallel_group
replica_group = functools.partial(parallel_state.get_data_parallel_group, with_context_parallel=True)
expert_tensor_parallel_group = parallel_state.get_expert_tensor_parallel_group
expert_replica_group = parallel_state.get_expert_data_parallel_group
# Ranks that together hold all experts of a stage; expert-tensor-parallel ranks are adjacent.
expert_slices_group = parallel_state.get_expert_tensor_and_model_parallel_group

_store: torch.distributed.Store | None = None
_num_relayed = 0  # values sent by `store_broadcast` since init_process_group
_gloo_devices: list[Any] = []  # of the first gloo group, which later groups share
_make_gloo_group = ProcessGroupGloo.__init__

_ANNOUNCE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LEAST_PAUSE, _MOST_PAUSE = 0.02, 1.0  # seconds between reads of the store
_CHECK = "check MASTER_ADDR and MASTER_PORT on every node, and that every node was started"
_EARLIER = "one of them is left over from an earlier run, or machines use the same NODE_RANK or different NNODES"
_RESTART_ALL = "stop the remaining processes on every machine, and start all of them again"


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """This rank's coordinates in the parallel layout, and the sizes of the groups.

    Attributes:
        dp_rank, dp_size: among the ranks that get different rows.
        cp_rank, cp_size: among the ranks that share the tokens of a row.
        replica_rank, replica_size: among the ranks that hold copies of the same weights, outside experts: dp times cp.
        ep_rank, ep_size: among the ranks that hold different experts.
        etp_rank, etp_size: among the ranks that hold slices of the same experts.
        expert_replica_rank, expert_replica_size: among the ranks that hold copies of the same experts.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    replica_rank: int
    replica_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    expert_replica_rank: int
    expert_replica_size: int

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer, and so the loss."""
        return self.pp_rank == self.pp_size - 1


def join(
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    port: int,
    *,
    timeout: float,
    announce: Callable[[str], None] = lambda text: None,
    local_world_size: int | None = None,
) -> None:
    """Join the process group.

    Args:
        local_world_size: ranks of each machine, to name the machines that are missing.
        timeout: seconds to wait for the other ranks here and in every later collective.
        announce: called with what this rank waits for, after some seconds of waiting.

    Raises:
        MegatuneError: UNAVAILABLE, naming the address and the ranks that are missing, or that belong to another run.
    """
    limit = datetime.timedelta(seconds=timeout)
    device.select(local_rank)
    place = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)"
    try:
        # torchrun may already host a store at that address, which this variable states.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        with _announced(
            announce, f"rank {rank} of {world_size} is waiting for rank 0 at {place}, which has not answered yet"
        ):
            host = torch.distributed.TCPStore(
                address, port, world_size, is_master=hosts, timeout=limit, wait_for_workers=False
            )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.PrefixStore(f"megatune/{attempt}", host)
        _wait_for_ranks(store, rank, world_size, place, timeout, announce, local_world_size)
        init_process_group(store, rank, world_size, timeout=timeout)
    except (torch.distributed.DistError, RuntimeError) as error:
        who = (
            f"rank {rank} on {socket.gethostname()} could not connect to the other {world_size - 1} ranks at "
            f"{address}:{port}"
        )
        raise MegatuneError(Finding(who, why=str(error).splitlines()[0], fix=_CHECK), ExitCode.UNAVAILABLE) from error


class _Arrival(NamedTuple):
    """A process that has registered in the store: its rank, its world size, and its description."""

    rank: int
    world_size: int
    who: str


_ALL_JOINED = "yes"


def _wait_for_ranks(
    store: torch.distributed.Store,
    rank: int,
    world_size: int,
    place: str,
    timeout: float,
    announce: Callable[[str], None],
    local_world_size: int | None = None,
) -> None:
    """Wait until every rank has registered in the store exactly once; rank 0 finds missing and duplicate ranks."""
    number = store.add("here", 1)
    me = _Arrival(rank, world_size, f"process {os.getpid()} on host {socket.gethostname()}")
    store.set(f"here/{number}", json.dumps(me))
    if rank:
        store.wait(["all here"], datetime.timedelta(seconds=timeout))
        if (status := store.get("all here").decode()) != _ALL_JOINED:
            raise MegatuneError(Finding(status, why=_EARLIER, fix=_RESTART_ALL), ExitCode.UNAVAILABLE)
        if number > world_size:
            what = f"the run at {place} already has all its {world_size} ranks: {me.who} came too late, as rank {rank}"
            raise MegatuneError(Finding(what, why=_EARLIER, fix=_RESTART_ALL), ExitCode.UNAVAILABLE)
        return
    began = time.monotonic()
    next_announcement = began + _ANNOUNCE_SECONDS
    here: dict[int, _Arrival] = {}
    seen = 0
    while len(here) < world_size:
        while seen < store.add("here", 0):
            seen += 1
            _add_arrival(store, _Arrival(*json.loads(store.get(f"here/{seen}"))), here, world_size)
        if len(here) == world_size:
            break
        time.sleep(_POLL_SECONDS)
        if (now := time.monotonic()) < min(next_announcement, began + timeout):
            continue
        missing = _missing(sorted(set(range(world_size)) - set(here)), world_size, local_world_size)
        if now > began + timeout:
            what = f"{missing} did not connect to {place} within {timeout:.0f} s"
            raise MegatuneError(Finding(what, fix=_CHECK), ExitCode.UNAVAILABLE)
        announce(f"waiting for {missing} to connect to {place}")
        next_announcement = now + 10 * (next_announcement - began)  # after 3 s, half a minute, minutes
    store.set("all here", _ALL_JOINED)


def _add_arrival(store: torch.distributed.Store, new: _Arrival, here: dict[int, _Arrival], world_size: int) -> None:
    """Add a process to those that have registered. A process of another run ends this run, on all ranks: it is
    unknown which of the two was meant, and they must not train together.

    Raises:
        MegatuneError: UNAVAILABLE.
    """
    if new.world_size != world_size:
        what = f"{new.who} joined as rank {new.rank} of {new.world_size}, but the run has {world_size} ranks"
    elif (other := here.setdefault(new.rank, new)) is not new:
        what = f"two processes joined as rank {new.rank}: {other.who}, and {new.who}"
    else:
        return
    store.set("all here", what)
    raise MegatuneError(Finding(what, why=_EARLIER, fix=_RESTART_ALL), ExitCode.UNAVAILABLE)


def _missing(ranks: Sequence[int], world_size: int, local_world_size: int | None) -> str:
    """[2, 3] -> "ranks 2 to 3 of 4 (NODE_RANK 1)"."""
    nodes = sorted({rank // local_world_size for rank in ranks}) if local_world_size else []
    machines = (
        f" (NODE_RANK {', '.join(map(str, nodes))})" if local_world_size and local_world_size < world_size else ""
    )
    return f"{format_ranks(ranks)} of {world_size}{machines}"


@contextlib.contextmanager
def _announced(announce: Callable[[str], None], text: str) -> Iterator[None]:
    """Announce a text if the block takes longer than a few seconds."""
    timer = threading.Timer(_ANNOUNCE_SECONDS, announce, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0 to 2, 5"; "" for none."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    numbers = ", ".join(" to ".join(map(str, span)) for span in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}" if ranks else ""


def init_process_group(store: torch.distributed.Store, rank: int, world_size: int, *, timeout: float) -> None:
    """Create the default process group through a store that all ranks can reach; see `join`."""
    global _store, _num_relayed
    _store, _num_relayed = store, 0
    limit = datetime.timedelta(seconds=timeout)
    ProcessGroupGloo.__init__ = _init_gloo_group  # type: ignore[assignment,method-assign]
    # With a device ID, NCCL connects now, so that connection errors show here; Megatron-Core's groups are then split
    # from this one.
    own = device.current() if device.HAS_GPU else None
    torch.distributed.init_process_group(
        device.BACKEND, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=own
    )


def _init_gloo_group(group: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Create a gloo group that shares the socket thread of this process's first one: each such thread polls a hundred
    times a second, and a rank is in about 25 groups."""
    if _gloo_devices:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = _gloo_devices, timeout
        _make_gloo_group(group, store, rank, size, options)
    else:
        _make_gloo_group(group, store, rank, size, timeout=timeout)
        _gloo_devices.extend(group.options._devices)  # type: ignore[attr-defined]


def build(parallel: ParallelSettings, *, seed: int, timeout: float) -> RankCoordinates:
    """Build Megatron-Core's groups for the layout. Call `join` first.

    Args:
        seed: of the random generators used in tensor-parallel regions.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        distributed_timeout_minutes=max(1, int(timeout // 60)),
        create_gloo_process_groups=False,  # only needed for Megatron-Core's own checkpoints
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return coordinates()


def coordinates() -> RankCoordinates:
    """Return this rank's coordinates in the groups that `build` created."""
    by_name = {
        "tp": tensor_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "replica": replica_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": expert_tensor_parallel_group(),
        "expert_replica": expert_replica_group(),
    }
    numbers = {"rank": rank(), "world_size": torch.distributed.get_world_size()}
    for name, group in by_name.items():
        numbers |= {f"{name}_rank": group.rank(), f"{name}_size": group.size()}
    return RankCoordinates(**numbers)


def rank() -> int:
    """Return this process's global rank."""
    return torch.distributed.get_rank()


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank. It is pickled: for small objects only."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank. They are pickled: for small objects only."""
    box: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(box, value)
    return box


def sum_over_ranks(number: int) -> int:
    """Return the sum of a number over all ranks."""
    box = torch.tensor(number, device=torch.cuda.current_device())
    torch.distributed.all_reduce(box)
    return int(box)


def all_reduce(values: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place."""
    torch.distributed.all_reduce(values)


def store_set(key: str, value: object) -> None:
    """Set a key that any rank can read with `store_get`: for waits that are too long for a collective.

    Args:
        value: can be pickled, and is not None.
    """
    assert _store is not None, "call join first"
    _store.set(key, base64.b64encode(pickle.dumps(value)).decode())


def store_get(key: str) -> Any:
    """Return the value that a rank has set under `key`; None if there is none yet."""
    assert _store is not None, "call join first"
    return pickle.loads(base64.b64decode(_store.get(key))) if _store.check([key]) else None


def forget_keys() -> None:
    """Start with an empty store again, before work is repeated that sets the same keys: all ranks have to call this at
    the same point, so that none of them reads a value of the first time."""
    global _store
    assert _store is not None, "call join first"
    _store = torch.distributed.PrefixStore("again", _store)


def store_broadcast(value: T) -> T:
    """Return rank 0's value on every rank. Unlike `broadcast` it has no timeout: the other ranks poll the store."""
    global _num_relayed
    _num_relayed += 1
    key = f"relayed/{_num_relayed}"
    if rank() == 0:
        store_set(key, (value,))
        return value
    waits = poll_intervals()
    while (found := store_get(key)) is None:
        time.sleep(next(waits))
    return found[0]  # type: ignore[no-any-return]


def poll_intervals() -> Iterator[float]:
    """Yield growing intervals, in seconds, between reads of the store, which all ranks poll."""
    pause = _LEAST_PAUSE
    while True:
        yield pause
        pause = min(pause * 1.1, _MOST_PAUSE)


def barrier() -> None:
    """Wait until every rank has called this."""
    torch.distributed.barrier()


def destroy_model_parallel() -> None:
    """Destroy the layout's groups, so that `build` can create new ones."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Call `leave` after the block; if the block fails, only where that does not wait for the other ranks."""
    try:
        yield
    except BaseException:
        if not device.LEAVING_WAITS:
            leave()
        raise
    leave()


def leave() -> None:
    """Destroy all groups, so that the process can exit or join another run."""
    destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _gloo_devices.clear()
