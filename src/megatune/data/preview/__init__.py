"""Rows as the model will see them, before anything is trained."""

from megatune.data.preview.rows import Preview, PreviewRow, RowDocument, load_model_input, read_preview
from megatune.data.preview.show import json_lines, show_preview, write_page

__all__ = [
    "Preview",
    "PreviewRow",
    "RowDocument",
    "json_lines",
    "load_model_input",
    "read_preview",
    "show_preview",
    "write_page",
]
