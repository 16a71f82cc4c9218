"""Pictures and pages of plans: what is drawn is what was planned, at widths that people have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatune.config.settings import BatchSettings, ParallelSettings, PrecisionSettings, Settings
from megatune.plan.answer import Answer, answer
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.pages import terminal
from megatune.plan.pages.figures import FRONTIER_NAME, PIPELINE_NAME, draw, frontier_figure, pipeline_figure
from megatune.plan.pages.page import as_text
from megatune.plan.pages.terminal import view
from megatune.plan.pages.whole import pages
from megatune.plan.pages.words import amount, bytes_unit, columns, duration, layout_words, plain, seconds_unit
from megatune.plan.question import Question


@dataclass(frozen=True)
class Chunk:
    forward: float
    backward: float


def chunks(pp: int, vpp: int) -> list[list[Chunk]]:
    return [[Chunk(1 / vpp, 2 / vpp)] * vpp for _ in range(pp)]


def question(name: str = "Qwen2.5-1.5B", *, plans_own: bool = True, pp: int = 2, accumulation: int = 4) -> Question:
    settings = Settings(
        parallel=ParallelSettings(pipeline_model_parallel_size=pp),
        batch=BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation),
        precision=PrecisionSettings(bf16=True),
    )
    return Question(model=find_model(name), machine=find_machine("a100-80g"), world_size=4, settings=settings,
                    global_batch_size=accumulation * 4 // pp, plans_own=plans_own)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(question())


@pytest.mark.parametrize(("pp", "vpp", "num_micro_batches"),
                         [(1, 1, 4), (1, 1, 500), (4, 1, 8), (4, 2, 64), (8, 4, 32), (16, 1, 256)])  # fmt: skip
def test_the_shown_part_is_the_step(pp: int, vpp: int, num_micro_batches: int) -> None:
    shown = view(chunks(pp, vpp), num_micro_batches)
    assert shown.bubble == pytest.approx((pp - 1) / (vpp * num_micro_batches + pp - 1))
    assert shown.begins[0] == 0
    # The last window ends with the step.
    begin, end = shown.windows[-1]
    assert shown.begins[-1] + end - begin == pytest.approx(3 * (num_micro_batches + (pp - 1) / vpp))
    last = max(slot.work.micro_batch for slot in shown.drawn.stages[0])
    assert last + 1 + shown.num_left_out == num_micro_batches
    assert (len(shown.windows) == 1) == (shown.num_left_out == 0)
    assert sum(1 for _ in shown.slots(0, 0)) <= 2 * vpp * (4 * pp + 8)


def test_rows_of_the_terminal_schedule(found: Answer) -> None:
    assert found.own is not None
    for width in (60, 80, 120):
        rows = ["".join(piece.text for piece in line) for line in terminal.schedule_lines(found.own, width)]
        assert len(rows) == 2 + 1
        assert rows[0].startswith("  stage 0 1>")
        assert rows[1].startswith("  stage 1 .")  # it waits for the first
        assert rows[1].endswith(".")
        assert all(len(row) <= width and row.isascii() for row in rows)
        assert len(rows[0]) == len(rows[1]) >= width - 6
        assert ". waiting 2" in rows[-1]


def test_the_terminal_frontier_marks_everything(found: Answer) -> None:
    for width in (60, 80):
        rows = [
            "".join(piece.text for piece in line)
            for line in terminal.frontier_lines(found.result, found.own, width, found.recommended)
        ]
        assert all(len(row) <= width for row in rows)
        scale = next(number for number, row in enumerate(rows) if "GiB" in row)
        drawn = "".join(rows[:scale])
        assert "*" in drawn
        assert (drawn.count("@"), drawn.count("R")) == (1, 1)
        assert "R recommended" in " ".join(rows[scale + 1 :])


def test_pictures_are_png_files(found: Answer, tmp_path: Path) -> None:
    written = draw(found, tmp_path / "new")
    assert [path.name for path in written] == [FRONTIER_NAME, PIPELINE_NAME]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_frontier_names_its_layouts(found: Answer) -> None:
    figure = frontier_figure(found.result, found.own, found.recommended)
    axes, names = figure.axes
    recommended = f"recommended: {layout_words(found.recommended.case)}"
    (mark,) = (each for each in axes.collections if each.get_label() == recommended)
    seconds = seconds_unit(found.recommended.time.total)
    assert mark.get_offsets()[0][1] == pytest.approx(found.recommended.time.total / seconds.size)
    assert "GiB" in axes.get_xlabel()
    assert axes.get_ylabel() in ("time of a step (s)", "time of a step (ms)")
    best = found.result.frontier[-1].case
    assert f"{best.micro_batch_size}×{best.num_micro_batches}" in names.texts[1].get_text()
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


@pytest.mark.parametrize(("pp", "vpp", "num_micro_batches", "panels"), [(1, 1, 3, 1), (4, 2, 8, 1), (4, 1, 64, 2)])
def test_the_pipeline_has_a_row_for_each_stage(pp: int, vpp: int, num_micro_batches: int, panels: int) -> None:
    figure = pipeline_figure(view(chunks(pp, vpp), num_micro_batches), "title")
    assert len(figure.axes) == panels
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [f"stage {s}" for s in range(pp)]
    numbers = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"1", f"{num_micro_batches}"} <= numbers
    waiting = [text.get_text() for text in figure.legends[0].get_texts() if text.get_text() == "waiting"]
    assert bool(waiting) == (pp > 1)


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
    said += ["stage 1", "The pipeline"] if plans_own else []
    said += ["IT DOES NOT FIT", "What would make it fit"] if plans_own and not fits else []
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
