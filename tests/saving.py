"""Writes what ranks hold at once, as tests look at it; all of it is collective over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import adapter_files, finish_adapter
from megatune.bridge.file_set import MAX_FILE_BYTES, FileSet
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.shard_files import optimizer_files
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.optimizer import MainShard
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.selection import Selection


def save_weights(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    coords: RankCoordinates,
    *,
    form: CheckpointForm = AS_MAPPED,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the model's weights, and return the files that this rank wrote."""
    files = FileSet("model", parameters, architecture, coords, max_file_bytes, form)
    return [file.write(folder) for file in files.files()]


def save_adapters(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    coords: RankCoordinates,
    selection: Selection,
) -> None:
    """Write `adapter_files`, and finish them."""
    for file in adapter_files(parameters, architecture, coords).files():
        file.write(folder)
    groups.barrier()
    if coords.rank == 0:
        finish_adapter(folder, architecture, selection)


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    coords: RankCoordinates,
) -> list[Path]:
    """Write `optimizer_files`, and return those that this rank wrote."""
    return [file.write(folder) for file in optimizer_files(parameters, shards, architecture, coords).files()]
