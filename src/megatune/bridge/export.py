"""Stream the weights of a loaded model as whole Hugging Face tensors, as inference engines expect them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import merge_product
from megatune.bridge.assemble import LoadedModel
from megatune.bridge.parameters import Holders, Piece, gather_piece, holders_of
from megatune.engine import device, groups
from megatune.engine.model import gather_parameters
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_weights, adapters, scaling
from megatune.families.peft_form import PREFIX
from megatune.families.selection import Selection
from megatune.families.weights import WHOLE, Role, Slice, Stack, Weight, by_expert, hf_shapes, layers_of

# The engine's name of a weight, its layer, its run of experts: known to all ranks.
_Key = tuple[str, int, int]
_MAX_BYTES = 2**28  # of the experts of a weight that are gathered and sent together


@torch.no_grad()
def export_weights(
    loaded: LoadedModel,
    ranks: Collection[int] | None = None,
    selection: Selection | None = None,
    *,
    adapters_alone: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every weight, named as in the checkpoint; collective: all ranks iterate to the end.

    The order is the same in every layout: weights outside layers, then layer by layer, both in the order of the
    family's weight map, experts one after another. The first rank that holds a slice of a weight gathers it and sends
    it to the others, all its experts of a layer together, up to 256 MiB. Meanwhile that rank holds the data twice, the
    others once; and all experts of a layer, if the checkpoint stores them in one tensor.

    Args:
        ranks: those that receive tensors, such as the first of each machine; others get an empty stream. None: all.
        selection: what is trained, for a model with adapters, which are merged in fp32 and rounded once.
        adapters_alone: yield only the adapters, under peft's names.

    Yields:
        Tensors of the parameters' dtypes on this rank's device, in separate memory.
    """
    architecture = loaded.architecture
    has_adapters = any(local.weight.role is Role.ADAPTER for local in loaded.parameters)
    assert selection is not None or not has_adapters, "weights without their adapters"
    gather_parameters(loaded.model)
    wanted = set(range(loaded.coords.world_size) if ranks is None else ranks)
    gathered = _WeightGatherer(loaded, selection if has_adapters and not adapters_alone else None, wanted)
    family, stacks = FAMILIES[architecture.model_type], list(Stack)
    weights = family.weight_map(architecture)
    if adapters_alone and selection is not None:
        weights = adapter_weights(architecture, selection)
    in_order = sorted(
        ((weight, layer) for weight in weights for layer in layers_of(weight, architecture)),
        key=lambda one: (one[0].per_layer, stacks.index(one[0].stack), one[1]),
    )
    for weight, layer in in_order:
        parts = gathered.parts(weight, layer)
        fused = None if adapters_alone else loaded.form.fused_name(weight, layer)
        if fused is None:
            for _, tensors in parts:
                for name in [*tensors]:
                    own = PREFIX + family.in_modules(name) if adapters_alone else loaded.form.file_name(name)
                    yield own, tensors.pop(name)
        elif (together := _stack_experts(loaded, weight, layer, parts)) is not None:
            yield fused, together


class _WeightGatherer:
    """Gathers the weights of a model from the pieces on the ranks.

    Args:
        merged: the selection whose adapters are merged into the weights; None merges none.
        wanted: the ranks that receive them.
    """

    def __init__(self, loaded: LoadedModel, merged: Selection | None, wanted: set[int]) -> None:
        self._architecture, self._coords, self._wanted = loaded.architecture, loaded.coords, wanted
        self._adapters = {} if merged is None else adapters(loaded.architecture, merged)
        self._factor = 0.0 if merged is None else scaling(merged)
        self._run = _experts_at_once(loaded.architecture, loaded.coords.ep_size)
        self._holders = {experts: holders_of(loaded.coords, experts=experts) for experts in (False, True)}
        self._pieces: dict[_Key, Piece] = {
            (piece.local.weight.engine, piece.local.layer, piece.slice.ep_rank): piece
            for local in loaded.parameters
            if not local.is_copy and self._holders[local.weight.per_expert].replicas.rank() == 0
            for piece in local.pieces(loaded.architecture, self._run)
        }
        owned = {
            key: piece.local.parameter.dtype
            for key, piece in self._pieces.items()
            if self._holders[piece.local.weight.per_expert].slices.rank() == 0
        }
        owned_by = enumerate(groups.all_gather_object(owned))
        self._owners = {key: (rank, dtype) for rank, keys in owned_by for key, dtype in keys.items()}

    def parts(self, weight: Weight, layer: int) -> Iterator[tuple[Slice, dict[str, Tensor]]]:
        """Yield a weight's tensors by Hugging Face name, experts a run at a time, on the wanted ranks. Collective."""
        holders = self._holders[weight.per_expert]
        for part in by_expert(weight, self._architecture, WHOLE, self._run):
            key = (weight.engine, layer, part.ep_rank)
            whole = None
            if key in self._pieces:
                whole = gather_piece(self._pieces[key], holders, 0, self._architecture, device.current())
                self._merge(whole, key, holders)
            owner, dtype = self._owners[key]
            tensors = _send(hf_shapes(weight, self._architecture, layer, part), whole, dtype, owner, self._wanted)
            del whole
            if self._coords.rank in self._wanted:
                yield part, tensors

    def _merge(self, whole: dict[str, Tensor] | None, key: _Key, holders: Holders) -> None:
        """Gather the adapter of a weight like the weight itself, and add it. Collective over the holders.

        Args:
            whole: the weight's Hugging Face tensors; None on ranks that do not have them.
        """
        engine, layer, expert = key
        found: dict[str, Tensor] = {}
        for entry in self._adapters[engine].entries if engine in self._adapters else ():
            piece = self._pieces[entry.engine, layer, expert]
            found |= gather_piece(piece, holders, 0, self._architecture, device.current()) or {}
        for name, tensor in (whole or {}).items():
            a, b, lengths = (found.get(name.removesuffix("weight") + end) for end in (LORA_A, LORA_B, MAGNITUDE))
            if a is not None and b is not None:
                tensor.copy_(merge_product(tensor.float(), a, b, self._factor, lengths))


def _stack_experts(
    loaded: LoadedModel, weight: Weight, layer: int, parts: Iterator[tuple[Slice, dict[str, Tensor]]]
) -> Tensor | None:
    """Stack the experts of a weight into the checkpoint's single tensor; return None if there are no parts."""
    architecture, together = loaded.architecture, None
    (shape,) = loaded.form.file_shapes(weight, architecture, layer).values()
    for part, tensors in parts:
        for one in by_expert(weight, architecture, part):
            matrix = torch.cat([tensors.pop(name) for name in hf_shapes(weight, architecture, layer, one)])
            together = matrix.new_empty(shape) if together is None else together
            together[one.ep_rank] = matrix.T if loaded.form.transposed and matrix.dim() > 1 else matrix
    return together


def _experts_at_once(architecture: Architecture, ep_size: int) -> int:
    """Return how many experts of a weight are gathered and sent together: all on a rank, within `_MAX_BYTES`."""
    if architecture.moe is None:
        return 1
    weights = [each for each in FAMILIES[architecture.model_type].weight_map(architecture) if each.per_expert]
    one = Slice(ep_size=architecture.moe.num_experts)
    sizes = [sum(map(math.prod, hf_shapes(each, architecture, 0, one).values())) for each in weights]
    of_rank = architecture.moe.num_experts // ep_size
    fitting = (run for run in range(of_rank, 1, -1) if of_rank % run == 0 and 4 * run * max(sizes) <= _MAX_BYTES)
    return next(fitting, 1)


def _send(
    shapes: Mapping[str, tuple[int, ...]],
    whole: dict[str, Tensor] | None,
    dtype: torch.dtype,
    owner: int,
    wanted: set[int],
) -> dict[str, Tensor]:
    """Send the owner's tensors to the ranks that want them, flattened into one; return {} on the other ranks.

    Args:
        whole: the tensors, on the owner.
    """
    rank = groups.rank()
    if wanted <= {owner}:
        return whole or {}
    if rank not in wanted | {owner}:
        return {}
    sizes = [math.prod(shape) for shape in shapes.values()]
    if whole is None:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device.current())
    else:
        parts = [whole.pop(name).reshape(-1) for name in shapes]
        flat = torch.cat(parts) if len(parts) > 1 else parts.pop()
        del parts
    if len(wanted) == torch.distributed.get_world_size():
        torch.distributed.broadcast(flat, owner)
    elif rank == owner:
        for other in sorted(wanted - {owner}):
            torch.distributed.send(flat, other)
    else:
        torch.distributed.recv(flat, owner)
    return {name: each.view(shapes[name]) for name, each in zip(shapes, flat.split(sizes), strict=True)}
