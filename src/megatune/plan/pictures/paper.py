"""An empty picture, and writing it."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY, RED = "#3b75af", "#e28b3d", "#4a9a5b", "#9aa0a6", "#c0392b"
DPI = 110


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, that needs no display."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would tell the user about building a font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write(figure: Figure, path: Path) -> None:
    """Write a PNG.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise MegatuneError(
            Finding("cannot write the picture", str(path), error.strerror or str(error)), ExitCode.CANNOT_WRITE
        ) from error
