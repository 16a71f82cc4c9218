"""Tensors of a checkpoint that its model does not use, and that are written back as they were read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatune.bridge.safetensors_files import ModelFolder, TensorEntry
from megatune.families.weights import Segment


@dataclass(frozen=True, slots=True)
class CarriedTensors:
    """Such tensors, by their names in the files of a folder."""

    folder: ModelFolder | None
    names: tuple[str, ...]

    @property
    def entries(self) -> list[TensorEntry]:
        """Describe them, in the order of their names."""
        return [] if self.folder is None else [self.folder.entry(name) for name in self.names]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read them, one after the other."""
        if self.folder is not None:
            for entry in self.entries:
                yield entry.name, self.folder.read(Segment(entry.name, 0, 0, entry.shape[0]))


NOTHING_CARRIED = CarriedTensors(None, ())
