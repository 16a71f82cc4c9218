"""Move a model between its device and host memory, so that several roles can time-share one device.

Storages are freed and refilled in place, so parameters, gradient buffers and optimizer shards remain views of each
other. On a CPU the same code copies within host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Literal, get_args

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor, UntypedStorage

from megatune.engine import device
from megatune.engine.model import Chunk, gather_parameters
from megatune.engine.optimizer import Optimizer, state_tensors

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
_SMALL_BYTES = 2**20


class Offload:
    """The parts of a model that are currently offloaded to the host.

    Args:
        optimizer: None for a model that only runs forward.

    Attributes:
        offloaded: the parts that are on the host.
    """

    def __init__(self, model: Sequence[Chunk], optimizer: Optimizer | None = None) -> None:
        self._model, self._optimizer = list(model), optimizer
        # For each part: the freed storage, its bytes, and the copy; None if its content is not kept.
        self._emptied: dict[Part, list[tuple[UntypedStorage, int, list[Tensor] | None]]] = {}

    @property
    def offloaded(self) -> Collection[Part]:
        return self._emptied.keys()

    @torch.no_grad()
    def move_out(self, parts: Iterable[Part] = PARTS) -> int:
        """Move parts to the host, and free the device's memory; return the number of freed bytes.

        Gradients are not kept: the next backward pass starts with zeroed ones. State that the optimizer keeps on the
        host anyway does not move.
        """
        wanted = [part for part in parts if part not in self._emptied]
        if "weights" in wanted:
            gather_parameters(self._model)
        found = self._storages()
        for part in wanted:
            kept = part != "gradients"
            self._emptied[part] = [(each, each.nbytes(), _on_host(each) if kept else None) for each in found[part]]
        device.synchronize()  # until the copies are complete
        for part in wanted:
            for storage, _, _ in self._emptied[part]:
                storage.resize_(0)
        get_global_memory_buffer().buffer.clear()
        torch.cuda.empty_cache()
        return sum(num_bytes for part in wanted for _, num_bytes, _ in self._emptied[part])

    @torch.no_grad()
    def move_in(self, parts: Iterable[Part] = PARTS) -> int:
        """Move parts back to the device; return the number of allocated bytes."""
        moved = 0
        for part in parts:
            for storage, num_bytes, copy in self._emptied.pop(part, []):
                storage.resize_(num_bytes)
                content = _bytes_of(storage)
                if copy is None:
                    content.zero_()
                else:
                    for piece, kept in zip(content.split(list(map(len, copy))), copy, strict=True):
                        piece.copy_(kept, non_blocking=True)
                moved += num_bytes
        device.synchronize()
        return moved

    def _storages(self) -> dict[Part, list[UntypedStorage]]:
        """Return the storages of each part that are on the device; a storage shared by parts belongs to the first."""
        tensors: dict[Part, Iterable[Tensor]] = {
            "weights": chain.from_iterable(
                chain(chunk.module.parameters(), chunk.module.buffers()) for chunk in self._model
            ),
            "gradients": (
                buffer.grad_data for chunk in self._model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ),
            "optimizer": () if self._optimizer is None else state_tensors(self._optimizer),
        }
        seen: set[int] = set()
        found: dict[Part, list[UntypedStorage]] = {part: [] for part in PARTS}
        for part in PARTS:
            for tensor in tensors[part]:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen and tensor.device.type == device.current().type:
                    seen.add(storage._cdata)
                    found[part] += [storage] if storage.nbytes() else []
        return found


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storage: UntypedStorage) -> list[Tensor]:
    """Copy a storage, into page-locked memory if there is a GPU; torch caches that memory for reuse."""
    copies = []
    for piece in _bytes_of(storage).split(piece_sizes(storage.nbytes())):
        copy = torch.empty(piece.shape, dtype=torch.uint8, pin_memory=device.HAS_GPU)
        copies.append(copy.copy_(piece, non_blocking=True))
    return copies


def piece_sizes(num_bytes: int) -> list[int]:
    """Split bytes into powers of two and a small remainder: torch rounds page-locked memory up to a power of two, so a
    single piece could take twice the memory."""
    sizes = []
    while num_bytes:
        size = 1 << num_bytes.bit_length() - 1 if num_bytes > _SMALL_BYTES else num_bytes
        sizes.append(size)
        num_bytes -= size
    return sizes
