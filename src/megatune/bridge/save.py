"""Saves the engine's tensors as Hugging Face safetensors: weights, adapters, the optimizer's state, gradients.

`*_files` say what each rank writes, now or from copies later (`bridge.file_set`); `save_*` write it at once. All are
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
from megatune.bridge.parameters import LocalParameter, Piece
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
    layout = architecture, place, max_file_bytes, form, carried
    return FileSet("model", ("",), None, _elements, False, parameters, *layout)


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
    layout = architecture, place, MAX_FILE_BYTES, AS_IN_PEFT
    return FileSet(ADAPTER, ("",), None, _elements, False, trained, *layout)


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


def _elements(piece: Piece, kind: str) -> Tensor:
    return piece.local.parameter.data.view(-1)[piece.start : piece.stop]


def optimizer_files(
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    folder: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> FileSet:
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
    stem, layout = f"{folder}optimizer", (architecture, place, max_file_bytes)
    return _shard_files(stem, kinds, parameters, shards, tensors, *layout)


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write `optimizer_files`, and return those that this rank wrote."""
    files = optimizer_files(parameters, shards, architecture, place, max_file_bytes=max_file_bytes)
    return [file.write(folder) for file in files.files()]


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
) -> list[Path]:
    """Write the gradients that `forward_backward` left, fp32, as `gradient*.safetensors`, tensors named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    files = _shard_files("gradient", ["grad"], parameters, shards, tensors, architecture, place, MAX_FILE_BYTES)
    return [file.write(folder) for file in files.files()]


def _shard_files(
    stem: str,
    kinds: Sequence[str],
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    tensors: Mapping[Tensor, Mapping[str, Tensor]],
    architecture: Architecture,
    place: RankCoordinates,
    max_file_bytes: int,
) -> FileSet:
    """Return files of tensors of which this rank holds elements start..stop, those of its shard, as fp32."""
    trained = [local for local in parameters if local.parameter.requires_grad]

    def is_whole(local: LocalParameter) -> bool:
        shard = shards.get(local.parameter)
        return shard is not None and (shard.start, shard.stop) == (0, local.parameter.numel())

    # Only the distributed optimizer splits a parameter; without it every replica holds all of them.
    is_split = not all(groups.gather(all(is_whole(local) for local in trained)))

    def provide(piece: Piece, kind: str) -> Tensor:
        param, shard = piece.local.parameter, shards.get(piece.local.parameter)
        if not is_split:
            # Averages may lie in the host's memory, or be narrower.
            return tensors[param][kind[:-1]][piece.start : piece.stop].to(param.device, torch.float32)
        whole = torch.zeros(piece.stop - piece.start, dtype=torch.float32, device=param.device)
        if shard is not None:
            first, last = max(shard.start, piece.start), min(shard.stop, piece.stop)
            if first < last:
                mine = tensors[param][kind[:-1]]
                whole[first - piece.start : last - piece.start] = mine[first - shard.start : last - shard.start]
        return whole

    names = tuple(f"{kind}/" for kind in kinds)
    layout = architecture, place, max_file_bytes
    return FileSet(stem, names, torch.float32, provide, is_split, trained, *layout)
