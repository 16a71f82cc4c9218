"""Updates of parameters whose optimizer state is in the host's memory.

Gradients come from the device and weights go back to it in pieces, through page-locked memory, on streams of their own:
while the host computes one piece, the next one's gradients and the last one's weights are on their way. On a CPU the
same is done, from memory to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatune.engine import device

# Elements of a piece; two of them are on their way. A multiple of what the kernel computes at once.
PIECE = 2**24

# Parameter group, parameter, gradient (fp32, where the parameter is), master weight (fp32, on the host; None of an fp32
# parameter, which is one itself), and both averages, on the host.
Work = tuple[dict[str, Any], Tensor, Any, Tensor | None, Tensor, Tensor]
Kernel = Callable[[dict[str, Any], list[Any], list[Any], list[Any], list[Any]], None]


@dataclass(slots=True)
class _Slot:
    """Page-locked memory of a piece on its way: fp32 [PIECE] of gradients, and of weights as many bytes.

    Attributes:
        arrived: the gradients, and the weights of an fp32 parameter, are there.
        left: the weights are on the device.
    """

    gradient: Tensor
    weight: Tensor
    arrived: torch.cuda.Event
    left: torch.cuda.Event

    @classmethod
    def of(cls, size: int) -> _Slot:
        gradient, weight = (torch.empty(size, dtype=torch.float32, pin_memory=device.HAS_GPU) for _ in range(2))
        return cls(gradient, weight, torch.cuda.Event(), torch.cuda.Event())

    def weights(self, values: Tensor) -> Tensor:
        """Return the memory of as many weights of the same dtype."""
        return self.weight.view(values.dtype)[: values.numel()]


class HostUpdates:
    """Takes steps on the host.

    Args:
        kernel: updates fp32 tensors in place: group, weights, gradients, and both averages.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._slots: list[_Slot] = []
        self._streams: list[torch.cuda.Stream] = []

    def run(self, work: Sequence[Work]) -> None:
        """Update all of these parameters; what the device is given next waits until they are there."""
        pieces = list(_pieces(work))
        if not pieces:
            return
        size = max(piece[1].numel() for piece in pieces)
        if not self._slots or self._slots[0].gradient.numel() < size:
            self._slots = [_Slot.of(size) for _ in range(2)]
        if not self._streams:
            self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        fetching, sending = self._streams
        fetching.wait_stream(torch.cuda.current_stream())  # gradients are summed and clipped
        self._fetch(pieces, 0)
        for index, (group, weight, gradient, master, *averages) in enumerate(pieces):
            self._fetch(pieces, index + 1)
            slot = self._slots[index % 2]
            slot.arrived.synchronize()
            updated = slot.weights(weight)
            wide = [each.float() for each in averages]
            value = updated if master is None else master
            self._kernel(group, [value], [slot.gradient[: gradient.numel()]], *([each] for each in wide))
            for each, new in zip(averages, wide, strict=True):
                each.copy_(new)  # onto itself where it is fp32
            if master is not None:
                slot.left.synchronize()  # the weights that were here before
                updated.copy_(master)
            with torch.cuda.stream(sending):
                weight.copy_(updated, non_blocking=True)
                slot.left.record(sending)
        torch.cuda.current_stream().wait_stream(sending)

    def _fetch(self, pieces: Sequence[Any], index: int) -> None:
        """Begin to copy what a piece needs from the device."""
        if index >= len(pieces):
            return
        _, weight, gradient, master, *_ = pieces[index]
        slot, (fetching, _) = self._slots[index % 2], self._streams
        with torch.cuda.stream(fetching):
            slot.gradient[: gradient.numel()].copy_(gradient, non_blocking=True)
            if master is None:
                fetching.wait_event(slot.left)
                slot.weights(weight).copy_(weight, non_blocking=True)
            slot.arrived.record(fetching)


def _pieces(work: Sequence[Work]) -> Iterator[Work]:
    """Cut parameters into pieces."""
    for group, *tensors in work:
        flat = [None if each is None else each.view(-1) for each in tensors]
        assert flat[0] is not None
        for start in range(0, flat[0].numel(), PIECE):
            yield group, *(None if each is None else each[start : start + PIECE] for each in flat)  # type: ignore[misc]
