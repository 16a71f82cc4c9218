"""Ranks that wait for others say for whom, before they give up; a process that is not of the run does not join it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from megatune.engine import groups
from megatune.errors import ExitCode, MegatuneError


def arrive(store: torch.distributed.Store, rank: int, world_size: int, who: str) -> None:
    """As a process of a run does that waits for the others."""
    store.set(f"here/{store.add('here', 1)}", json.dumps([rank, world_size, who]))


def test_the_first_rank_names_those_that_are_missing(told: Callable[..., None]) -> None:
    store, said, times = torch.distributed.HashStore(), [], []
    for rank in (2, 3):
        arrive(store, rank, 6, "a process")
    began = time.monotonic()

    def announce(text: str) -> None:
        said.append(text)
        times.append(time.monotonic() - began)

    expected = r"ranks 1, 4 to 5 of 6 \(NODE_RANK 0, 2\) did not connect to host:1 within 4 s"
    with pytest.raises(MegatuneError, match=expected) as caught:
        groups._wait_for_ranks(store, 0, 6, "host:1", 4, announce, 2)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert said == ["waiting for ranks 1, 4 to 5 of 6 (NODE_RANK 0, 2) to connect to host:1"]
    told(case="T8", fault="two of three machines start a part of their ranks, or none", got=said[0], seconds=times[0])


def test_a_rank_that_nobody_answers_says_whom_it_asked(
    told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_ANNOUNCE_SECONDS", 0.05)
    said: list[str] = []
    with socket.socket() as silent:  # takes no connection: it does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(MegatuneError, match="could not connect to the other 3 ranks") as caught:
            groups.join(1, 4, 0, "127.0.0.1", port, timeout=1, announce=said.append)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert len(said) == 1
    assert f"is waiting for rank 0 at 127.0.0.1:{port}" in said[0]
    told(case="T8", fault="the first machine does not start", got=said[0].replace(str(port), "29500"))


def roll(store: torch.distributed.Store, rank: int, world_size: int, ended: dict[str, MegatuneError | None]) -> None:
    """One process at the roll call; its end goes into `ended`."""
    try:
        groups._wait_for_ranks(store, rank, world_size, "host:1", 10, print)
    except MegatuneError as error:
        ended[f"rank {rank}"] = error
    else:
        ended[f"rank {rank}"] = None


@pytest.mark.parametrize(
    ("stale", "words"),
    [
        ((1, 3), "two processes joined as rank 1: process 7 on host old, and process"),
        ((1, 2), "process 7 on host old joined as rank 1 of 2, but the run has 3 ranks"),
    ],
    ids=["the same rank", "another world"],
)
def test_a_process_of_an_earlier_run_ends_the_meeting(
    stale: tuple[int, int], words: str, told: Callable[..., None]
) -> None:
    store: torch.distributed.Store = torch.distributed.HashStore()
    arrive(store, *stale, "process 7 on host old")
    ended: dict[str, MegatuneError | None] = {}
    began = time.monotonic()
    ranks = [threading.Thread(target=roll, args=(store, rank, 3, ended)) for rank in (1, 2, 0)]
    for number, rank in enumerate(ranks):
        rank.start()
        while store.add("here", 0) < number + 2:  # beside the stale one: they come in this order
            time.sleep(0.001)
    for rank in ranks:
        rank.join(30)
    seconds = time.monotonic() - began
    assert sorted(ended) == ["rank 0", "rank 1", "rank 2"]
    for error in ended.values():
        assert error is not None
        assert error.exit_code == ExitCode.UNAVAILABLE
        assert words in str(error)
        assert "left over from an earlier run" in str(error)
    told(case="T11", fault="a process of an earlier run waits where the new one meets", got=words, seconds=seconds)


def test_a_process_that_comes_when_all_are_there_is_refused(told: Callable[..., None]) -> None:
    store: torch.distributed.Store = torch.distributed.HashStore()
    arrive(store, 1, 2, "process 8 on host b")
    ended: dict[str, MegatuneError | None] = {}
    roll(store, 0, 2, ended)
    assert ended == {"rank 0": None}
    roll(store, 1, 2, ended)
    late = ended["rank 1"]
    assert late is not None
    assert "already has all its 2 ranks" in str(late)
    what = late.findings[0].what.partition(": process")[0]
    told(case="T11", fault="a process of an earlier run comes late to one that is complete", got=what, seconds=0.0)
