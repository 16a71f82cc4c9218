"""Pictures in plans: what each rank computes of them, what is frozen of the encoder, and what ranks exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from activation_cases import activation_bytes

from megatune.config.load import load
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import Settings, with_settings
from megatune.encoders import Vision
from megatune.errors import ExitCode, MegatuneError
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.catalogue.models import _published
from megatune.plan.estimate import estimate
from megatune.plan.flops import model_flops
from megatune.plan.layouts import SearchRequest
from megatune.plan.operators.shapes import shapes_of
from megatune.plan.operators.vision import Images, images_of
from megatune.plan.pages.words import describe_trained
from megatune.plan.rows import RowLengths
from megatune.plan.run.preflight import Preflight, preflight, with_rows
from megatune.plan.run.record import Measured, RunRecord
from megatune.plan.search import search
from megatune.plan.time import communication, step_time
from megatune.plan.time.communication import groups_of

Changes = Mapping[str, Any]

IMAGE = 576  # tokens of one of image_max_pixels, in squares of 32 pixels
SP = {"parallel.sequence_parallel": True}
TP2, TP4, TP8 = ({"parallel.tensor_model_parallel_size": size} | SP for size in (2, 4, 8))
CP2, PP2 = {"parallel.context_parallel_size": 2}, {"parallel.pipeline_model_parallel_size": 2}
FULL = {"recompute.recompute_granularity": "full"}
TOWER = {"finetuning.freeze_vision_tower": False}
PROJECTOR = {"finetuning.freeze_multi_modal_projector": False}
DEEPSTACK = {"finetuning.freeze_deepstack_mergers": False}


def make_case(*changes: Changes, model: str = "Qwen3-VL-8B", tokens: int | None = 4 * IMAGE) -> Case:
    """Eight A100 and rows of 4,096 tokens, with four images each where nothing else is said."""
    batch = {"batch.per_device_train_batch_size": 1, "batch.gradient_accumulation_steps": 8}
    settings = {"precision.bf16": True, "data.cutoff_len": 4096} | batch
    for each in changes:
        settings |= each
    return Case(
        model=find_model(model),
        settings=with_settings(Settings(), settings),
        world_size=8,
        machine=find_machine("a100-80g"),
        image_tokens=tokens,
    )


def media(case: Case) -> Images:
    found = images_of(case)
    assert found is not None
    return found


def tower(case: Case) -> Vision:
    vision = case.model.architecture.vision
    assert vision is not None
    return vision


@pytest.mark.parametrize(
    ("layout", "rows", "share"),
    [
        ({}, 1, 4),
        (TP2, 1, 2),
        (TP2 | CP2, 1, 1),
        (TP8, 1, 1),  # four ranks have none
        (TP8, 3, 2),
        (PP2, 1, 4),
    ],
)
def test_pictures_are_dealt_over_the_ranks_of_the_first_stage(layout, rows, share):
    batch = {"batch.per_device_train_batch_size": rows}
    case, text = make_case(layout, batch), make_case(layout, batch, tokens=0)
    assert (media(case).rank_tokens, media(case).tokens) == (share * IMAGE, rows * 4 * IMAGE)
    # Of a row they are as many operations in every layout.
    of_row = (model_flops(case) - model_flops(text)) / case.global_batch_size
    alone = make_case()
    expected = (model_flops(alone) - model_flops(make_case(tokens=0))) / alone.global_batch_size
    assert of_row == pytest.approx(expected)


def test_where_nothing_is_said_a_row_has_one_image():
    assert media(make_case(tokens=None)).tokens == IMAGE
    assert media(make_case({"data.cutoff_len": 100}, tokens=None)).tokens == 100
    assert images_of(make_case(tokens=0)) is None
    assert images_of(make_case(model="Qwen3-8B", tokens=None)) is None
    # The last image of a row counts whole for the rank that has it, but for no more than there is.
    assert media(make_case(tokens=IMAGE + 24)).rank_tokens == IMAGE + 24
    assert media(make_case(TP2, tokens=IMAGE + 24)).rank_tokens == IMAGE


def test_tiles_of_an_image_attend_to_themselves(model_dir):
    model = model_dir("internvl")
    whole, tiles = (
        images_of(replace(make_case({"data.crop_to_patches": cut}, tokens=None), model=find_model(str(model))))
        for cut in (False, True)
    )
    assert whole is not None
    assert tiles is not None
    assert (whole.tokens, tiles.tokens) == (9, 13 * 9)
    assert whole.patches_of_image == tiles.patches_of_image == 36


def test_pictures_cost_the_first_stage():
    text, frozen = (step_time(make_case(PP2, model="Qwen2.5-VL-7B", tokens=tokens)) for tokens in (0, 700))
    whole = step_time(make_case(PP2, TOWER, PROJECTOR, model="Qwen2.5-VL-7B", tokens=700))
    assert text.chunks[0][0].forward < frozen.chunks[0][0].forward
    assert text.chunks[0][0].backward == pytest.approx(frozen.chunks[0][0].backward)
    assert frozen.chunks[0][0].backward < 0.99 * whole.chunks[0][0].backward
    assert text.chunks[1] == frozen.chunks[1]
    of_media, rows, width = frozen.model_flops - text.model_flops, frozen.tokens // 4096, 1280
    vision = tower(make_case(model="Qwen2.5-VL-7B"))
    # 2,800 patches: 2 FLOP each and parameter, and 4 · width a layer with each that it attends to: in 4 layers of 32
    # those of the image, in the others 8 · 8 of a window; 700 merged ones.
    of_tower = 2800 * (2 * vision.num_parameters + 4 * width * (4 * 2800 + 28 * 64))
    assert of_media == pytest.approx(rows * (of_tower + 700 * 2 * vision.num_projector_parameters))
    assert whole.model_flops - text.model_flops == pytest.approx(3 * of_media)


def test_what_is_frozen_of_the_encoder_is_not_computed_backward():
    cases = [make_case(), make_case(PROJECTOR), make_case(PROJECTOR, DEEPSTACK), make_case(TOWER)]
    computing = [step_time(case).compute for case in cases]
    assert computing == sorted(set(computing))
    vision, tokens = tower(cases[0]), 4 * IMAGE * cases[0].global_batch_size
    of_merger = 2 * tokens * vision.num_projector_parameters / vision.num_mergers
    frozen, merger, mergers, trained = map(model_flops, cases)
    assert merger - frozen == pytest.approx(2 * of_merger)
    assert mergers - frozen == pytest.approx(2 * 4 * of_merger)
    # Through the frozen merger gradients go on to the encoder; deepstack's are trained with it.
    assert trained - model_flops(make_case(TOWER, PROJECTOR)) == pytest.approx(-of_merger)


def test_a_trained_encoder_is_recomputed_with_the_decoder():
    decoder = step_time(make_case(FULL, tokens=0)).recompute
    assert step_time(make_case(FULL)).recompute == pytest.approx(decoder)
    assert step_time(make_case(FULL, TOWER)).recompute > 1.05 * decoder
    assert step_time(make_case(TOWER)).recompute == 0


def test_ranks_exchange_features_and_what_each_found_of_gradients():
    text, frozen, trained = make_case(TP4, tokens=0), make_case(TP4), make_case(TP4, TOWER)
    times = [step_time(case).tensor_parallel for case in (text, frozen, trained)]
    assert times == sorted(set(times))
    vision, group = tower(trained), groups_of(trained.machine, shapes_of(trained)).tensor
    count = media(trained).num_trained
    assert count == pytest.approx(vision.num_parameters + 3 * vision.num_projector_parameters / 4, rel=1e-4)
    # fp32 gradients, once a step.
    once = communication.encoder_gradients(trained, groups_of(trained.machine, shapes_of(trained)), media(trained))
    assert once == pytest.approx(communication.all_reduce(group, 4 * count))
    assert communication.encoder_gradients(frozen, groups_of(frozen.machine, shapes_of(frozen)), media(frozen)) == 0
    # Of four images a rank sends one, 576 tokens of 4 · 4,096 numbers of two bytes, and gets three.
    shapes = shapes_of(frozen)
    forward = communication.vision_exchange(shapes, groups_of(frozen.machine, shapes), media(frozen))[0]
    embedding = communication.all_reduce(group, 2 * 4096 * 4096)
    assert forward - embedding == pytest.approx(3 * 2 * IMAGE * 4 * 4096 / group.bandwidth + group.latency)


def test_memory_of_the_encoder_is_that_of_a_share():
    """Frozen it keeps nothing, beyond what is passed through it at once; trained it keeps what its share takes."""
    kept = {
        name: activation_bytes(make_case(TP4, *changes, tokens=tokens), 0).activations
        for name, changes, tokens in (
            ("text", (), 0),
            ("frozen", (), 4 * IMAGE),
            ("one image", (TOWER,), IMAGE),
            ("four images", (TOWER,), 4 * IMAGE),
            ("eight images", (TOWER,), 7 * IMAGE),
            ("recomputed", (TOWER, FULL), 4 * IMAGE),
            ("recomputed text", (FULL,), 0),
        )
    }
    layer = 4 * IMAGE * 27 * 2  # a byte of each patch's numbers in every layer
    assert kept["frozen"] < kept["text"] * 1.02
    # Ten times 1,152 numbers and twice 4,304, of four patches a token.
    assert kept["one image"] - kept["text"] == pytest.approx(layer * (10 * 1152 + 2 * 4304), rel=0.1)
    assert kept["four images"] - kept["one image"] < 0.2 * (kept["one image"] - kept["text"])
    assert kept["eight images"] - kept["text"] > 1.8 * (kept["one image"] - kept["text"])
    assert kept["recomputed"] - kept["recomputed text"] < 0.25 * (kept["four images"] - kept["text"])


def test_stages_without_the_encoder_hold_nothing_of_it():
    assert activation_bytes(make_case(PP2, TOWER), 1) == activation_bytes(make_case(PP2, tokens=0), 1)
    more = replace(make_case(PP2, TOWER), image_tokens=0)
    assert activation_bytes(make_case(PP2, TOWER), 0).activations > activation_bytes(more, 0).activations


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), "full fine-tuning, frozen: vision tower, projector, deepstack mergers, 8.19 B parameters, bfloat16"),
        ((DEEPSTACK,), "full fine-tuning, frozen: vision tower, projector, 8.31 B parameters, bfloat16"),
        ((TOWER, PROJECTOR), "full fine-tuning, 8.77 B parameters, bfloat16"),
        (
            (PROJECTOR, {"finetuning.freeze_language_model": True}),
            "full fine-tuning, frozen: vision tower, deepstack mergers, language model, 40.1 M parameters, bfloat16",
        ),
        (
            ({"finetuning.finetuning_type": "freeze"},),
            "freeze fine-tuning, frozen: vision tower, projector, deepstack mergers, language model but for layers 34, "
            "35, 386 M parameters, bfloat16",
        ),
    ],
)
def test_what_is_trained_is_named(changes, said):
    assert describe_trained(make_case(*changes)) == said


# Each as long as cutoff_len allows.
FULL_ROWS = RowLengths.stated(4096, 4096, "")


def checked(folder: Path, machine: str = "a100-80g", **changes: Any) -> Preflight:
    """Of Qwen3-VL-8B on eight devices, tp 2."""
    (folder / "config.json").write_text(json.dumps(_published()["Qwen/Qwen3-VL-8B"][1]))
    values = {"model_name_or_path": str(folder), "output_dir": "out", "dataset": "d", "template": "qwen3_vl_nothink",
              "bf16": True, "cutoff_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
              "tensor_model_parallel_size": 2, "sequence_parallel": True, "overlap_grad_reduce": True,
              "overlap_param_gather": True, **changes}  # fmt: skip
    loaded = load(None, [f"{key}={json.dumps(value)}" for key, value in values.items()])
    return preflight(loaded, 8, (), find_machine(machine))


def test_train_says_which_pictures_it_plans(tmp_path):
    found = checked(tmp_path, image_max_pixels=451_584)
    assert found.planned is not None
    assert found.lines[2] == "plan       each row is assumed to have one image of 451,584 pixels: 441 tokens"
    assert media(found.planned.case).tokens == 441
    # Of rows that are there no more is assumed.
    rows = with_rows(found.planned.case, FULL_ROWS, (2000, 300))
    assert rows.planned is not None
    images = media(rows.planned.case)
    assert (images.tokens, images.rank_tokens, images.patches_of_image) == (2000, 4 * 300, 4 * 300)
    pictured = "rows have at most 2,000 tokens of images or videos; the largest one has 300"
    words = f"plan       rows of 4,096 tokens each; {pictured}: memory: "
    (line,) = rows.lines
    assert line.startswith(words)
    text = with_rows(found.planned.case, FULL_ROWS, (0, 0))
    assert "rows have no images or videos" in text.lines[0]
    without = replace(found.planned.case, image_tokens=0, largest_picture=0, lengths=FULL_ROWS)
    assert text.planned is not None
    assert astuple(text.planned.case) == astuple(without)
    assert text.planned.stages == estimate(without).stages


@pytest.mark.parametrize("check", ["error", "warn"])
def test_rows_whose_pictures_do_not_fit_end_a_run_before_its_model_is_made(tmp_path, check):
    """They were taken to hold one image, and are full of one; the encoder is trained."""
    planned = checked(tmp_path, freeze_vision_tower=False, memory_check=check).planned
    assert planned is not None
    machine = planned.case.machine
    case = replace(planned.case, machine=replace(machine, device=replace(machine.device, memory=planned.fullest.total)))
    assert estimate(case).fits
    if check == "error":
        with pytest.raises(MegatuneError, match="this run cannot fit") as caught:
            with_rows(case, FULL_ROWS, (4096, 4096))
        assert caught.value.exit_code is ExitCode.SETTINGS
    else:
        first, second = with_rows(case, FULL_ROWS, (4096, 4096)).lines
        assert "4,096 tokens of images or videos" in first
        assert second.startswith("warning    this run cannot fit")


def test_pictures_of_a_finished_run_are_planned_as_they_were():
    case = make_case(tokens=2000)
    record = RunRecord(case=case, measured=Measured(counted="allocated", longest_row=4096, row_tokens=3000.5,
                                                    picture_tokens=600.5, step_seconds=1.0))  # fmt: skip
    memory, time = record.as_trained() or pytest.fail("it was trained")
    assert memory.case.picture_tokens == 2000
    assert (time.case.picture_tokens, time.case.settings.data.cutoff_len) == (601, 3001)


def test_the_first_stage_of_a_layout_that_is_found_has_the_layers_that_deepstack_feeds():
    case = make_case()
    result = search(SearchRequest(case=replace(case, world_size=64), global_batch_size=128))
    held = [pipeline_chunks(each.case.settings.parallel, 36)[0].num_layers for each in result.ranked + result.frontier]
    assert min(held) >= 3
    assert any("deepstack" in refusal.why for refusal in result.refused)
