"""Saves the engine's tensors as Hugging Face safetensors: weights, the optimizer's state, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.parameters import LocalParameter, Piece
from megatune.bridge.writing import Writing
from megatune.engine.groups import RankCoordinates
from megatune.engine.optimizer import MainShard

# Hugging Face's own limit of a weight file.
MAX_FILE_BYTES = 5 * 10**9


def save_weights(
    folder: Path,
    parameters: Sequence[LocalParameter],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the model's weights, in their dtype, as `model*.safetensors`; collective over all ranks.

    Returns:
        The files that this rank wrote.
    """

    def provide(piece: Piece, kind: str) -> Tensor:
        return piece.local.parameter.data.view(-1)[piece.start : piece.stop]

    writing = Writing(folder, "model", ("",), parameters, architecture, place, max_file_bytes)
    return writing.write(provide, is_split=False)


def save_optimizer(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write master weights and running averages, fp32, as `optimizer*.safetensors`; collective over all ranks.

    Tensors are named KIND/HUGGING_FACE_NAME, so that any layout can read them. Master weights are left out where the
    model itself is fp32: they are the model.
    """
    kinds = _agreed({kind for shard in shards.values() for kind in shard.state})
    if any(local.parameter.dtype != torch.float32 for local in parameters):
        kinds = ["main", *kinds]
    tensors = {param: {"main": shard.main, **shard.state} for param, shard in shards.items()}
    return _save_shards(folder, "optimizer", kinds, parameters, shards, tensors, architecture, place, max_file_bytes)


def save_gradients(
    folder: Path,
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    place: RankCoordinates,
) -> list[Path]:
    """Write the gradients that `forward_backward` left, fp32, as `gradient*.safetensors`, tensors named grad/NAME."""
    tensors = {param: {"grad": shard.grad} for param, shard in shards.items()}
    return _save_shards(folder, "gradient", ["grad"], parameters, shards, tensors, architecture, place, MAX_FILE_BYTES)


def _save_shards(
    folder: Path,
    stem: str,
    kinds: Sequence[str],
    parameters: Sequence[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    tensors: Mapping[Tensor, Mapping[str, Tensor]],
    architecture: Architecture,
    place: RankCoordinates,
    max_file_bytes: int,
) -> list[Path]:
    """Write tensors of which this rank holds elements start..stop, those of its shard, as fp32."""
    trained = [local for local in parameters if not local.weight.is_buffer]
    # Only the distributed optimizer splits a parameter; without it every replica holds all of them.
    is_split = bool(
        _agreed({local.weight.engine for local in trained if not _is_whole(shards.get(local.parameter), local)})
    )

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
    writing = Writing(folder, stem, names, trained, architecture, place, max_file_bytes)
    return writing.write(provide, is_split=is_split)


def _is_whole(shard: MainShard | None, local: LocalParameter) -> bool:
    return shard is not None and (shard.start, shard.stop) == (0, local.parameter.numel())


def _agreed(local: set[str]) -> list[str]:
    """The union over all ranks: under the distributed optimizer a rank may own no part of any parameter."""
    gathered: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    return sorted(set().union(*gathered))
