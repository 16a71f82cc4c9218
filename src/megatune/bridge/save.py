"""Saves the engine's tensors as Hugging Face safetensors: weights, adapters, the optimizer's state, gradients.

`*_files` say what each rank writes, now or from copies later (`bridge.file_stream`); `save_*` write it at once. All are
collective over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER, AS_IN_PEFT
from megatune.bridge.adapter_writer import is_rewritten, join_adapter
from megatune.bridge.carried import NOTHING_CARRIED, CarriedTensors
from megatune.bridge.file_set import MAX_FILE_BYTES, FileSet, united
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.shard_files import ShardFiles
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.optimizer import MainShard
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.selection import Selection


def weight_files(
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    form: CheckpointForm = AS_MAPPED,
    carried: CarriedTensors = NOTHING_CARRIED,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> FileSet:
    """Return the model's weights, in their dtype, as `model*.safetensors`.

    Args:
        form: names and arrangement of the tensors in the files.
        carried: further tensors beside them.
    """
    return FileSet("model", parameters, architecture, place, max_file_bytes, form, carried)


def save_weights(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    form: CheckpointForm = AS_MAPPED,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write `weight_files`, and return those that this rank wrote."""
    files = weight_files(parameters, architecture, place, form=form, max_file_bytes=max_file_bytes)
    return [file.write(folder) for file in files.files()]


def adapter_files(parameters: Sequence[LocalParameter], architecture: Architecture, place: RankCoordinates) -> FileSet:
    """Return what is trained beside a base, adapters and whole modules, each in its dtype, as `adapter_model*`.

    Ranks write files of their own, of which `finish_adapter` makes the one that peft reads.
    """
    trained = [local for local in parameters if local.parameter.requires_grad]
    return FileSet(ADAPTER, trained, architecture, place, form=AS_IN_PEFT, is_final=False)


def finish_adapter(folder: Path, architecture: Architecture, selection: Selection) -> None:
    """Make peft's `adapter_model.safetensors` of what all ranks wrote; on one rank, once all have.

    Args:
        selection: what is trained.
    """
    is_one = len(list(folder.glob(f"{ADAPTER}*.safetensors"))) == 1
    if not is_one or is_rewritten(architecture, selection):
        join_adapter(folder, architecture, selection)


def save_adapters(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    selection: Selection,
) -> None:
    """Write `adapter_files`, and finish them."""
    for file in adapter_files(parameters, architecture, place).files():
        file.write(folder)
    groups.barrier()
    if place.rank == 0:
        finish_adapter(folder, architecture, selection)


def optimizer_files(
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    folder: str = "",
) -> ShardFiles:
    """Return master weights and running averages, fp32, as `optimizer*.safetensors`.

    Tensors are named KIND/HUGGING_FACE_NAME, so that any layout can read them. Master weights are left out where all
    that is trained is fp32: they are the weights.

    Args:
        folder: that they are in, "training/" or nothing.
    """
    # Under the distributed optimizer a rank may own no part of any parameter.
    kinds = sorted(united({kind: None for shard in shards.values() for kind in shard.state}))
    is_narrow = any(local.parameter.dtype != torch.float32 for local in parameters if local.parameter.requires_grad)
    # Beside adapters, which are fp32, a stage may have a module that is trained whole.
    if any(groups.gather(is_narrow)):
        kinds = ["main", *kinds]
    tensors = {param: {"main": shard.main, **shard.state} for param, shard in shards.items()}
    return ShardFiles(f"{folder}optimizer", kinds, parameters, shards, tensors, architecture, place)


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
) -> list[Path]:
    """Write `optimizer_files`, and return those that this rank wrote."""
    return [file.write(folder) for file in optimizer_files(parameters, shards, architecture, place).files()]


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
) -> list[Path]:
    """Write the gradients that `forward_backward` left, fp32, as `gradient*.safetensors`, tensors named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    files = ShardFiles("gradient", ["grad"], parameters, shards, tensors, architecture, place)
    return [file.write(folder) for file in files.files()]
