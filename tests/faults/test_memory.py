"""Runs that run out of memory (T47): the phase, the plan beside the limit, and three changes that help."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_injector import Fault
from fault_runs import Job

from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fault", "put", "said"),
    [
        (
            "RLIMIT_AS leaves a rank 4 MiB from its first forward pass on",
            Fault("memory full", "forward", rank=1, step=1, value=4 * MIB),
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (
            "`torch.OutOfMemoryError` in a backward pass",
            Fault("device full", "backward", rank=1, step=1, value=2048 * MIB),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
    ],
    ids=["host", "device"],
)
def test_out_of_memory(
    fault: str, put: Fault, said: str, model: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    job = Job(model, tmp_path / "run", [put], per_device_train_batch_size=60, max_steps=2)
    ended = job.finish()
    assert ended.code == ExitCode.OUT_OF_MEMORY, ended.stderr
    assert "rank 1 on host" in ended.line
    assert "ran out of memory at step 1 (train)" in ended.line
    assert said in ended.stderr
    assert re.search(r"^planned +\S+ GiB of \S+ GiB for stage 0", ended.stderr, re.MULTILINE)
    first, second, third = re.findall(r"^    ([123])\. \w+: .* \(\S+ \w+ less\), ", ended.stderr, re.MULTILINE)
    assert (first, second, third) == ("1", "2", "3")
    helps = re.search(r"^    1\. (.*)", ended.stderr, re.MULTILINE)
    assert helps
    told(case="T47", fault=fault, got=f"{ended.line}; helps: {helps[1]}", seconds=ended.seconds,
         lost="steps since the last checkpoint")  # fmt: skip
