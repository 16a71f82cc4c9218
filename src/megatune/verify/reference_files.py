"""What Transformers loads of a model whose weights are in Megatron-Core's format."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatune.bridge.file_set import MAX_FILE_BYTES
from megatune.bridge.merged_model import MergedModel
from megatune.hub.megatron import is_torch_dist


@contextmanager
def as_hugging_face(model_dir: Path, reference: Path | None = None) -> Iterator[Path]:
    """Yield the folder of a model's Hugging Face checkpoint: its own, or one that is written meanwhile.

    Args:
        reference: where it is known to be.
    """
    if reference is not None or not is_torch_dist(model_dir):
        yield reference or model_dir
        return
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        MergedModel(model_dir, []).write(Path(name), MAX_FILE_BYTES)
        for path in model_dir.iterdir():
            if path.is_file():
                shutil.copyfile(path, Path(name) / path.name)
        yield Path(name)
