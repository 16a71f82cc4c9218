"""Quantized matrices from the files of a model in 16 or 32 bits: each Hugging Face matrix is read and quantized whole,
one at a time, and cut then, since the scales of a slice need all of it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import TensorSource
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.quantized import QuantizedMatrix, QuantizedTensor, quantize
from megatune.families import FAMILIES
from megatune.families.quantized import QuantizedForm, form_of, is_quantized
from megatune.families.weights import Segment, all_shapes

# Rows of queries, keys and values are asked for in turn.
_MOST_RECENT = 3


@torch.no_grad()
def fill_quantized(
    target: QuantizedMatrix, source: TensorSource, segments: list[Segment], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Fill a quantized matrix from what its segments are parts of.

    Args:
        segments: of this rank's slice, in order.
        shapes: of all Hugging Face matrices of the weight in this layer; of this rank's experts only.

    Raises:
        MegatuneError: INPUT, where a file is damaged.
    """
    first_statistics, num_statistics = dict[str, int](), 0
    for name, shape in shapes.items():
        first_statistics[name] = num_statistics
        num_statistics += target.form.num_statistics(shape)
    rows = dict(zip(segments, _first_rows(segments, shapes), strict=True))
    target.allocate(next(iter(shapes.values()))[1], num_statistics)
    for name, shape in shapes.items():
        parts = [segment for segment in segments if segment.name == name]
        whole = quantize_whole(source, name, shape, target.dtype, target.form) if parts else None
        for segment in parts:
            assert whole is not None
            cut, every = slice(segment.start, segment.stop), slice(0, shape[1 - segment.dim])
            part = (cut, every) if segment.dim == 0 else (every, cut)
            target.store(rows[segment], whole, part, first_statistics[name])


def _first_rows(segments: list[Segment], shapes: dict[str, tuple[int, ...]]) -> list[int]:
    """Return the row of the slice that each segment begins at."""
    rows, row = [], 0
    for segment in segments:
        rows.append(row)
        row += segment.stop - segment.start if segment.dim == 0 else shapes[segment.name][0]
    return rows


def quantize_whole(
    source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype, form: QuantizedForm
) -> QuantizedTensor:
    """Read a matrix and quantize it, on the current device, from the dtype that is computed with."""
    return quantize(source.read(Segment(name, 0, 0, shape[0])).to(device.current()).to(dtype), form)


class DequantizedSource(TensorSource):
    """What matrices are worth that a run quantizes, in place of those in the files: DoRA's first lengths are of them.

    Args:
        shapes: of the quantized ones, by name.
    """

    def __init__(
        self, source: TensorSource, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, form: QuantizedForm
    ) -> None:
        self._source, self._shapes, self._dtype, self._form = source, shapes, dtype, form
        self._recent: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, segment: Segment) -> Tensor:
        if segment.name not in self._shapes:
            return self._source.read(segment)
        if segment.name not in self._recent:
            if len(self._recent) == _MOST_RECENT:
                self._recent.pop(next(iter(self._recent)))
            shape = self._shapes[segment.name]
            values = QuantizedMatrix(shape, self._dtype, self._form)
            fill_quantized(values, self._source, [Segment(segment.name, 0, 0, shape[0])], {segment.name: shape})
            self._recent[segment.name] = values.dequantized().cpu()
        return self._recent[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)


def dequantized_source(source: TensorSource, architecture: Architecture, settings: Settings) -> TensorSource:
    """Return the source, or where the run quantizes its base what quantizing makes of it."""
    form = form_of(settings.finetuning)
    if form is None:
        return source
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    quantized = [weight for weight in weights if is_quantized(weight, settings.finetuning)]
    return DequantizedSource(
        source, all_shapes(quantized, architecture), getattr(torch, settings.precision.params_dtype), form
    )
