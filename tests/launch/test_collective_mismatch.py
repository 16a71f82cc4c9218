"""Where ranks part is found in what each of them has called."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pool import RankPool

from megatune.engine.collectives import recent_operations
from megatune.launch.context import RankContext, watch_signals
from megatune.launch.failure import find_mismatch, operations_path, write_operations
from megatune.launch.world import RankEnv

SUM = "all_reduce"
Called = list[tuple[str, int, bool]]  # name, size, whether the rank waits in it


def leave(run_dir: Path, rank: int, **groups: tuple[list[int], Called]) -> None:
    """What a rank has called in each group, from its first operation on."""
    path = operations_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    content = [
        {
            "group": kind,
            "kind": kind,
            "ranks": ranks,
            "operations": [[number, name, [[size]], waits] for number, (name, size, waits) in enumerate(called, 1)],
        }
        for kind, (ranks, called) in groups.items()
    ]
    path.write_text(json.dumps(content))


def test_a_rank_that_left_an_operation_out_is_behind(tmp_path: Path) -> None:
    everyone, done = [0, 1, 2], (SUM, 8, False)
    leave(tmp_path, 0, TENSOR_GROUP=(everyone, [done, done, (SUM, 4, True)]))
    leave(tmp_path, 1, TENSOR_GROUP=(everyone, [done, done]), WORLD=(everyone, [("barrier", 1, True)]))
    leave(tmp_path, 2, TENSOR_GROUP=(everyone, [done, done, (SUM, 4, True)]))
    found = find_mismatch(tmp_path, everyone)
    assert found is not None
    assert found.rank == 1  # and not the two that have not come to the barrier
    assert found.text == (
        "rank 1 has called 2 operations of group tensor, the last all_reduce of [8]; "
        "ranks 0, 2 wait in operation 3, all_reduce of [4]"
    )


def test_a_rank_that_calls_something_else_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        second = ("all_gather", 2, True) if rank == 2 else (SUM, 4, True)
        leave(tmp_path, rank, TENSOR=([0, 1, 2], [(SUM, 8, False), second]))
    found = find_mismatch(tmp_path, [0, 1, 2])
    assert found is not None
    assert found.rank == 2
    assert found.text == (
        "operation 2 of group tensor is not the same: rank 2 calls all_gather of [2], ranks 0, 1 call all_reduce of [4]"
    )
    # Sizes are the same where all ranks give as much; parts of a gather need not be.
    leave(tmp_path, 2, TENSOR=([0, 1, 2], [(SUM, 8, False), (SUM, 5, True)]))
    found = find_mismatch(tmp_path, [0, 1, 2])
    assert found is not None
    assert "rank 2 calls all_reduce of [5], ranks 0, 1 call all_reduce of [4]" in found.text


def test_of_two_ranks_neither_is_blamed_and_both_sides_are_told(tmp_path: Path) -> None:
    done = (SUM, 8, False)
    leave(tmp_path, 0, TENSOR=([0, 1], [done, (SUM, 8, True)]))
    leave(tmp_path, 1, TENSOR=([0, 1], [done]), DATA=([0, 1], [(SUM, 3, True)]))
    leave(tmp_path, 0, TENSOR=([0, 1], [done, (SUM, 8, True)]), DATA=([0, 1], []))
    found = find_mismatch(tmp_path, [0, 1])
    assert found is not None
    assert found.rank is None
    assert "rank 1 has called 1 operations of group tensor" in found.text
    assert "rank 0 has called 0 operations of group data; rank 1 waits in operation 1, all_reduce of [3]" in found.text


def test_ranks_at_the_same_operation_are_in_step(tmp_path: Path) -> None:
    for rank in range(2):
        leave(tmp_path, rank, TENSOR=([0, 1], [(SUM, 8, True)]), ALONE=([rank], [(SUM, 8, False)] * rank))
    assert find_mismatch(tmp_path, [0, 1]) is None
    # One that has left nothing, or half of it, is not held against the others.
    operations_path(tmp_path, 1).write_text("[{")
    assert find_mismatch(tmp_path, [0, 1]) is None
    operations_path(tmp_path, 1).unlink()
    assert find_mismatch(tmp_path, [0, 1]) is None


def test_a_signal_asks_for_it_while_the_main_thread_waits(tmp_path: Path) -> None:
    context = RankContext(RankEnv(0, 0, 1, 1, "localhost", 1, 0), tmp_path)
    operations_path(tmp_path, 0).parent.mkdir()
    context.operations = lambda: [{"group": "x"}]
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        watch_signals({signal.SIGUSR1: partial(write_operations, context)}, "test")
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not operations_path(tmp_path, 0).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads(operations_path(tmp_path, 0).read_text()) == [{"group": "x"}]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)


def parted(run_dir: Path) -> Any:
    """Rank 1 of three leaves an all-reduce out, and its next one meets the others'."""
    rank = torch.distributed.get_rank()
    group = torch.distributed.new_group([0, 1, 2], group_desc="PARTED_GROUP")
    context = RankContext(RankEnv(rank, rank, 3, 3, "localhost", 1, 0), run_dir)
    operations_path(run_dir, rank).parent.mkdir(exist_ok=True)
    # Processes of the pool have had other groups.
    context.operations = lambda: [each for each in recent_operations() if each["kind"] == "PARTED_GROUP"]
    for number in range(3):
        if (rank, number) != (1, 2):
            torch.distributed.all_reduce(torch.ones(number + 1), group=group, async_op=number == 2)
    write_operations(context)
    if rank == 1:
        torch.distributed.all_reduce(torch.ones(3), group=group)
    torch.distributed.barrier()


def test_what_torch_records_names_the_operation(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, parted, tmp_path)
    found = find_mismatch(tmp_path, [0, 1, 2])
    assert found is not None
    assert found.rank == 1
    assert found.text.startswith("rank 1 has called 2 operations of group parted, the last all_reduce of [2]")
    assert found.text.endswith("ranks 0, 2 wait in operation 3, all_reduce of [3]")
