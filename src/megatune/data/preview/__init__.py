"""Rows as the model will see them, before anything is trained."""

from megatune.data.preview.rows import Part, Preview, PreviewRow, read_preview
from megatune.data.preview.show import show_preview

__all__ = ["Part", "Preview", "PreviewRow", "read_preview", "show_preview"]
