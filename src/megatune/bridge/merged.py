"""A model with adapters merged into its matrices, slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatune.bridge.adapter_files import AdapterFolder
from megatune.bridge.safetensors_files import TensorSource
from megatune.families.adapters import LORA_A, LORA_B, MAGNITUDE
from megatune.families.weights import Segment

_WEIGHT = "weight"


class MergedFolder(TensorSource):
    """A model's tensors with adapters merged into them, one after the other.

    W + s · B · A is computed in fp32, through all adapters; who reads it casts once. With weight decomposition every
    row is then scaled to its magnitude. Modules that an adapter has whole are its own. What no adapter changes is the
    base's, in the base's dtype.
    """

    def __init__(self, base: TensorSource, adapters: Sequence[AdapterFolder]) -> None:
        self._base, self._adapters = base, adapters

    def has(self, name: str) -> bool:
        return self._base.has(name) or any(adapter.has(name) for adapter in self._adapters)

    def shape(self, name: str) -> tuple[int, ...]:
        # The score of a reward model may be in an adapter alone.
        owners = (source for source in (self._base, *self._adapters) if source.has(name))
        return next(owners).shape(name)

    def is_changed(self, name: str) -> bool:
        """Return whether an adapter has a tensor, or an adapter of it."""
        return any(adapter.has(name) or adapter.has(_beside(name, LORA_A)) for adapter in self._adapters)

    def read(self, segment: Segment) -> Tensor:
        if not self.is_changed(segment.name):
            return self._base.read(segment)
        if segment.dim == 1 and any(adapter.has(_beside(segment.name, MAGNITUDE)) for adapter in self._adapters):
            # The norms are of whole rows.
            rows = Segment(segment.name, 0, 0, self.shape(segment.name)[0])
            return self._merged(rows)[:, segment.start : segment.stop]
        return self._merged(segment)

    def _merged(self, segment: Segment) -> Tensor:
        """Read rows or columns, fp32."""
        merged: Tensor | None = None
        for adapter in self._adapters:
            if adapter.has(segment.name):
                merged = adapter.read(segment).float()
            if adapter.has(_beside(segment.name, LORA_A)):
                merged = self._base.read(segment).float() if merged is None else merged
                merged = _apply(adapter, segment, merged)
        assert merged is not None
        return merged


def _apply(adapter: AdapterFolder, segment: Segment, weight: Tensor) -> Tensor:
    """Add an adapter's product to rows or columns of a matrix, fp32 and contiguous or not."""
    a, b = (_part(adapter, _beside(segment.name, end), segment, cut) for end, cut in ((LORA_A, 1), (LORA_B, 0)))
    factor = adapter.adapter.scalings[_beside(segment.name, "").removesuffix(".")]
    lengths: Tensor | None = None
    if adapter.has(magnitude := _beside(segment.name, MAGNITUDE)):
        lengths = adapter.read(Segment(magnitude, 0, segment.start, segment.stop)).float()
    return merge_product(weight, a, b, factor, lengths)


def merge_product(weight: Tensor, a: Tensor, b: Tensor, factor: float, lengths: Tensor | None = None) -> Tensor:
    """Return W + s · B · A; with weight decomposition whole rows, scaled to their lengths. All fp32."""
    merged = torch.addmm(weight, b, a, alpha=factor)
    return merged if lengths is None else merged * (lengths / merged.norm(dim=1))[:, None]


def _part(adapter: AdapterFolder, name: str, segment: Segment, cut: int) -> Tensor:
    """Read what of A or B a slice of their product needs, fp32: rows of the product are B's, columns are A's."""
    if segment.dim == cut:
        return adapter.read(Segment(name, cut, segment.start, segment.stop)).float()
    return adapter.read(Segment(name, 0, 0, adapter.shape(name)[0])).float()


def _beside(name: str, end: str) -> str:
    """Return the name of a tensor of the adapter of a matrix."""
    return name.removesuffix(_WEIGHT) + end
