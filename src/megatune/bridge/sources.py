"""Sources of weights that are not in the model's files as the run needs them: new adapters and scores, and quantized
matrices.

Each Hugging Face matrix is read and quantized whole, one at a time, and then sliced: the scales depend on all of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
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
from megatune.families.table import Box, Row, whole_box
from megatune.families.weights import Weight, all_shapes, hf_shapes


class InitialAdapters(TensorSource):
    """New adapters with peft's initialization: A uniform within ±1 / √in, B zero, magnitudes the base's row norms.

    Each A is drawn from the seed and its name, so that all layouts start from the same adapters.

    Args:
        base: the source from which the norms are computed.
    """

    def __init__(self, weights: Sequence[Weight], architecture: Architecture, base: TensorSource, seed: int) -> None:
        self._base, self._seed = base, seed
        self.shapes = all_shapes(weights, architecture)

    def read_box(self, name: str, box: Box) -> Tensor:
        if name.endswith(MAGNITUDE):
            weight = name.removesuffix(MAGNITUDE) + "weight"
            rows = whole_box(self._base.shape(weight))._replace(first=box.first, last=box.last)
            return self._base.read_box(weight, rows).float().norm(dim=1, keepdim=True)
        if name.endswith(LORA_A):
            return self.draw(name, box, 1 / math.sqrt(self.shapes[name][1]))
        return torch.zeros(box.shape)

    def draw(self, name: str, box: Box, bound: float) -> Tensor:
        """Draw a tensor uniformly within ±bound, and return a box of it."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(whole_box(self.shapes[name]).shape).uniform_(-bound, bound, generator=generator)
        return drawn[box.slices]


class InitialScore(TensorSource):
    """The new score of a model based on a language model, with Transformers' initialization: normal, with a standard
    deviation of initializer_range.

    It is drawn from the seed alone, so that all layouts start from the same score.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self.shapes = hf_shapes(SCORE, architecture, 0) if architecture.num_labels else {}
        self._deviation, self._seed = architecture.initializer_range, seed

    def read_box(self, name: str, box: Box) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        return torch.empty(self.shape(name)).normal_(0.0, self._deviation, generator=generator)[box.slices]


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
    target: QuantizedMatrix, source: TensorSource, rows: Sequence[Row], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Fill a quantized matrix from the Hugging Face matrices in the rows of its table.

    Args:
        rows: of this rank's slice.
        shapes: of all Hugging Face matrices of the weight in this layer; only of this rank's experts.

    Raises:
        MegatuneError: a file is damaged (exit code 66).
    """
    num_statistics = {name: target.form.num_statistics(shape) for name, shape in shapes.items()}
    target.allocate(next(iter(shapes.values()))[1], sum(num_statistics.values()))
    first_statistic = 0
    for name, count in num_statistics.items():
        if parts := [row for row in rows if row.name == name]:
            # Quantize from the compute dtype.
            whole = quantize(source.whole(name).to(device.current()).to(target.dtype), target.form)
            for row in parts:
                target.store(row.start // target.shape[-1], whole, row.box.slices, first_statistic)
        first_statistic += count


class DequantizedSource(TensorSource):
    """The dequantized values of matrices that a run quantizes, from which DoRA's initial magnitudes are computed.

    Args:
        shapes: of the quantized matrices, by name.
    """

    def __init__(
        self, source: TensorSource, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, form: QuantizedForm
    ) -> None:
        self.shapes, self._source, self._dtype, self._form = shapes, source, dtype, form
        self._dequantized = lru_cache(_MAX_RECENT)(self._dequantize)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read_box(self, name: str, box: Box) -> Tensor:
        return self._dequantized(name)[box.slices] if name in self.shapes else self._source.read_box(name, box)

    def _dequantize(self, name: str) -> Tensor:
        shape = self.shapes[name]
        values = QuantizedMatrix(shape, self._dtype, self._form)
        fill_quantized(values, self._source, [Row(name, shape, whole_box(shape), 0)], {name: shape})
        return values.dequantized().cpu()
