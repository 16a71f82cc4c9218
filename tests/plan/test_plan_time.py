"""The planner's time: exchanged volumes and bubbles by hand, and what can never be slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import GROUPS, Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.plan.case import Case
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.flops import num_matmul_parameters
from megatune.plan.machine import Calibration, Link
from megatune.plan.memory.parameters import StageParameters, StateConfig, elements_of
from megatune.plan.operators.shapes import shapes_of
from megatune.plan.schedule import bubble_seconds, exchange_seconds
from megatune.plan.time import TIME_PARTS, StepTime, communication, step_time
from megatune.plan.time.communication import all_gather, all_reduce, all_to_all, group_of, groups_of, reduction, send
from megatune.plan.time.efficiency import FP8_SPEEDUP, Rates, Seconds, layer_seconds, optimizer_seconds
from megatune.plan.time.estimate import module_seconds

# GFLOP of a trained token, forward and backward, as a survey of published speeds counts them.
GFLOP = {
    "Meta-Llama-3-8B": (46.6, 48.2, 51.5, 70.8),
    "Meta-Llama-3-70B": (425, 433, 449, 546),
    "Qwen2.5-7B": (43.7, 44.9, 47.4, 62.2),
    "Qwen2.5-14B": (87.0, 90.0, 96.0, 132),
    "Qwen3-8B": (47.2, 49.0, 52.7, 74.4),
    "Qwen3-14B": (86.5, 89.0, 94.0, 124),
    "Qwen3-30B-A3B": (20.7, 23.1, 27.9, 56.9),
    "Qwen1.5-MoE-A2.7B": (14.9, 15.5, 16.7, 23.9),
}


def _case(model: str = "Qwen3-8B", gpus: int = 8, gpu: str = "a100-80g", **values: Any) -> Case:
    trainable, document = values.pop("trainable", FinetuningSettings()), values.pop("document_length", None)
    images = values.pop("image_tokens", 0)
    chosen: dict[str, Any] = {
        "bf16": True,
        "cutoff_len": 4096,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "packing": False,
        **values,
    }
    groups = {
        name: group(**{key: chosen.pop(key) for key in list(chosen) if key in group.model_fields})
        for name, group in GROUPS.items()
    }
    assert not chosen
    return Case(
        model=find_model(model),
        settings=Settings(**{**groups, "finetuning": trainable}),
        world_size=gpus,
        machine=find_machine(gpu),
        document_length=document,
        image_tokens=images,
    )


def _tp(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": size, "sequence_parallel": True, **more}


def _seconds(case: Case, sparse: bool = False) -> Seconds:
    return layer_seconds(shapes_of(case), Rates.of(case.machine, "bfloat16"), sparse)


def _exchange(case: Case, sparse: bool = False) -> Any:
    shapes = shapes_of(case)
    return communication.layer_exchange(shapes, groups_of(case.machine, shapes), _seconds(case, sparse), sparse)


LINK = Link(name="link", bandwidth=100e9, latency=1e-6)
NETWORK = Link(name="network", bandwidth=10e9, latency=10e-6)


def _group(size: int, per_node: int) -> communication.Group:
    return communication.Group(size=size, per_node=per_node, link=LINK, network=NETWORK, efficiency=1.0)


@pytest.mark.parametrize(
    ("group", "gather", "exchange"),
    [
        # 7 / 8 of 8 GB at 100 GB/s in seven hops; one of eight parts stays at home.
        ((8, 8), 0.07 + 7e-6, 0.07 + 1e-6),
        # Two machines of four: four ports of 10 GB/s carry 7 / 8; half of all-to-all leaves by each one's own port.
        ((8, 4), 0.175 + 3e-6 + 10e-6, 0.4 + 10e-6),
        # One of each machine: each has its own port.
        ((4, 1), 0.6 + 30e-6, 0.6 + 10e-6),
        ((1, 1), 0.0, 0.0),
    ],
)
def test_collectives_take_their_volume_over_the_links_they_cross(group, gather, exchange):
    ranks = _group(*group)
    assert all_gather(ranks, 8e9) == pytest.approx(gather)
    assert all_reduce(ranks, 8e9) == pytest.approx(2 * gather)
    assert all_to_all(ranks, 8e9) == pytest.approx(exchange)


def test_messages_take_the_slowest_link_of_their_group():
    assert send(_group(2, 2), 1e9) == pytest.approx(0.01 + 1e-6)
    assert send(_group(2, 1), 1e9) == pytest.approx(0.1 + 10e-6)


def test_collectives_over_pcie_share_what_is_under_the_cards():
    """Eight RTX 5090 were measured at 28 GB/s: https://github.com/NVIDIA/nccl/issues/1639."""
    case = _case(gpu="rtx-5090", **_tp(8))
    assert groups_of(case.machine, shapes_of(case)).tensor.bandwidth == pytest.approx(28e9, rel=0.05)
    own = replace(case, machine=replace(case.machine, link=Link(name="mine", bandwidth=40e9, latency=1e-6)))
    assert groups_of(own.machine, shapes_of(own)).tensor.bandwidth == pytest.approx(0.75 * 40e9)


def test_groups_lie_where_megatron_core_puts_them():
    case = _case(
        "Qwen3-30B-A3B",
        64,
        **_tp(2, context_parallel_size=2, pipeline_model_parallel_size=2),
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    groups = groups_of(case.machine, shapes_of(case))
    dense, expert = communication.data_groups(case)
    sizes = [(group.size, group.per_node) for group in (*groups, dense, expert)]
    # tp 2 and cp 2 inside a machine, and the four ranks of both; ep 8 fills one, dp · cp = 16 every second rank, the
    # four copies of experts on four machines; stages lie 32 ranks apart.
    assert sizes == [(2, 2), (2, 2), (4, 4), (8, 8), (1, 1), (16, 4), (4, 1)]
    stages = group_of(case.machine, 2, 32)
    assert (stages.size, stages.per_node) == (2, 1)


def _bytes(seconds: float, case: Case) -> float:
    """What a group inside a machine moved in this time, without latencies."""
    return seconds * case.machine.link.bandwidth * 0.75


def _without_latency(case: Case) -> Case:
    machine = case.machine
    link, network = (replace(link, latency=0.0) for link in (machine.link, machine.network))
    return replace(case, machine=replace(machine, link=link, network=network))


def test_tensor_parallel_exchanges_two_all_reduces_a_layer_forward():
    size = 4096 * 4096 * 2  # tokens · hidden size · bytes
    for sequence_parallel in (False, True):
        case = _without_latency(_case(tensor_model_parallel_size=4, sequence_parallel=sequence_parallel))
        forward, backward = _exchange(case).tensor
        assert _bytes(forward, case) == pytest.approx(2 * 2 * 3 / 4 * size)
        # Backward at least what no weight's gradient hides: the outputs' gradients, gathered.
        assert _bytes(backward, case) >= (2 * 3 / 4 * size * 0.999 if sequence_parallel else 0)


def test_expert_parallel_sends_each_token_to_its_experts_and_back():
    case = _without_latency(_case("Qwen3-30B-A3B", expert_model_parallel_size=8, moe_expert_capacity_factor=1.0))
    size = 4096 * 8 * 2048 * 2  # tokens · experts of a token · hidden size · bytes
    forward, backward = _exchange(case, sparse=True).expert
    assert _bytes(forward, case) == pytest.approx(2 * 7 / 8 * size)
    assert backward == forward
    gathered = _without_latency(
        _case("Qwen3-30B-A3B", expert_model_parallel_size=8, moe_token_dispatcher_type="allgather")
    )
    forward, _ = _exchange(gathered, sparse=True).expert
    assert _bytes(forward, gathered) == pytest.approx(2 * 7 / 8 * 8 * 4096 * 2048 * 2)


def test_experts_that_nothing_balances_make_their_fullest_rank_slower():
    free = step_time(_case("Qwen3-30B-A3B", expert_model_parallel_size=8))
    even = step_time(_case("Qwen3-30B-A3B", expert_model_parallel_size=8, moe_expert_capacity_factor=1.0))
    assert free.expert_parallel > 1.2 * even.expert_parallel
    assert free.compute > even.compute


@pytest.mark.parametrize(
    ("kind", "volume"),
    [
        # Of 1024 channels of keys and as many of values, those of the three other ranks.
        ("all_gather", 3 * 2 * 1024),
        # Queries, keys, values and outputs, three of four parts.
        ("a2a", 3 / 4 * (2 * 1024 + 2 * 4096)),
    ],
)
def test_context_parallel_exchanges_keys_and_values_or_heads(kind, volume):
    case = _without_latency(_case(context_parallel_size=4, cp_comm_type=kind))
    forward, _ = _exchange(case).context
    assert _bytes(forward, case) == pytest.approx(1024 * volume * 2)


def test_a_ring_hides_behind_attention_where_rows_are_long():
    exposed = [
        step_time(_case(context_parallel_size=4, cutoff_len=length, gpu="a100-80g-pcie")).context_parallel / length
        for length in (2048, 131072)
    ]
    assert exposed[0] > 2 * exposed[1]


def test_the_last_gradients_of_a_ring_come_home_after_all_is_computed():
    case = _without_latency(_case(context_parallel_size=4, cutoff_len=131072))
    forward, backward = _exchange(case).context
    assert forward == 0
    # Of 1024 channels of keys and as many of values, in fp32.
    assert backward == pytest.approx(131072 / 4 * 2 * 1024 * 4 / (300e9 * 0.75))


def test_a_ring_merges_what_its_turns_find():
    """As many tokens at once attend to as many, whether ranks share a row or each has its own: only merging differs."""
    whole, shared = (
        _without_latency(_case(cutoff_len=32768, packing=True, document_length=32768, **more))
        for more in ({}, {"context_parallel_size": 2, "per_device_train_batch_size": 2})
    )
    alone, ring = (_seconds(case) for case in (whole, shared))
    forward = 32768 * 4096 * (26 * 0.75 + 12) / (2039e9 * 0.8)
    assert ring.attention - alone.attention == pytest.approx(forward)
    assert ring.forward - alone.forward == pytest.approx(forward)
    assert ring.backward > alone.backward


def test_ranks_that_exchange_heads_attend_with_the_faster_kernel():
    kinds = ("p2p", "all_gather", "a2a")
    cases = [_case(gpu="h100-80g", context_parallel_size=2, cp_comm_type=kind) for kind in kinds]
    assert [shapes_of(case).varlen for case in cases] == [True, True, False]


def test_heads_that_ranks_outnumber_are_sent_in_copies():
    one, two = (
        _without_latency(_case("Qwen2.5-7B", context_parallel_size=size, cp_comm_type="a2a")) for size in (4, 8)
    )
    volume = {size: (size - 1) / size * 4096 / size * 2 for size in (4, 8)}
    assert _bytes(_exchange(one).context[0], one) == pytest.approx(volume[4] * (2 * 512 + 2 * 3584))
    assert _bytes(_exchange(two).context[0], two) == pytest.approx(volume[8] * (2 * 2 * 512 + 2 * 3584))


def test_gradients_are_reduced_and_weights_gathered_over_data_parallelism():
    case = _without_latency(_case(pipeline_model_parallel_size=2))
    exchange = reduction(case, elements_of(StateConfig.of(case), 1))
    share = 3 / 4 * (4096 * 151936 + 18 * (2 * 4096 + 2 * 128 + 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)) + 4096)
    assert _bytes(exchange.reduce, case) == pytest.approx(4 * share)
    assert _bytes(exchange.gather, case) == pytest.approx(2 * share)
    whole = _without_latency(_case(pipeline_model_parallel_size=2, use_distributed_optimizer=False))
    assert _bytes(reduction(whole, elements_of(StateConfig.of(whole), 1)).reduce, whole) == pytest.approx(2 * 4 * share)
    assert reduction(whole, elements_of(StateConfig.of(whole), 1)).gather == 0
    narrow = _without_latency(_case(pipeline_model_parallel_size=2, accumulate_allreduce_grads_in_fp32=False))
    assert _bytes(reduction(narrow, elements_of(StateConfig.of(narrow), 1)).reduce, narrow) == pytest.approx(2 * share)


def test_overlap_hides_exchanges_of_data_parallelism():
    seconds = [
        step_time(_case(overlap_grad_reduce=reduce, overlap_param_gather=gather)).data_parallel
        for reduce, gather in ((False, False), (True, False), (True, True))
    ]
    assert seconds[0] > seconds[1] > seconds[2]


def test_exchanges_hide_behind_four_fifths_of_a_pass_but_for_the_last_bucket():
    overlapped = _case(overlap_grad_reduce=True, overlap_param_gather=True)
    exchange = communication.Reduction(10.0, 6.0, last=1.0, updates=0.0)
    assert communication.exposed_seconds(overlapped, exchange, forward=5.0, backward=10.0) == pytest.approx(2 + 2)
    assert communication.exposed_seconds(overlapped, exchange, forward=50.0, backward=50.0) == 1
    assert communication.exposed_seconds(_case(), exchange, forward=50.0, backward=50.0) == 16


@pytest.mark.parametrize(("stages", "virtual", "count"), [(1, 1, 4), (2, 1, 8), (4, 1, 8), (4, 2, 8), (8, 4, 32)])
def test_even_stages_wait_the_known_share_of_a_step(stages, virtual, count):
    assert bubble_seconds([3.0] * stages, virtual) / (count * 3) == pytest.approx((stages - 1) / (virtual * count))


def test_uneven_stages_wait_for_the_slowest():
    # One micro-batch goes through all stages once and back; the slowest does the others meanwhile.
    assert bubble_seconds([3, 6, 2], 1) == 5


def test_virtual_stages_exchange_beside_computing_only_where_they_may():
    assert exchange_seconds(1, 1, 8, True, 1.0, 100) == 0
    assert exchange_seconds(4, 1, 8, True, 1.0, 100) == 6 + 16
    assert exchange_seconds(4, 2, 8, True, 1.0, 100) == 6
    assert exchange_seconds(4, 2, 8, False, 1.0, 100) == 6 + 32
    # What takes longer than all that a stage computes has nothing left to run beside.
    assert exchange_seconds(4, 2, 8, True, 1.0, 20) == 6 + 12


def test_virtual_stages_are_no_gift_on_a_slow_network():
    """A chunk of two layers computes for 40 ms, and its message takes 0.14 s over an eighth of 10 Gb/s."""
    case = _case("Meta-Llama-3-70B", 64, **_tp(4, pipeline_model_parallel_size=8, gradient_accumulation_steps=64))
    slow = replace(case, machine=find_machine("a100-80g", network="ethernet-10g"))
    virtual = {"virtual_pipeline_model_parallel_size": 5}
    settings = case.settings.model_copy(update={"parallel": case.settings.parallel.model_copy(update=virtual)})
    assert step_time(replace(case, settings=settings)).total < step_time(case).total
    assert step_time(replace(slow, settings=settings)).total > 2 * step_time(slow).total


def test_closed_form_agrees_with_the_schedule_played_out():
    from megatune.plan.schedule import timeline

    for pp, more in ((4, {}), (4, {"virtual_pipeline_model_parallel_size": 3}), (2, {})):
        time = step_time(_case(pipeline_model_parallel_size=pp, **more))
        closed = time.total - time.data_parallel - time.optimizer - time.overhead
        assert max(slots[-1].end for slots in timeline(time.chunks, 8)) == pytest.approx(closed, rel=0.06)


LAYOUTS = [
    {},
    _tp(4),
    {"pipeline_model_parallel_size": 4},
    {"context_parallel_size": 2},
    _tp(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_faster_parts_never_make_a_step_slower(model, layout):
    case = _case(model, 16, **layout, **({"expert_tensor_parallel_size": 1} if "30B" in model else {}))
    machine = case.machine
    device = machine.device
    faster = (
        replace(machine, link=replace(machine.link, bandwidth=2 * machine.link.bandwidth)),
        replace(machine, network=replace(machine.network, bandwidth=2 * machine.network.bandwidth)),
        replace(machine, device=replace(device, bandwidth=2 * device.bandwidth)),
        replace(machine, device=replace(device, flops=type(device.flops)(bfloat16=2 * device.flops["bfloat16"]))),
    )
    before = step_time(case).total
    assert all(step_time(replace(case, machine=better)).total <= before for better in faster)
    assert step_time(replace(case, machine=faster[2])).total < before


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        {"moe_layer_recompute": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_recomputing_costs_time_and_never_more_than_a_forward_pass(model, recompute):
    plain, again = step_time(_case(model)), step_time(_case(model, **recompute))
    concerned = model == "Qwen3-30B-A3B" or not (
        {"moe_layer_recompute"} & set(recompute) or "moe_act" in str(recompute)
    )
    assert (again.recompute > 0) == concerned
    assert again.total >= plain.total
    assert again.recompute < plain.compute / 2
    assert again.compute == plain.compute


def test_layers_that_block_keeps_recompute_their_experts_where_asked_for():
    model, full = "Qwen3-30B-A3B", {"recompute_granularity": "full", "expert_model_parallel_size": 8}
    first = full | {"recompute_method": "block", "recompute_num_layers": 12}
    layers, plain, experts = (
        step_time(_case(model, **first | more)).recompute
        for more in ({"recompute_num_layers": 48}, {}, {"moe_layer_recompute": True})
    )
    module = step_time(_case(model, expert_model_parallel_size=8, moe_layer_recompute=True)).recompute
    # Of 48 layers 12 are recomputed as a whole, of the others the experts.
    assert plain == pytest.approx(layers / 4)
    assert experts == pytest.approx(layers / 4 + 3 / 4 * module)
    whole = _case(model, **full, moe_layer_recompute=True)
    assert step_time(whole).recompute == step_time(_case(model, **full)).recompute


def test_a_recomputed_feed_forward_exchanges_again():
    case = _without_latency(_case(tensor_model_parallel_size=4))
    exchange, seconds = _exchange(case), _seconds(case)
    _, again = module_seconds(("mlp",), seconds, exchange, sparse=False)
    assert _bytes(again, case) == pytest.approx(2 * 3 / 4 * 4096 * 4096 * 2)  # one all-reduce
    assert module_seconds(("mlp",), seconds, exchange, sparse=True)[1] == 0
    assert module_seconds(("layernorm",), seconds, exchange, sparse=False)[1] == 0


def test_all_recomputed_costs_somewhat_less_than_a_third_more():
    plain, again = step_time(_case()), step_time(_case(recompute_granularity="full"))
    assert again.total / plain.total == pytest.approx(1.29, abs=0.04)


def test_short_rows_are_bound_by_the_host():
    short, long = (step_time(_case(cutoff_len=length, gpu="h100-80g", **_tp(8))) for length in (256, 8192))
    assert short.mfu < long.mfu / 3


def test_what_the_host_launches_is_a_floor_beside_the_roofline():
    """Few short rows: the device waits, and twice the tokens cost nothing more; long rows hide the host."""
    layout = {"expert_model_parallel_size": 8, **_tp(2, expert_tensor_parallel_size=1)}
    few, twice, long = (
        step_time(_case("Qwen3-30B-A3B", gpu="h100-80g", cutoff_len=length, **layout)) for length in (256, 512, 16384)
    )
    assert few.host > few.total / 4
    assert twice.total - twice.overhead == pytest.approx(few.total - few.overhead, rel=0.1)
    assert long.host < 0.01 * long.total


@pytest.mark.parametrize("layout", [{}, _tp(4), {"context_parallel_size": 4}])
def test_exchanges_are_launched_too(layout: dict[str, Any]):
    """As many waits as before, and more of them by the calls: short rows over ranks take longer than on one."""
    alone, together = (step_time(_case(gpu="h100-80g", cutoff_len=256, **each)) for each in ({}, layout))
    calls = _exchange(_case(gpu="h100-80g", cutoff_len=256, **layout)).calls
    assert (sum(calls) > 0) == bool(layout)
    assert together.total >= alone.total - alone.optimizer


def test_packed_documents_take_less_attention():
    whole = step_time(_case(cutoff_len=32768, packing=True))
    packed = step_time(_case(cutoff_len=32768, packing=True, document_length=1000.0))
    assert packed.total < 0.8 * whole.total
    assert packed.model_flops < 0.8 * whole.model_flops
    assert packed.tokens == whole.tokens


@pytest.mark.parametrize("model", GFLOP)
@pytest.mark.parametrize("place", range(4))
def test_model_flops_are_those_of_the_field(model, place):
    length = (2048, 4096, 8192, 32768)[place]
    time = step_time(_case(model, cutoff_len=length))
    assert time.model_flops / time.tokens / 1e9 == pytest.approx(GFLOP[model][place], rel=0.006)


def test_frozen_weights_have_no_gradients():
    full = step_time(_case())
    lora = step_time(_case(trainable=FinetuningSettings(finetuning_type="lora", lora_rank=16)))
    matmuls = 6 * num_matmul_parameters(find_model("Qwen3-8B").architecture) * full.tokens
    assert full.model_flops - lora.model_flops == pytest.approx(matmuls / 3)
    assert lora.compute < 0.87 * full.compute
    assert lora.optimizer < 0.1 * full.optimizer


@pytest.mark.parametrize(
    ("settings", "of_trained", "of_updated"),
    [
        # fp32 gradients: zeroed, scaled (read, written); norm, clipping (read, written) and Adam; both averages, the
        # master weight and a 16-bit weight.
        ({}, 3 * 4, 4 * 4 + 2 * 8 + 8 + 2),
        ({"exp_avg_dtype": "bf16"}, 3 * 4, 4 * 4 + 2 * 6 + 8 + 2),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 3 * 4, 4 * 4 + 8 + 2),
        ({"accumulate_allreduce_grads_in_fp32": False}, 3 * 2, 4 * 2 + 2 * 8 + 8 + 2),
        ({"bf16": False}, 3 * 4, 4 * 4 + 2 * 8 + 8),
    ],
)
def test_the_optimizer_passes_over_gradients_and_state(settings, of_trained, of_updated):
    case = _case(**settings)
    held = StageParameters(
        dense=9000, expert=0, trained_dense=5000, trained_expert=3000, updated=1000, orthogonal_flops=10**6
    )
    seconds = optimizer_seconds(case, Rates.of(case.machine, case.settings.precision.params_dtype), held)
    assert seconds * 0.8 * case.machine.device.bandwidth == pytest.approx(8000 * of_trained + 1000 * of_updated)


def test_calibration_scales_what_it_was_fitted_to():
    case = _case(**_tp(4))
    plain = step_time(case)
    fitted = Calibration(compute=1.5, communication=3.0, num_runs=2)
    scaled = step_time(replace(case, machine=replace(case.machine, calibration=fitted)))
    for part in ("compute", "optimizer"):
        assert getattr(scaled, part) == pytest.approx(1.5 * getattr(plain, part))
    assert scaled.tensor_parallel == pytest.approx(3 * plain.tensor_parallel)
    assert scaled.uncertainty < plain.uncertainty


def test_parts_add_up_and_rates_follow():
    time = step_time(_case(gpus=16, **_tp(4), pipeline_model_parallel_size=2))
    assert time.total == pytest.approx(sum(getattr(time, part) for part in TIME_PARTS))
    assert time.tokens == 2 * 8 * 4096
    assert time.tokens_per_second_per_gpu == pytest.approx(time.tokens / time.total / 16)
    assert time.mfu == pytest.approx(time.model_flops / time.total / 16 / 312e12)
    assert all(isinstance(getattr(time, part), float) and getattr(time, part) >= 0 for part in TIME_PARTS)
    assert isinstance(time, StepTime)


def test_a_cpu_is_slow_and_has_no_peak_in_a_dtype_of_its_own():
    case = replace(_case("Qwen3-0.6B", 1, cutoff_len=128), machine=cpu_machine(2**34, 2))
    assert step_time(case).total > 10
    machine = case.machine
    narrow = replace(machine.device, flops=type(machine.device.flops)(float32=1e11))
    with pytest.raises(MegatuneError) as refused:
        step_time(replace(case, machine=replace(machine, device=narrow)))
    assert refused.value.exit_code == ExitCode.INPUT
    assert "does not compute in bfloat16" in str(refused.value)
    with pytest.raises(MegatuneError, match="of generation 'tpu'"):
        step_time(replace(case, machine=replace(machine, device=replace(machine.device, generation="tpu"))))


@pytest.mark.parametrize("gpu", ["h100-80g", "l40s", "b200-180g"])
def test_fp8_is_faster_where_a_gpu_has_it(gpu: str) -> None:
    bf16, fp8 = (step_time(_case(gpu=gpu, fp8=scaling)).total for scaling in (None, "rowwise"))
    # Two of three products, and passes over memory to round their factors.
    assert bf16 / FP8_SPEEDUP < fp8 < bf16


def test_fp8_is_refused_where_a_gpu_has_none() -> None:
    with pytest.raises(MegatuneError, match="a100-80g does not support fp8"):
        step_time(_case(fp8="tensorwise"))
