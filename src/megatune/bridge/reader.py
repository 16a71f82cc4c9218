"""Reads slices of tensors from a folder of safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.weights import Segment


class SafetensorsFolder:
    """The tensors of `NAME.safetensors`, or of the files that `NAME.safetensors.index.json` lists.

    Only what is asked for is read, from memory-mapped files.

    Args:
        folder: where the files are.
        name: "model" for a Hugging Face checkpoint.

    Raises:
        MegatuneError: INPUT, when files are missing, damaged or of another kind.
    """

    def __init__(self, folder: str | Path, name: str = "model") -> None:
        self.folder = Path(folder)
        self._file_of = self._list(name)
        self._open: dict[str, Any] = {}

    def _list(self, name: str) -> dict[str, str]:
        index, single = self.folder / f"{name}.safetensors.index.json", self.folder / f"{name}.safetensors"
        if index.is_file():
            return self._read_index(index)
        if single.is_file():
            try:
                with safe_open(single, framework="pt") as file:
                    return dict.fromkeys(file.keys(), single.name)
            except (SafetensorError, OSError) as error:
                raise _damaged(single, error) from None
        why, fix = "", "give a folder that holds the weights"
        pickles = [path.name for pattern in ("*.bin", "*.pt*") for path in sorted(self.folder.glob(pattern))]
        if pickles:
            why = f"{pickles[0]} is a pickle, which can run code when it is loaded"
            fix = "save the model as safetensors with Transformers: model.save_pretrained(OUT)"
        raise MegatuneError(Finding(f"there is no {single.name}", str(self.folder), why, fix), ExitCode.INPUT)

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise MegatuneError(Finding(f"is not an index of weights: {error}", str(index)), ExitCode.INPUT) from None
        files = set(file_of.values())
        missing = sorted(file for file in files if not (self.folder / file).is_file())
        if missing:
            what = f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:3])}"
            raise MegatuneError(Finding(what, str(index), fix="download the checkpoint again"), ExitCode.INPUT)
        return dict(file_of)

    def names(self) -> set[str]:
        """List the names of all tensors."""
        return set(self._file_of)

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            return self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.folder / file, error) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        """Read the rows or columns that the segment names, in the file's dtype, on the CPU.

        Args:
            prefix: of the tensor's name in the file.
        """
        source = self._slice(prefix + segment.name)
        if segment.dim == 0:
            return source[segment.start : segment.stop]
        return source[:, segment.start : segment.stop]

    def fill(self, target: Tensor, segments: Iterable[Segment], prefix: str = "", *, start: int = 0) -> None:
        """Fill elements of an engine tensor, flattened, with what its segments hold; those beyond them with zeros.

        Only segments with such elements are read, one at a time.

        Args:
            target: elements `start` on of the engine's slice, [n], of any dtype and device.
            segments: of the whole slice, one below the other.
        """
        position = -start  # of a segment's first element in the target
        for segment in segments:
            size = self._num_elements(segment, prefix)
            first, last = max(position, 0), min(position + size, len(target))
            if first < last:
                values = self.read(segment, prefix).reshape(-1)
                target[first:last].copy_(values[first - position : last - position])
            position += size
        target[max(position, 0) :].zero_()

    def _num_elements(self, segment: Segment, prefix: str) -> int:
        shape = self.shape(prefix + segment.name)
        return math.prod(shape) // shape[segment.dim] * (segment.stop - segment.start)


def _damaged(path: Path, error: Exception) -> MegatuneError:
    what, why = f"cannot be read as safetensors: {error}", "the file is damaged or cut short"
    return MegatuneError(Finding(what, str(path), why, "copy it again"), ExitCode.INPUT)
