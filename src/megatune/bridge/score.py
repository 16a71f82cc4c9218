"""The score of a reward model that is made of a language model, which is in no file."""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import TensorSource
from megatune.families.dense import SCORE
from megatune.families.weights import Segment, hf_shapes


class InitialScore(TensorSource):
    """A new score as Transformers begins it: normal, with a standard deviation of initializer_range.

    It is drawn from the seed alone, so that every layout begins with the same one.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self._shapes = hf_shapes(SCORE, architecture, 0) if architecture.num_labels else {}
        self._deviation, self._seed = architecture.initializer_range, seed

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, segment: Segment) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        drawn = torch.empty(self.shape(segment.name)).normal_(0.0, self._deviation, generator=generator)
        return drawn.narrow(segment.dim, segment.start, segment.stop - segment.start)
