"""Where the weights of a model with adapters come from, and the files that hold what is trained beside its base."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import open_adapter
from megatune.bridge.merged import MergedFolder
from megatune.bridge.quantized import dequantized_source
from megatune.bridge.safetensors_files import TensorSource
from megatune.config.settings import Settings
from megatune.families.adapters import LORA_A, MAGNITUDE, adapter_weights
from megatune.families.dense import SCORE
from megatune.families.weights import Segment, Weight, all_shapes, hf_shapes


class InitialAdapters(TensorSource):
    """New adapters, as peft begins them: A uniform within ±1 / √in, B zero, lengths those of the base's rows.

    Each A is drawn from the seed and its own name, so that every layout begins with the same ones.

    Args:
        base: what the lengths are read from.
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
            return self.drawn(segment, 1 / math.sqrt(shape[1]))
        return torch.zeros(segment.stop - segment.start, *shape[1:])

    def drawn(self, segment: Segment, bound: float) -> Tensor:
        """Draw a tensor uniformly within ±bound, and return the part of it."""
        digest = hashlib.blake2b(f"{self._seed} {segment.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(self.shapes[segment.name]).uniform_(-bound, bound, generator=generator)
        return drawn.narrow(segment.dim, segment.start, segment.stop - segment.start)


class InitialScore(TensorSource):
    """The score of a reward model that is made of a language model, as Transformers begins it: normal, with a standard
    deviation of initializer_range.

    It is drawn from the seed alone, so that every layout begins with the same one.
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
    """Return what the model's own weights are read from, and what those of adapters and of modules trained whole are.

    Args:
        folder: the model's weights.
        adapter: what a run resumes from; None for the last of `adapter_name_or_path`, or new adapters.

    Returns:
        The base, with the adapters before that merged into it; and None where there are no adapters.

    Raises:
        MegatuneError: INPUT, where an adapter cannot be used.
    """
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        return folder, None
    chain = [Path(path) for path in finetuning.adapter_name_or_path]
    last = None if finetuning.create_new_adapter or not chain else chain.pop()
    merged = [open_adapter(path, architecture) for path in chain]
    base: TensorSource = MergedFolder(folder, merged) if merged else folder
    if (found := adapter or last) is not None:
        return base, open_adapter(found, architecture, finetuning)
    return base, InitialAdapters(
        adapter_weights(architecture, finetuning),
        architecture,
        dequantized_source(base, architecture, settings),
        settings.run.seed,
    )
