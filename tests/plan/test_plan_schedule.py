"""The order of pipeline passes is Megatron-Core's, and the simulated step keeps to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.plan.schedule import (
    ChunkSeconds,
    Pass,
    Slot,
    bubble_shares,
    in_flight,
    num_warmup_passes,
    stage_passes,
    timeline,
)

LAYOUTS = [(pp, vpp, pp * rounds) for pp in (1, 2, 3, 4, 8) for vpp in (1, 2, 3, 5) for rounds in (1, 2, 3, 7)]
LAYOUTS += [(pp, 1, m) for pp in (2, 4, 8) for m in (1, 2, 3, 5, 11)]
LAYOUTS = [(pp, vpp, m) for pp, vpp, m in LAYOUTS if vpp == 1 or pp > 1]


def makespan(line: list[list[Slot]]) -> float:
    return max(slots[-1].end for slots in line)


def waiting(line: list[list[Slot]]) -> float:
    """Share of all stages' time in which they wait."""
    busy = sum(slot.end - slot.start for slots in line for slot in slots)
    return 1 - busy / (len(line) * makespan(line))


def even(pp: int, vpp: int) -> list[list[ChunkSeconds]]:
    return [[ChunkSeconds(1 / vpp, 2 / vpp)] * vpp for _ in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "num_micro_batches"), LAYOUTS)
def test_the_order_is_megatron_cores(pp: int, vpp: int, num_micro_batches: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    table = get_schedule_table(num_micro_batches, vpp, pp)
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
        total, _, warmup, remaining = get_pp_rank_microbatches(
            num_micro_batches, vpp, pp, p2p_communicator=communicator
        )
        # As the schedules run them: forward passes, then one forward and one backward, then backward passes.
        expected: list[Pass] = []
        forwards = iter([Pass(True, chunk, micro_batch) for micro_batch, chunk in table])
        backwards = iter([Pass(False, vpp - 1 - chunk, micro_batch) for micro_batch, chunk in table])
        expected += [next(forwards) for _ in range(warmup)]
        for _ in range(remaining):
            expected += [next(forwards), next(backwards)]
        expected += list(backwards)
        assert len(expected) == 2 * total
        assert stage_passes(pp, vpp, stage, num_micro_batches) == expected
        assert num_warmup_passes(pp, vpp, stage, num_micro_batches) == warmup


@pytest.mark.parametrize(("pp", "vpp", "num_micro_batches"), LAYOUTS)
def test_in_flight_is_what_the_passes_hold(pp: int, vpp: int, num_micro_batches: int) -> None:
    sizes = tuple(1.0 + 0.3 * ((7 * virtual) % 3) for virtual in range(vpp))
    for stage in range(pp):
        held, most, heaviest = [0] * vpp, 0, 0.0
        for work in stage_passes(pp, vpp, stage, num_micro_batches):
            held[work.virtual_stage] += 1 if work.forward else -1
            most = max(most, sum(held))
            heaviest = max(heaviest, sum(count * size for count, size in zip(held, sizes, strict=True)))
        assert held == [0] * vpp
        assert sum(in_flight(pp, vpp, stage, num_micro_batches)) == most
        weighed = in_flight(pp, vpp, stage, num_micro_batches, sizes)
        assert sum(count * size for count, size in zip(weighed, sizes, strict=True)) == pytest.approx(heaviest)


def test_a_plain_pipeline_holds_one_micro_batch_more_for_each_stage_behind() -> None:
    assert [in_flight(4, 1, stage, 8) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert [in_flight(4, 1, stage, 2) for stage in range(4)] == [(2,), (2,), (2,), (1,)]
    assert in_flight(1, 1, 0, 16) == (1,)


@pytest.mark.parametrize(("pp", "num_micro_batches"), [(2, 2), (4, 8), (4, 4), (8, 32), (1, 5)])
def test_the_bubble_of_even_stages(pp: int, num_micro_batches: int) -> None:
    plain = timeline(even(pp, 1), num_micro_batches)
    assert makespan(plain) == pytest.approx(3 * (num_micro_batches + pp - 1))
    assert waiting(plain) == pytest.approx((pp - 1) / (num_micro_batches + pp - 1))
    if pp > 1:
        # arXiv:2104.04473: v virtual stages fill the pipeline in a v-th of the time.
        interleaved = timeline(even(pp, 2), num_micro_batches)
        assert waiting(interleaved) == pytest.approx((pp - 1) / (2 * num_micro_batches + pp - 1))
        assert waiting(interleaved) < waiting(plain)


def test_a_pass_waits_for_what_it_takes() -> None:
    chunks = [[ChunkSeconds(1, 2), ChunkSeconds(0.5, 1)], [ChunkSeconds(1.5, 3), ChunkSeconds(2, 2)]]
    line = timeline(chunks, 4)
    ends = {(stage, slot.work): slot.end for stage, slots in enumerate(line) for slot in slots}
    assert len(ends) == 2 * 2 * 2 * 4
    for stage, slots in enumerate(line):
        for before, slot in zip((None, *slots), slots, strict=False):
            assert before is None or slot.start >= before.end
            chunk = chunks[stage][slot.work.virtual_stage]
            assert slot.end - slot.start == pytest.approx(chunk.forward if slot.work.forward else chunk.backward)
            position = slot.work.virtual_stage * 2 + stage
            if slot.work.forward and position:
                source = ((position - 1) % 2, Pass(True, (position - 1) // 2, slot.work.micro_batch))
            elif not slot.work.forward and position < 3:
                source = ((position + 1) % 2, Pass(False, (position + 1) // 2, slot.work.micro_batch))
            else:
                continue
            assert slot.start >= ends[source] - 1e-9


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (4, 2), (8, 3)])
def test_shares_of_waiting_are_those_of_the_simulated_step(pp: int, vpp: int) -> None:
    line = timeline(even(pp, vpp), 4 * pp)
    assert bubble_shares(even(pp, vpp), 4 * pp) == pytest.approx((waiting(line),) * 2)


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 6), seconds=st.lists(st.floats(0.8, 1.2), min_size=6, max_size=6))
def test_shares_of_waiting_of_uneven_stages_are_near_those_of_the_simulated_step(pp: int, seconds: list[float]) -> None:
    chunks = [[ChunkSeconds(seconds[stage], 2 * seconds[stage])] for stage in range(pp)]
    line = timeline(chunks, 8 * pp)
    of_all, of_slowest = bubble_shares(chunks, 8 * pp)
    busiest = max(sum(slot.end - slot.start for slot in slots) for slots in line)
    assert of_all == pytest.approx(waiting(line), abs=0.03)
    assert of_slowest == pytest.approx(1 - busiest / makespan(line), abs=0.03)
