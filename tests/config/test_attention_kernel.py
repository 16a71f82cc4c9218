"""The one choice of attention kernels, for the engine and the planner."""

from __future__ import annotations

import pytest

from megatune.config.kernels import CPU, attention_kernels, needs_varlen
from megatune.config.settings import DataSettings, ParallelSettings, Settings

VOLTA, AMPERE, HOPPER, BLACKWELL = (7, 0), (8, 0), (9, 0), (10, 0)
SLOWER = ("efficient", "math")


@pytest.mark.parametrize(
    ("capability", "backend", "kernels"),
    [
        (CPU, "auto", ("flash", "math")),
        (AMPERE, "auto", ("flash", "cudnn", *SLOWER)),
        (HOPPER, "auto", ("flash", "cudnn", *SLOWER)),
        (BLACKWELL, "auto", ("flash", "cudnn", *SLOWER)),
        (HOPPER, "flash", ("flash",)),
        (HOPPER, "fused", ("cudnn",)),
        (HOPPER, "unfused", ("plain",)),
        (CPU, "local", ("plain",)),
        (VOLTA, "auto", ("flash", "cudnn", *SLOWER)),
    ],
)
def test_rows_of_one_document(capability, backend, kernels):
    assert attention_kernels(capability, backend, "bfloat16", 128, varlen=False) == kernels


@pytest.mark.parametrize(
    ("capability", "backend", "dtype", "channels", "kernel"),
    [
        (CPU, "auto", "float64", 512, "varlen"),
        (AMPERE, "auto", "float16", 256, "varlen"),
        (HOPPER, "fused", "bfloat16", 128, "varlen"),
        (HOPPER, "auto", "bfloat16", 257, "plain"),
        (HOPPER, "auto", "float32", 128, "plain"),
        (VOLTA, "auto", "float16", 64, "plain"),
        (AMPERE, "unfused", "bfloat16", 64, "plain"),
    ],
)
def test_runs_need_flash_attention_with_variable_lengths(capability, backend, dtype, channels, kernel):
    assert attention_kernels(capability, backend, dtype, channels, varlen=True) == (kernel,)
    if kernel == "plain" and backend == "auto":
        # What is left for whole rows takes no groups of queries.
        assert attention_kernels(capability, backend, dtype, channels, varlen=False, grouped=True) == ("math",)


@pytest.mark.parametrize(
    ("packing", "cp", "kind", "varlen"),
    [(False, 1, "p2p", False), (True, 1, "p2p", True), (False, 2, "p2p", True), (False, 2, "all_gather", True),
     (False, 2, "a2a", False), (True, 2, "a2a", True)],
)  # fmt: skip
def test_queries_attend_to_runs_of_packed_rows_and_of_other_ranks(packing, cp, kind, varlen):
    parallel = ParallelSettings(context_parallel_size=cp, cp_comm_type=kind)
    assert needs_varlen(Settings(data=DataSettings(packing=packing), parallel=parallel)) == varlen
