"""Scalings and multimodal positions of rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency-dependent scaling of rotary embeddings (Transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (arXiv:2309.00071), as Transformers' rope_type "yarn".

    Attributes:
        attention_factor: multiplies cosine and sine.
        truncate: whether the correction range is rounded to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Positions are divided by `factor` (Transformers' rope_type "linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class ProportionalRopeScaling:
    """Only the first `share` of a head's channel pairs are rotated, by the frequencies that they have among all pairs
    of the head (Transformers' rope_type "proportional")."""

    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753), as Transformers' rope_type "longrope": a divisor for the angle of each channel pair,
    and another one in sequences that are longer than the original context.

    Attributes:
        short_factors, long_factors: one for each rotated channel pair.
        attention_factor: multiplies cosine and sine.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / length⌋) after rotary embedding (Ministral 3)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalRope:
    """Rotary embedding by three positions, of time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Attributes:
        section: how many of a head's frequencies use each of the three.
        interleaved: they alternate (t, h, w, t, h, w, ..., and only t at the end); otherwise each has a contiguous
            range.
    """

    section: tuple[int, int, int]
    interleaved: bool


RopeScaling = LinearRopeScaling | Llama3RopeScaling | LongRopeScaling | ProportionalRopeScaling | YarnRopeScaling
