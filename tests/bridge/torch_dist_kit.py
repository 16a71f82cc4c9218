"""What the tests of Megatron-Core's checkpoints share."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.torch_dist.export import MegatronModel
from megatune.families import load_architecture
from megatune.hub.megatron import TRACKER, iteration_name


def to_mcore(model: Path, out: Path, max_file_bytes: int = 5 * 10**9) -> Path:
    """Write a Hugging Face checkpoint's weights in Megatron-Core's format, with its config.json; returns the folder."""
    architecture = load_architecture(model)
    folder, form = open_checkpoint(model, architecture)
    (out / iteration_name(1)).mkdir(parents=True)
    MegatronModel(folder, folder, form, architecture).write(out / iteration_name(1), 1, max_file_bytes=max_file_bytes)
    (out / TRACKER).write_text("1")
    shutil.copyfile(model / "config.json", out / "config.json")
    return out
