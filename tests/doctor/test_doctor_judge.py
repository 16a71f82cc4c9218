"""What all ranks measure: the one that stands out is named, and nobody else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatune.doctor.check import Verdict
from megatune.doctor.ranks import Measured, compare_ranks

VERSIONS = {"torch": "2.13.0", "megatron-core": "0.16.1"}


def ranks() -> list[Measured]:
    """Two machines of two ranks, all well."""
    return [
        Measured(
            host=f"node-{rank // 2}",
            node=rank // 2,
            rank=rank,
            versions=VERSIONS,
            clock=1000.0 + 0.01 * rank,
            shared=0.1,
            flops=5e14,
            link=2e11 if rank % 2 else 4e10,
            collectives={"all-reduce": (3e11, True), "all-to-all": (2e11, True)},
        )
        for rank in range(4)
    ]


def test_good_machines_pass():
    assert {check.verdict for check in compare_ranks(ranks())} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("rank", "fault", "verdict", "said"),
    [
        (
            3,
            {"flops": 2e14},
            Verdict.WARN,
            "matrix product of rank 3: 200.0 TFLOP/s, the median of the ranks is 500.0",
        ),
        (2, {"link": 1e10}, Verdict.WARN, "link from rank 1 to rank 2: 10.0 GB/s, the median between machines is 25.0"),
        (
            3,
            {"link": 4e10},
            Verdict.WARN,
            "link from rank 2 to rank 3: 40.0 GB/s, the median inside a machine is 120.0",
        ),
        (2, {"clock": 1090.0}, Verdict.WARN, "clock: +45.0 s from the other machines'"),
        (2, {"shared": math.inf}, Verdict.FAIL, "output_dir: node-1 does not see what node-0 writes"),
        (2, {"versions": {**VERSIONS, "torch": "2.11.0"}}, Verdict.FAIL, "torch 2.13.0 on node-0, 2.11.0 on node-1"),
        (1, {"collectives": {"all-reduce": (3e11, False)}}, Verdict.FAIL, "all-reduce: wrong values on ranks 1"),
    ],
)
def test_what_stands_out_is_named(rank, fault, verdict, said):
    measured = ranks()
    measured[rank] = replace(measured[rank], **fault)
    if "collectives" in fault:
        measured = [replace(one, collectives={"all-reduce": one.collectives["all-reduce"]}) for one in measured]
    found = [check for check in compare_ranks(measured) if check.verdict is not Verdict.PASS]
    assert {check.verdict for check in found} == {verdict}
    assert any(said in f"{check.name}: {check.found}" for check in found)
    assert all(check.why and check.fix for check in found)


def test_machines_of_one_name_are_told_apart():
    measured = [replace(one, host="localhost") for one in ranks()]
    measured[2] = replace(measured[2], shared=math.inf)
    (found,) = (check for check in compare_ranks(measured) if check.verdict is Verdict.FAIL)
    assert "localhost (NODE_RANK 1) does not see what localhost (NODE_RANK 0) writes" in found.found
