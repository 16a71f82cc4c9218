"""Pictures and pages of plans: what is drawn is what was planned, at widths that people have."""

from __future__ import annotations

import json

import pytest

from megatune.config.settings import BatchSettings, ParallelSettings, PrecisionSettings, Settings
from megatune.pages import as_text, columns, plain
from megatune.plan.answer import Answer, Question, answer
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.pages.whole import pages
from megatune.plan.pages.words import amount, bytes_unit, describe_layout, duration, seconds_unit
from megatune.plan.results import FRONTIER_NAME, TRACE_NAME, figures, frontier_figure, schedule_trace
from megatune.plan.schedule import timeline


def question(
    name: str = "Qwen2.5-1.5B",
    *,
    plans_own: bool = True,
    pp: int = 2,
    virtual: int | None = None,
    accumulation: int = 4,
) -> Question:
    layout = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": virtual}
    settings = Settings(
        parallel=ParallelSettings.model_validate(layout),
        batch=BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation),
        precision=PrecisionSettings(bf16=True),
    )
    case = Case(model=find_model(name), settings=settings, world_size=4, machine=find_machine("a100-80g"))
    return Question(case=case, global_batch_size=accumulation * 4 // pp, plans_own=plans_own)


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(question())


def test_an_answer_is_drawn_and_its_schedule_is_a_trace(found: Answer) -> None:
    files = figures(found)
    assert list(files) == [FRONTIER_NAME, TRACE_NAME]
    assert files[FRONTIER_NAME].startswith(b"\x89PNG")
    assert json.loads(files[TRACE_NAME]) == schedule_trace(found.own)


@pytest.mark.parametrize(("pp", "virtual", "accumulation"), [(1, None, 4), (4, None, 8), (4, 2, 64)])
def test_the_trace_is_the_step(pp: int, virtual: int | None, accumulation: int) -> None:
    """As Chrome's format has it: a process for each stage, and complete events in microseconds that never overlap."""
    planned = answer(question(pp=pp, virtual=virtual, accumulation=accumulation)).own
    trace = schedule_trace(planned)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == [f"stage {stage}" for stage in range(pp)]
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(passes) == 2 * pp * (virtual or 1) * accumulation
    for stage in range(pp):
        mine = [event for event in passes if event["pid"] == stage]
        ends = [event["ts"] + event["dur"] for event in mine]
        assert all(event["ts"] >= end - 1e-3 for event, end in zip(mine[1:], ends, strict=False))
    last = max(event["ts"] + event["dur"] for event in passes)
    assert last / 1e6 == pytest.approx(
        max(slots[-1].end for slots in timeline(planned.time.chunks, accumulation)), rel=0.01
    )
    assert {event["name"] for event in passes} >= {"forward 1", f"backward {accumulation}"}


def test_of_a_step_with_very_many_passes_the_first_are_in_the_trace() -> None:
    planned = answer(question(pp=4, accumulation=65_536)).own
    trace = schedule_trace(planned)
    assert len(trace["traceEvents"]) <= 100_004
    assert trace["otherData"]["micro_batches"] == 65_536
    assert trace["otherData"]["simulated_micro_batches"] == 12_500


def test_the_frontier_names_its_layouts(found: Answer) -> None:
    figure = frontier_figure(found.result, found.own, found.recommended)
    (axes,) = figure.axes
    recommended = f"recommended: {describe_layout(found.recommended.case)}"
    (mark,) = (each for each in axes.lines if each.get_label() == recommended)
    seconds = seconds_unit(found.recommended.time.total)
    assert mark.get_ydata()[0] == pytest.approx(found.recommended.time.total / seconds.size)
    assert "GiB" in axes.get_xlabel()
    assert axes.get_ylabel() in ("time of a step (s)", "time of a step (ms)")
    assert describe_layout(found.result.frontier[0].case) in [text.get_text() for text in axes.texts]
    low, high = axes.get_xlim()
    unit = bytes_unit(found.result.frontier[-1].fullest.total)
    assert all(low < each.fullest.total / unit.size < high for each in found.result.frontier[-3:])


@pytest.mark.parametrize("plans_own", [True, False])
def test_the_devices_memory_is_seen_where_nothing_fits(plans_own: bool) -> None:
    asked = question("Qwen2.5-72B", plans_own=plans_own)
    found = answer(asked)
    assert not found.result.ranked
    axes = frontier_figure(found.result, found.own).axes[0]
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    assert low < found.result.too_large[0].case.machine.device.memory / 2**30 < high
    for each in found.result.too_large:
        assert low < each.fullest.total / 2**30 < high
        assert bottom < each.time.total < top


@pytest.mark.parametrize("plans_own", [True, False])
@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", "Qwen3-30B-A3B"])
def test_pages_say_the_parts_and_stay_narrow(name: str, plans_own: bool) -> None:
    asked = question(name, plans_own=plans_own)
    text = "\n".join(as_text(page) for page in pages(answer(asked), top=5))
    assert text.isascii()
    assert not [line for line in text.splitlines() if len(line) > 96]
    fits = name != "Qwen3-30B-A3B"
    said = ["Assumed", "GiB"]
    said += ["activations", "optimizer state", "tokens/s", "MFU", "likely"] if plans_own or fits else ["NO LAYOUT FITS"]
    said += ["stage 1", "Pipeline: stages wait"] if plans_own else []
    said += (
        ["IT DOES NOT FIT", "What would make it fit", "optimizer_cpu_offload: true"] if plans_own and not fits else []
    )
    assert [words for words in said if words not in text] == []


def test_numbers_as_people_read_them() -> None:
    assert amount(8_030_261_248) == "8.03 B"
    assert amount(596_049_920) == "596 M"
    assert duration(45) == "45 s"
    assert duration(86400 * 3.5) == "3.5 days"
    assert bytes_unit(3 * 2**30).with_name(2**30) == "1.00 GiB"
    assert bytes_unit(3 * 2**20).with_name(2**20) == "1.00 MiB"
    assert seconds_unit(0.2).with_name(0.2) == "200.0 ms"
    assert list(columns([["a", "1.0"], ["bcd", "10.0"]])) == ["a     1.0", "bcd  10.0"]
    assert plain("2×4 ± 5 %") == "2x4 +/- 5 %"
