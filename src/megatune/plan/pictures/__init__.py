"""Pictures of plans: the pipeline's schedule, and memory against time, as PNG files and in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatune.plan.answer import Answer

FRONTIER_NAME, PIPELINE_NAME = "plan_frontier.png", "plan_pipeline.png"


def draw(found: Answer, folder: Path) -> list[Path]:
    """Write the pictures that an answer has: of all layouts, and of the pipeline of what was planned.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    from megatune.plan.pictures.frontier import draw_frontier
    from megatune.plan.pictures.pipeline import draw_pipeline

    written = []
    if found.result.ranked or found.result.too_large or found.own is not None:
        written.append(folder / FRONTIER_NAME)
        draw_frontier(found.result, written[-1], found.own)
    if (planned := found.own or found.best) is not None:
        written.append(folder / PIPELINE_NAME)
        draw_pipeline(planned, written[-1])
    return written
