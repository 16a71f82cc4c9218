"""Ranks that were given other settings than the others are named before the run trains."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from pool import RankPool
from runs import settings_of

from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError

HOST = socket.gethostname()


def compare(by_rank: list[Settings]) -> tuple[int, str]:
    """The exit code and the message of the error that a rank ends with."""
    from megatune.training.agreement import check_same_settings

    try:
        check_same_settings(by_rank[torch.distributed.get_rank()])
    except MegatuneError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_ranks_with_other_settings_are_named(pool: RankPool, tmp_path: Path) -> None:
    def given(**changes: Any) -> Settings:
        return settings_of(tmp_path, tmp_path / "out", **changes)

    other = given(learning_rate=5e-4, dataset_dir=str(tmp_path), dataset="identity,alpaca")
    for outcome in pool.run(4, compare, [given(), given(), other, given()]):
        code, message = outcome
        assert code == ExitCode.SETTINGS
        where = f"ranks 0 to 1, 3 (host {HOST}); {{}} on rank 2 (host {HOST})"
        assert f"learning_rate: 0.001 on {where.format(0.0005)}" in message
        assert f"dataset: [identity] on {where.format('[identity, alpaca]')}" in message
        assert "dataset_dir" not in message  # where a machine keeps them is its own affair
    assert pool.run(2, compare, [given(), given(preprocessing_num_workers=2)]) == [(0, "")] * 2
