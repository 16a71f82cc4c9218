"""Figures that need no display, and writing them as PNG."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it reports that it builds a font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()


def write(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, and create its folder.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    content = as_png(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        finding = Finding("cannot write the picture", str(path), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
