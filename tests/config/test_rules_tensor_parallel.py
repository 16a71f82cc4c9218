"""Tensor parallelism with fewer key/value heads than processes, which exchange equal parts of the projection's rows."""

from __future__ import annotations

import dataclasses

import pytest
from test_rules import QWEN, messages

from megatune.architecture import Architecture, GlobalHeads

# As Qwen2.5-1.5B has them, whose 2048 rows six processes cannot share.
TWO_GROUPS = dataclasses.replace(QWEN, num_query_groups=2, kv_channels=128)
ONE_GROUP = dataclasses.replace(TWO_GROUPS, num_query_groups=1, kv_channels=24)
GATED = dataclasses.replace(TWO_GROUPS, kv_channels=16, attention_output_gate=True)
GLOBAL = dataclasses.replace(QWEN, num_query_groups=6, global_heads=GlobalHeads(kv_channels=16, num_query_groups=1))
KEYS_ALONE = dataclasses.replace(
    QWEN, num_query_groups=6, global_heads=GlobalHeads(kv_channels=16, num_query_groups=1, keys_are_values=True)
)


@pytest.mark.parametrize(
    ("architecture", "size", "unequal", "valid"),
    [
        (TWO_GROUPS, 6, "2048 rows of queries, keys and values", 4),
        (QWEN, 12, "160 rows of queries, keys and values", 4),
        (GATED, 6, "448 rows of queries, keys and values", 4),
        (GLOBAL, 6, "224 rows of queries, keys and values of layers without a window", 2),
        (KEYS_ALONE, 3, "208 rows of queries, keys and values of layers without a window", 2),
    ],
)
def test_rows_that_do_not_divide_are_refused(architecture: Architecture, size: int, unequal: str, valid: int) -> None:
    (message,) = messages(f"tensor_model_parallel_size={size}", architecture=architecture)
    what, why, fix = message.splitlines()
    assert what.endswith(f"tensor_model_parallel_size {size} does not split the model's {unequal}")
    assert why.strip().startswith("why: each process takes an equal number of each")
    assert fix.strip() == f"fix: write tensor_model_parallel_size: {valid}, the nearest valid size"


@pytest.mark.parametrize(("architecture", "size"), [(TWO_GROUPS, 4), (ONE_GROUP, 6), (QWEN, 2), (KEYS_ALONE, 2)])
def test_rows_that_divide_are_accepted(architecture: Architecture, size: int) -> None:
    assert messages(f"tensor_model_parallel_size={size}", architecture=architecture) == []
