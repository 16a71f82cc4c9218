"""The weights of a loaded model as a stream of whole Hugging Face tensors, as an inference engine takes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from megatune.bridge.assemble import LoadedModel
from megatune.bridge.parameters import gather_piece, holders_of
from megatune.engine import device, groups
from megatune.engine.model import gather_parameters
from megatune.families import FAMILIES
from megatune.families.weights import WHOLE, Role, Stack, by_expert, hf_shapes, layers_of


@torch.no_grad()
def export_weights(loaded: LoadedModel, ranks: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every weight, as the checkpoint has it; collective: each rank iterates to the end.

    The order is the same in every layout: weights outside layers, then layer by layer, both in the order of the
    family's weight map, experts one after another. The first rank that holds a slice of a weight gathers it and sends
    it to the others. That rank has one weight twice in memory meanwhile, the others have one tensor; of experts, one
    expert's, or those of a layer where the checkpoint has them in one tensor.

    Args:
        ranks: those that get the tensors, such as the first of each machine; for others the stream is empty. None: all.

    Yields:
        Tensors of the parameters' dtypes on this rank's device, in memory of their own.
    """
    architecture, place = loaded.architecture, loaded.place
    assert not any(local.weight.role is Role.ADAPTER for local in loaded.parameters), "weights without their adapters"
    gather_parameters(loaded.model)
    holders = {experts: holders_of(place, experts=experts) for experts in (False, True)}
    # By names that all ranks know: the engine's name of the weight, its layer, its expert.
    pieces = {
        (piece.local.weight.engine, piece.local.layer, piece.slice.ep_rank): piece
        for local in loaded.parameters
        if not local.is_copy and holders[local.weight.per_expert].replicas.rank() == 0
        for piece in local.pieces(architecture)
    }
    owned = {
        key: piece.local.parameter.dtype
        for key, piece in pieces.items()
        if holders[piece.local.weight.per_expert].slices.rank() == 0
    }
    owners = {key: (rank, dtype) for rank, keys in enumerate(groups.gather(owned)) for key, dtype in keys.items()}
    wanted = set(range(place.world_size) if ranks is None else ranks)
    weights, stacks = FAMILIES[architecture.model_type].weight_map(architecture), list(Stack)
    in_order = sorted(
        ((weight, layer) for weight in weights for layer in layers_of(weight, architecture)),
        key=lambda one: (one[0].per_layer, stacks.index(one[0].stack), one[1]),
    )
    for weight, layer in in_order:
        fused, together = loaded.form.fused_name(weight, layer), None
        for part in by_expert(weight, architecture, WHOLE):
            key = (weight.engine, layer, part.ep_rank)
            owner, dtype = owners[key]
            whole = None
            if key in pieces:
                piece = pieces[key]
                mine = piece.local.parameter.data.view(-1)[piece.start : piece.stop]
                whole = gather_piece(piece, mine, holders[weight.per_expert], 0, architecture, mine.device)
            matrices = []
            for name, shape in hf_shapes(weight, architecture, layer, part).items():
                tensor = torch.empty(shape, dtype=dtype, device=device.current()) if whole is None else whole.pop(name)
                _send(tensor, owner, wanted)
                if place.rank in wanted and fused is None:
                    yield loaded.form.file_name(name), tensor
                matrices.append(tensor)
                del tensor
            if place.rank in wanted and fused is not None:
                (shape,) = loaded.form.file_shapes(weight, architecture, layer).values()
                together = matrices[0].new_empty(shape) if together is None else together
                matrix = torch.cat(matrices)
                together[part.ep_rank] = matrix.T if loaded.form.transposed else matrix
        if fused is not None and together is not None:
            yield fused, together


def _send(tensor: Tensor, owner: int, wanted: set[int]) -> None:
    """Fill the tensor of the ranks that want it with the owner's."""
    rank = groups.rank()
    if len(wanted) == torch.distributed.get_world_size():
        torch.distributed.broadcast(tensor, owner)
    elif rank == owner:
        for other in sorted(wanted - {owner}):
            torch.distributed.send(tensor, other)
    elif rank in wanted:
        torch.distributed.recv(tensor, owner)
