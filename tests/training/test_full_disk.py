"""A disk that is full while ranks gather what one of them writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pool import RankPool
from runs import settings_of, train

from megatune.bridge import file_stream
from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError


def train_on_full_disk(settings: Settings, folder: Path) -> tuple[int, str]:
    """One rank's run, on a disk that has room for three buckets; its exit code, and what it raised."""
    write, left = file_stream._OpenFile.write, 3

    def write_some(file: file_stream._OpenFile, content: memoryview) -> None:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= 1
        write(file, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_stream, "BUCKET_BYTES", file_stream.BLOCK_BYTES)
        patch.setattr(file_stream._OpenFile, "write", write_some)
        try:
            return train(settings, folder), ""
        except MegatuneError as error:
            return error.exit_code, str(error)


def test_no_rank_waits_for_one_that_cannot_write(pool: RankPool, tmp_path: Path) -> None:
    """With tensor parallelism every tensor is gathered from all ranks, while it is written."""
    model = make_checkpoint("qwen3", tmp_path / "model")
    changes = {"tensor_model_parallel_size": 2, "max_steps": 2, "save_steps": 2, "gradient_accumulation_steps": 2}
    settings = settings_of(model, tmp_path / "out", **changes)
    ends = pool.run(2, train_on_full_disk, settings, tmp_path)
    assert [code for code, _ in ends] == [73, 73]
    assert all(f"no room to write {tmp_path}/out/.checkpoint-2.partial" in said for _, said in ends)
