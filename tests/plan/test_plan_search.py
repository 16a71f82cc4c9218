"""The search for layouts: all of them valid, none forgotten but by policy, the fastest first."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.architecture import Architecture, DeltaNet, MixtureOfExperts
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules import check
from megatune.config.rules.rule import divisors
from megatune.config.settings import GROUPS, Settings, setting_value, with_settings
from megatune.encoders import Vision
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.changes import FREE
from megatune.plan.estimate import Estimate
from megatune.plan.layouts import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    TOKENS_OF_A_CONTEXT_PART,
    VARIANTS,
    CandidateBatch,
    CandidateLayout,
    SearchRequest,
    Space,
    block,
    selective,
)
from megatune.plan.machine import Calibration, Machine
from megatune.plan.search import Frontier, _Search, equal_within, num_kinds, search, sort_key
from megatune.plan.uncertainty import memory_bound

DENSE = Architecture(
    model_type="qwen3",
    num_layers=6,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=12,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=151_936,
    max_position_embeddings=65_536,
    norm_epsilon=1e-6,
    rotary_base=1e6,
)
SPARSE = dataclasses.replace(
    DENSE,
    model_type="qwen3_moe",
    moe=MixtureOfExperts(
        layers=(True, False, True, True, True, True), num_experts=12, router_topk=2, moe_ffn_hidden_size=768
    ),
)
# Three of the encoder's layers feed the decoder's first three.
WITH_DEEPSTACK = dataclasses.replace(
    DENSE,
    model_type="qwen3_vl",
    vision=Vision(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_hidden_size=1024,
        patch_size=16,
        spatial_merge_size=2,
        deepstack_visual_indexes=(5, 11, 17),
    ),
)
# Three of four layers are gated delta nets.
WITH_DELTA = dataclasses.replace(
    DENSE,
    model_type="qwen3_next",
    delta=DeltaNet(
        layers=(True, True, True, False, True, True),
        num_key_heads=12,
        num_value_heads=24,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel_size=4,
    ),
)
GIB = 2**30


def machine(memory: float = 80 * GIB, gpus_per_node: int = 8) -> Machine:
    found = find_machine("h100-80g", gpus_per_node=gpus_per_node)
    return dataclasses.replace(found, device=dataclasses.replace(found.device, memory=int(memory)))


def request(
    architecture: Architecture = DENSE, world_size: int = 8, cutoff: int = 4096, **others: Any
) -> SearchRequest:
    base = Settings(
        run=GROUPS["run"](output_dir="out"),
        model=GROUPS["model"](model_name_or_path="model"),
        data=GROUPS["data"](dataset=["rows"], cutoff_len=cutoff),
        precision=GROUPS["precision"](bf16=True),
    )
    case = Case(
        model=PlannedModel(name="a model", architecture=architecture),
        settings=base,
        world_size=world_size,
        machine=machine(),
    )
    of_case = {name: others.pop(name) for name in ("machine", "model", "settings", "image_tokens") if name in others}
    return SearchRequest(case=dataclasses.replace(case, **of_case), **{"global_batch_size": 24, **others})


def changed(asked: SearchRequest, **case: Any) -> SearchRequest:
    return dataclasses.replace(asked, case=dataclasses.replace(asked.case, **case))


def test_kernels_for_whole_rows_leave_out_what_they_cannot_do() -> None:
    asked = request(world_size=8, cutoff=32_768)
    fused = asked.case.settings.model_copy(update={"performance": GROUPS["performance"](attention_backend="fused")})
    a2a = fused.model_copy(update={"parallel": GROUPS["parallel"](cp_comm_type="a2a")})
    sizes = {"auto": asked.case.settings, "fused": fused, "fused, a2a": a2a}
    found = {
        name: {layout.cp for layout in Space(changed(asked, settings=settings)).layouts()}
        for name, settings in sizes.items()
    }
    assert found == {"auto": {1, 2, 4, 8}, "fused": {1}, "fused, a2a": {1, 2, 4}}  # of 12 heads


def layouts(space: Space) -> list[CandidateLayout]:
    return list(space.layouts())


@settings(max_examples=150, deadline=None)
@given(data=st.data(), architecture=st.sampled_from([DENSE, SPARSE, WITH_DEEPSTACK, WITH_DELTA]),
       world=st.sampled_from([1, 3, 8, 12, 24, 64]), cutoff=st.sampled_from([2, 4096, 16_384]))  # fmt: skip
def test_what_is_searched_is_valid(data: st.DataObject, architecture: Architecture, world: int, cutoff: int) -> None:
    asked = request(architecture, world, cutoff)
    space = Space(asked)
    layout = data.draw(st.sampled_from(layouts(space)))
    batch = data.draw(st.sampled_from(space.batches(layout)))
    virtual = data.draw(st.sampled_from([None, *space.virtual_stages(layout, batch)]))
    ways = [NO_RECOMPUTE, FULL_RECOMPUTE, block(1), *selective(architecture, GROUPS["experts"]())]
    found = space.settings_of(layout, batch, virtual).model_copy(update={"recompute": data.draw(st.sampled_from(ways))})
    for each in (found, *(variant for changes in VARIANTS for variant in space.variants(found, changes))):
        assert check(each, architecture, world) == []
        assert dataclasses.replace(asked.case, settings=each).global_batch_size == 24


@pytest.mark.parametrize(
    ("architecture", "cutoff", "world"),
    [(DENSE, 16_384, 24), (SPARSE, 4096, 12), (WITH_DEEPSTACK, 4096, 12), (WITH_DELTA, 16_384, 24)],
)
def test_valid_layouts_that_are_not_searched_are_those_of_the_policy(
    architecture: Architecture, cutoff: int, world: int
) -> None:
    asked = request(architecture, world, cutoff, machine=machine(gpus_per_node=4))
    space = Space(asked)
    searched = set(layouts(space))
    left_out = 0
    sizes = divisors(world)
    experts = list(itertools.product(sizes, sizes)) if architecture.moe else [(1, 1)]
    for tp, pp, cp, (ep, etp) in itertools.product(sizes, sizes, sizes, experts):
        layout = CandidateLayout(tp, pp, cp, ep, etp)
        parallel = space.settings_of(layout, CandidateBatch(1, 1), None)
        if check(parallel, architecture, world) or 24 % (world // (tp * pp * cp)):
            assert layout not in searched, "refused by the rules"
        elif tp > 4 or 4 % tp or etp not in (1, tp) or (cp > 1 and cutoff < cp * TOKENS_OF_A_CONTEXT_PART):
            assert layout not in searched, "left out by policy"
            left_out += 1
        else:
            assert layout in searched
    assert left_out, "the policy is seen at work"


@pytest.fixture(scope="module")
def roomy() -> Any:
    return search(request(SPARSE))


def test_ranked_by_time(roomy: Any) -> None:
    times = [estimate.time.total for estimate in roomy.ranked]
    assert len(times) == 20
    equal, others = times[: roomy.num_equal], times[roomy.num_equal :]
    assert others == pytest.approx(sorted(others), rel=1e-3)
    assert max(equal) <= (1 + equal_within(roomy.best.case)) * min(times)
    kinds = [num_kinds(estimate.case) for estimate in roomy.ranked[: roomy.num_equal]]
    assert len(set(kinds)) > 1
    assert kinds == sorted(kinds)
    assert all(estimate.fits for estimate in roomy.ranked)
    assert {estimate.case.global_batch_size for estimate in roomy.ranked} == {24}
    assert roomy.best is roomy.ranked[0]


def every_way(space: Space) -> list[Estimate]:
    """Everything that could be found, without a bound."""
    architecture = space.architecture
    blocks = [block(number) for number in range(1, architecture.num_layers)]
    ways = [NO_RECOMPUTE, FULL_RECOMPUTE, *blocks, *space.selective]
    return [
        space.ends(layout, batch, virtual)[0].with_recompute(how)
        for layout in space.layouts()
        for batch in space.batches(layout)
        for virtual in [None, *space.virtual_stages(layout, batch)]
        for how in ways
    ]


@pytest.mark.parametrize("memory", [5.2 * GIB, 7 * GIB, 30 * GIB])
def test_bounds_leave_out_nothing_that_is_better(memory: float) -> None:
    asked = request(world_size=4, machine=machine(memory), keep=5)
    result = search(asked)
    candidates = [candidate for candidate in every_way(Space(asked)) if candidate.fits]
    best = min(candidates, key=sort_key)
    assert sort_key(result.ranked[0]) <= sort_key(best)
    smallest = min(candidates, key=lambda candidate: candidate.peak_bytes)
    assert result.frontier[0].fullest.total <= smallest.peak_bytes * 1.02
    for candidate in candidates:
        assert any(
            estimate.fullest.total <= candidate.peak_bytes * 1.03 and estimate.time.total <= candidate.time.total * 1.03
            for estimate in result.frontier
        ), candidate.case.settings


def test_no_way_takes_less_than_the_bounds_of_its_layout_and_batch() -> None:
    for asked in (request(SPARSE, world_size=8), request(DENSE, world_size=4, cutoff=16_384)):
        found = _Search(Space(asked))
        points = {(point.layout, point.batch): point for point in found.points()}
        for candidate in every_way(Space(asked))[::5]:
            parallel, case = candidate.case.settings.parallel, candidate.case
            layout = CandidateLayout(
                parallel.tensor_model_parallel_size,
                parallel.pipeline_model_parallel_size,
                parallel.context_parallel_size,
                parallel.expert_model_parallel_size,
                parallel.expert_tensor_size if asked.case.model.architecture.moe else 1,
            )
            point = points[layout, CandidateBatch(case.micro_batch_size, case.num_micro_batches)]
            assert point.shortest * (1 - 1e-9) <= candidate.time.total
            assert point.smallest <= candidate.peak_bytes


@settings(max_examples=12, deadline=None)
@given(architecture=st.sampled_from([DENSE, SPARSE]), world=st.sampled_from([2, 4, 8]),
       keep=st.sampled_from([1, 4, 20]), memory=st.sampled_from([4.0, 5.2, 7.0, 12.0, 40.0]),
       cutoff=st.sampled_from([4096, 16_384]))  # fmt: skip
def test_nothing_that_is_ranked_dominates_the_frontier(
    architecture: Architecture, world: int, keep: int, memory: float, cutoff: int
) -> None:
    result = search(request(architecture, world, cutoff, machine=machine(memory * GIB), keep=keep))
    frontier = [(each.fullest.total, each.time.total) for each in result.frontier]
    for found in result.ranked:
        size, seconds = found.fullest.total, found.time.total
        assert not any(
            size <= other and seconds <= time and (size, seconds) != (other, time) for other, time in frontier
        )


def test_other_exchanges_of_context_parallelism_are_tried() -> None:
    asked = request(world_size=8, cutoff=65_536, global_batch_size=1)
    result = search(asked)
    kinds = {found.case.settings.parallel.cp_comm_type for found in result.ranked}
    assert len(kinds) > 1
    for found in result.ranked[:3]:
        others = Space(asked).variants(found.case.settings, VARIANTS[0])
        keys = [sort_key(Space(asked).estimate(other)) for other in others]
        assert len(keys) >= 1
        assert sort_key(found) <= min(keys)


def test_the_fullest_stage_is_found_among_those_that_differ() -> None:
    measured = dataclasses.replace(machine(), calibration=Calibration(activations=1.0371, num_runs=1))
    space = Space(request(SPARSE, world_size=8, machine=measured))
    candidates = every_way(space)[::7]
    assert len(candidates) > 100
    stages = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|t|ttt|tL"}
    written = with_settings(space.settings, {f"parallel.{name}": value for name, value in stages.items()})
    for candidate in (space.estimate(written), *candidates):
        assert candidate.peak_bytes == candidate.fullest.total


def test_nothing_on_the_frontier_is_dominated(roomy: Any) -> None:
    frontier = roomy.frontier
    assert len(frontier) > 3
    for smaller, larger in itertools.pairwise(frontier):
        assert smaller.fullest.total < larger.fullest.total
        assert smaller.time.total > larger.time.total
    assert frontier[-1].time.total <= roomy.best.time.total


def test_a_frontier_keeps_what_nothing_dominates() -> None:
    space = Space(request(world_size=4))
    candidates = every_way(space)[::13]
    frontier = Frontier()
    for candidate in candidates:
        frontier.add(candidate)
    kept = {(candidate.peak_bytes, candidate.time.total) for candidate in frontier.estimates}
    points = {(candidate.peak_bytes, candidate.time.total) for candidate in candidates}
    assert kept == {
        (size, seconds)
        for size, seconds in points
        if not any(s <= size and t <= seconds and (s, t) != (size, seconds) for s, t in points)
    }


def test_what_fits_at_the_upper_end_comes_before_what_is_tight() -> None:
    seen = set()
    for memory in (5.2, 6, 7, 8):
        result = search(request(world_size=4, machine=machine(memory * GIB)))
        tight = [estimate.is_tight for estimate in result.ranked]
        assert tight == sorted(tight)
        seen |= set(tight)
        for estimate in result.ranked:
            assert estimate.is_tight == (estimate.fullest.total * (1 + memory_bound(estimate.case)) > memory * GIB)
    assert seen == {False, True}, "the rule is seen at work"


def test_what_costs_nothing_is_on_and_what_the_user_wrote_stays() -> None:
    fused = {path for path in FREE if path.startswith("performance.")}
    best = search(request()).best
    assert all(setting_value(best.case.settings, path) for path in fused)
    written = frozenset(["performance.apply_rope_fusion"])
    kept = search(request(written=written)).best.case.settings
    assert not kept.performance.apply_rope_fusion
    assert kept.performance.bias_activation_fusion
    assert best.time.total < search(request(free=False)).best.time.total


def test_parts_of_a_row_reduce_gradients_while_they_compute() -> None:
    found = search(request(world_size=8, cutoff=32_768, global_batch_size=1)).ranked
    assert {each.case.settings.parallel.context_parallel_size for each in found} > {1}
    for each in found:
        parallel = each.case.settings.parallel
        overlaps = parallel.overlap_grad_reduce, parallel.overlap_param_gather
        assert overlaps == (each.case.shard_size > 1,) * 2


def test_virtual_stages_are_ranked_where_they_win_clearly() -> None:
    asked = request(world_size=32, global_batch_size=128, model=find_model("Qwen3-32B"))
    num_virtual = 0
    for estimate in search(asked).ranked:
        parallel = estimate.case.settings.parallel
        uneven = parallel.account_for_embedding_in_pipeline_split or parallel.account_for_loss_in_pipeline_split
        if parallel.virtual_pipeline_model_parallel_size is None or uneven:
            continue
        num_virtual += 1
        update = {"virtual_pipeline_model_parallel_size": None}
        plain = estimate.case.settings.model_copy(update={"parallel": parallel.model_copy(update=update)})
        other = Space(asked).estimate(plain)
        assert other.time.total > 1.1 * estimate.time.total or other.is_tight
    assert num_virtual, "the rule is seen at work"


def test_slower_layouts_are_left_out_where_only_faster_ones_are_asked_for() -> None:
    for world_size, place in ((4, 19), (8, 5)):  # of the first some are faster in virtual stages only
        every = search(request(world_size=world_size))
        limit = every.ranked[place].time.total
        found = search(request(world_size=world_size, below=limit))
        assert found.ranked
        assert max(estimate.time.total for estimate in found.ranked) < limit
    assert search(request(below=0.9 * min(each.time.total for each in every.ranked))).ranked == ()


def test_what_is_too_large_misses_by_least_first() -> None:
    result = search(request(SPARSE, world_size=2, machine=machine(4 * GIB)))
    totals = [estimate.fullest.total for estimate in result.too_large]
    assert result.ranked == ()
    assert result.best is None
    assert totals == sorted(totals)
    assert totals[0] > 4 * GIB


REFUSED = {
    "tensor parallelism does not split the model evenly": (
        DENSE, 8, 24,
        "tensor_model_parallel_size 8 does not split the model's 12 attention heads",
        "write tensor_model_parallel_size: 4, the nearest valid size",
    ),
    "more pipeline stages than layers": (
        DENSE, 8, 24,
        "pipeline_model_parallel_size 8: with 6 layers some of 8 parts have none",
        "write pipeline_model_parallel_size: 6, the largest possible",
    ),
    "the global batch is not split evenly over the data-parallel processes": (
        DENSE, 8, 20,
        "a global batch of 20 rows on 8 data-parallel processes",
        "use a global batch of 16",
    ),
    "expert parallelism does not shard the experts evenly": (
        SPARSE, 8, 24,
        "expert_model_parallel_size 8 does not divide the model's 12 experts",
        "write expert_model_parallel_size: 6, the nearest that does",
    ),
    "the processes do not hold whole copies of the experts": (
        SPARSE, 6, 24,
        "6 processes are not a multiple of the 4 that one replica of the experts takes",
        "write expert_tensor_parallel_size: 1, or start 4 or 8 processes",
    ),
    "expert tensor parallelism does not split the experts evenly": (
        dataclasses.replace(SPARSE, moe=dataclasses.replace(SPARSE.moe, moe_ffn_hidden_size=50)), 4, 24,
        "expert_tensor_parallel_size 4 does not divide an expert's 50 channels",
        "write expert_tensor_parallel_size: 5",
    ),
    "context parallelism does not split the key heads of gated delta nets evenly": (
        WITH_DELTA, 8, 24,
        "context_parallel_size 8 does not divide the 12 key heads of a process",
        "write context_parallel_size: 6, the nearest that divides them",
    ),
    "the first pipeline stage has fewer layers than deepstack mergers feed": (
        WITH_DEEPSTACK, 6, 24,
        "the first of 3 pipeline parts has 2 of the first 3 layers",
        "write decoder_first_pipeline_num_layers: 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_the_words_of_the_rules(what: str) -> None:
    architecture, world, rows, example, fix = REFUSED[what]
    refused = search(request(architecture, world, global_batch_size=rows)).refused
    group = next(refusal for refusal in refused if refusal.what == what)
    assert (group.example.what, group.example.fix) == (example, fix)
    assert group.count > 0
    assert group.why == group.example.why
    assert [refusal.count for refusal in refused] == sorted((refusal.count for refusal in refused), reverse=True)


def test_adapters_and_towers_are_searched() -> None:
    model = find_model("Qwen2-VL-7B")
    asked = request(world_size=8, global_batch_size=64, image_tokens=1024, model=model)
    full = search(asked)
    adapters = asked.case.settings.model_copy(update={"finetuning": FinetuningSettings(finetuning_type="lora")})
    lora = search(changed(asked, settings=adapters))
    assert full.best is not None
    assert lora.best is not None
    assert lora.frontier[0].fullest.total < full.frontier[0].fullest.total
