"""Sources of weights that are not in the model's files as the run needs them: new adapters and scores, and quantized
matrices.

Each Hugging Face matrix is read and quantized whole, one at a time, and then sliced: the scales depend on all of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import open_adapter, with_adapters
from megatune.bridge.safetensors_files import TensorSource
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.quantized import QuantizedMatrix, quantize
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, MAGNITUDE, adapter_weights
from megatune.families.dense import SCORE
from megatune.families.quantized import QuantizedForm, form_of, is_quantized
from megatune.families.weights import Segment, Weight, all_shapes, hf_shapes


class InitialAdapters(TensorSource):
    """New adapters with peft's initialization: A uniform within ±1 / √in, B zero, magnitudes the base's row norms.

    Each A is drawn from the seed and its name, so that all layouts start from the same adapters.

    Args:
        base: the source from which the norms are computed.
    """

    def __init__(self, weights: Sequence[Weight], architecture: Architecture, base: TensorSource, seed: int) -> None:
        self._base, self._seed = base, seed
        self.shapes = all_shapes(weights, architecture)

    def read(self, segment: Segment) -> Tensor:
        shape = self.shapes[segment.name]
        if segment.name.endswith(MAGNITUDE):
            rows = Segment(segment.name.removesuffix(MAGNITUDE) + "weight", 0, segment.start, segment.stop)
            return self._base.read(rows).float().norm(dim=1)
        if segment.name.endswith(LORA_A):
            return self.draw(segment, 1 / math.sqrt(shape[1]))
        return torch.zeros(segment.stop - segment.start, *shape[1:])

    def draw(self, segment: Segment, bound: float) -> Tensor:
        """Draw a tensor uniformly within ±bound, and return the segment of it."""
        digest = hashlib.blake2b(f"{self._seed} {segment.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(self.shapes[segment.name]).uniform_(-bound, bound, generator=generator)
        return drawn.narrow(segment.dim, segment.start, segment.stop - segment.start)


class InitialScore(TensorSource):
    """The new score of a model based on a language model, with Transformers' initialization: normal, with a standard
    deviation of initializer_range.

    It is drawn from the seed alone, so that all layouts start from the same score.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self.shapes = hf_shapes(SCORE, architecture, 0) if architecture.num_labels else {}
        self._deviation, self._seed = architecture.initializer_range, seed

    def read(self, segment: Segment) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        drawn = torch.empty(self.shape(segment.name)).normal_(0.0, self._deviation, generator=generator)
        return drawn.narrow(segment.dim, segment.start, segment.stop - segment.start)


def weight_sources(
    folder: TensorSource, architecture: Architecture, settings: Settings, adapter: Path | None
) -> tuple[TensorSource, TensorSource | None]:
    """Return the sources of the base model's weights, and of adapters and modules that are trained whole.

    Args:
        folder: the model's weights.
        adapter: the checkpoint from which the run resumes; None for the last adapter in the settings, or new ones.

    Returns:
        The base with all earlier adapters merged into it; and the adapters' source, None if there are no adapters.

    Raises:
        MegatuneError: an adapter cannot be used (exit code 66).
    """
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        return folder, None
    chain = [Path(path) for path in finetuning.adapter_name_or_path]
    last = None if finetuning.create_new_adapter or not chain else chain.pop()
    base = with_adapters(folder, [open_adapter(path, architecture) for path in chain])
    if (found := adapter or last) is not None:
        return base, open_adapter(found, architecture, finetuning)
    adapters, values = adapter_weights(architecture, finetuning), base
    if (form := form_of(finetuning)) is not None:
        weights = FAMILIES[architecture.model_type].weight_map(architecture)
        shapes = all_shapes([weight for weight in weights if is_quantized(weight, finetuning)], architecture)
        values = DequantizedSource(base, shapes, getattr(torch, settings.precision.params_dtype), form)
    return base, InitialAdapters(adapters, architecture, values, settings.run.seed)


# Rows of queries, keys and values are read alternately.
_MAX_RECENT = 3


@torch.no_grad()
def fill_quantized(
    target: QuantizedMatrix, source: TensorSource, segments: list[Segment], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Fill a quantized matrix from the Hugging Face matrices of its segments.

    Args:
        segments: of this rank's slice, in order.
        shapes: of all Hugging Face matrices of the weight in this layer; only of this rank's experts.

    Raises:
        MegatuneError: a file is damaged (exit code 66).
    """
    first_statistics, num_statistics = dict[str, int](), 0
    for name, shape in shapes.items():
        first_statistics[name] = num_statistics
        num_statistics += target.form.num_statistics(shape)
    rows = dict(zip(segments, _start_rows(segments, shapes), strict=True))
    target.allocate(next(iter(shapes.values()))[1], num_statistics)
    for name, shape in shapes.items():
        parts = [segment for segment in segments if segment.name == name]
        if not parts:
            continue
        # Quantize from the compute dtype.
        values = source.whole(name).to(device.current()).to(target.dtype)
        whole = quantize(values, target.form)
        for segment in parts:
            cut, every = slice(segment.start, segment.stop), slice(0, shape[1 - segment.dim])
            part = (cut, every) if segment.dim == 0 else (every, cut)
            target.store(rows[segment], whole, part, first_statistics[name])


def _start_rows(segments: list[Segment], shapes: dict[str, tuple[int, ...]]) -> list[int]:
    """Return the row of the slice at which each segment starts."""
    rows, row = [], 0
    for segment in segments:
        rows.append(row)
        row += segment.stop - segment.start if segment.dim == 0 else shapes[segment.name][0]
    return rows


class DequantizedSource(TensorSource):
    """The dequantized values of matrices that a run quantizes, from which DoRA's initial magnitudes are computed.

    Args:
        shapes: of the quantized matrices, by name.
    """

    def __init__(
        self, source: TensorSource, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, form: QuantizedForm
    ) -> None:
        self._source, self._shapes, self._dtype, self._form = source, shapes, dtype, form
        self._recent: dict[str, Tensor] = {}

    def read(self, segment: Segment) -> Tensor:
        if segment.name not in self._shapes:
            return self._source.read(segment)
        if segment.name not in self._recent:
            if len(self._recent) == _MAX_RECENT:
                self._recent.pop(next(iter(self._recent)))
            shape = self._shapes[segment.name]
            values = QuantizedMatrix(shape, self._dtype, self._form)
            fill_quantized(values, self._source, [Segment(segment.name, 0, 0, shape[0])], {segment.name: shape})
            self._recent[segment.name] = values.dequantized().cpu()
        return self._recent[segment.name].narrow(segment.dim, segment.start, segment.stop - segment.start)
