"""What other engines do otherwise: each difference changes what it is about, by as much as its definition says."""

from __future__ import annotations

import dataclasses

import pytest

from megatune.config.load import load
from megatune.plan.case import OF_A_STREAM, OURS, Case, Engine
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.operators.decoder import decoder_layer
from megatune.plan.operators.shapes import shapes_of
from megatune.plan.time import step_time

_WORDS = (
    "bf16=true cutoff_len=4096 expert_model_parallel_size=16 moe_expert_capacity_factor=1 "
    "per_device_train_batch_size=8 gradient_accumulation_steps=4"
)


def _case(words: str = "", gpus: int = 16, engine: Engine = OURS) -> Case:
    settings = load(None, [*_WORDS.split(), *words.split()], []).settings
    machine = find_machine("h100-80g")
    return Case(model=find_model("Qwen3-30B-A3B"), settings=settings, world_size=gpus, machine=machine, engine=engine)


def _expert(engine: Engine) -> float:
    return step_time(_case(engine=engine)).expert_parallel


def test_a_token_travels_once_to_the_other_machine_where_dispatch_says_so() -> None:
    """Of eight experts on two machines four are on the other one; at least one is with 1 - 1 / 2**8."""
    ratio = _expert(Engine(dispatch="machines")) / _expert(OURS)
    assert ratio == pytest.approx((1 - 0.5**8) / 4, rel=0.01)


def test_experts_dealt_out_in_turn_are_on_one_rank() -> None:
    """Eight of 128 experts in turn are those of one of 16 ranks: half of the tokens cross to the other machine."""
    assert _expert(Engine(dispatch="neighbours")) / _expert(OURS) == pytest.approx(0.5 / 4, rel=0.01)


def test_overlapped_exchanges_hide_behind_computing() -> None:
    ours, overlapped = step_time(_case()), step_time(_case(engine=Engine(overlaps=True)))
    assert overlapped.compute == ours.compute
    hidden = ours.expert_parallel - overlapped.expert_parallel
    assert 0.5 * ours.compute < hidden < 0.8 * ours.compute
    assert _expert(Engine(overlaps=True, dispatch="machines")) == 0


def test_products_on_streams_are_launched_one_by_one() -> None:
    def launches(engine: Engine) -> int:
        shapes = shapes_of(_case(engine=engine))
        return sum(operator.launches for operator in decoder_layer(shapes, True)[1])

    assert launches(Engine(products="streams")) - launches(OURS) == 2 * 8 * OF_A_STREAM
    assert launches(Engine(products="loop")) > launches(OURS) + 8 * 10


def test_each_experts_weight_gradient_is_launched_by_itself() -> None:
    """The engine adds the gradient of each of 8 experts to its buffer in a product of its own, of two weights."""

    def of_weights(words: str, engine: Engine = OURS) -> int:
        shapes = shapes_of(_case(words, engine=engine))
        return sum(operator.weight_launches for operator in decoder_layer(shapes, True)[1])

    assert of_weights("gradient_accumulation_fusion=true") == 2 * 8
    assert of_weights("gradient_accumulation_fusion=false") == 0
    assert of_weights("gradient_accumulation_fusion=true finetuning_type=lora") == 0
    assert of_weights("gradient_accumulation_fusion=true", Engine(products="streams")) == 0


def test_a_slow_host_counts_where_the_device_waits_for_it() -> None:
    short = _case("cutoff_len=512 expert_model_parallel_size=4", gpus=4)
    slow = dataclasses.replace(short, engine=Engine(host=2.0))
    assert step_time(slow).total > 1.5 * step_time(short).total


def test_attention_over_context_parallel_ranks_is_as_fast_as_to_whole_rows_where_kernels_are() -> None:
    words = "cutoff_len=131072 context_parallel_size=8 expert_model_parallel_size=8"
    ours, theirs = (step_time(_case(words, engine=engine)).compute for engine in (OURS, Engine(runs=True)))
    assert ours > 1.3 * theirs


def test_kept_logits_save_a_product_of_the_output_layer() -> None:
    """They cost more passes over logits: 8 numbers of 2 bytes a word and token, of 4 micro-batches of 8 rows."""
    ours, theirs = (step_time(_case(engine=engine)).compute for engine in (OURS, Engine(keeps_logits=True)))
    words = 4 * 8 * 4096 * 151936
    saved = ours - theirs + 8 * 2 * words / (0.8 * 3.35e12)
    assert 2 * words * 2048 / 989e12 < saved < 2 * 2 * words * 2048 / 989e12
