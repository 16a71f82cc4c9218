"""Ranks that wait for others say for whom, before they give up."""

from __future__ import annotations

import socket

import pytest
import torch

from megatune.engine import groups
from megatune.errors import ExitCode, MegatuneError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_ANNOUNCE_SECONDS", 0.05)


def test_the_first_rank_names_those_that_are_missing() -> None:
    store, said = torch.distributed.HashStore(), []
    for rank in (2, 3):
        store.set(f"here/{rank}", "")
        store.add("here", 1)
    with pytest.raises(MegatuneError, match=r"ranks 1, 4 to 5 of 6 did not come to host:1 within 0 s") as caught:
        groups._call_roll(store, 0, 6, "host:1", 0.3, said.append)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert said == ["waiting for ranks 1, 4 to 5 of 6 to come to host:1"]


def test_a_rank_that_nobody_answers_says_whom_it_asked() -> None:
    said: list[str] = []
    with socket.socket() as silent:  # takes no connection: it does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(MegatuneError, match="did not meet the other 3 ranks") as caught:
            groups.join(1, 4, 0, "127.0.0.1", port, timeout=1, announce=said.append)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert len(said) == 1
    assert f"waits for rank 0 at 127.0.0.1:{port}" in said[0]
