"""Which weights of a frozen base are quantized (QLoRA, arXiv:2305.14314), and the buffers that store them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from megatune.architecture import Architecture
from megatune.families.selection import Selection
from megatune.families.weights import WHOLE, Slice, Stack, TensorLayout, Weight, engine_shape, hf_shapes

BLOCK = 64  # 4-bit elements of a matrix that share a scale
STATISTICS_BLOCK = 256  # scales that share a statistic


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """How matrices are quantized, as in bitsandbytes.

    Attributes:
        kind: "nf4" or "fp4", 4 bits with a scale for each 64 elements; "int8", with a scale for each row.
        double: whether scales of 4-bit matrices are quantized to 8 bits.
    """

    kind: str
    double: bool = False

    @property
    def bits(self) -> int:
        return 8 if self.kind == "int8" else 4

    def buffers(self, rows: int, columns: int, width: int, statistics: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtypes and shapes of the buffers for a slice of stacked matrices.

        Args:
            rows, width: of the slice.
            columns: of the whole matrices.
            statistics: of all matrices, see `num_statistics`.
        """
        if self.bits == 8:
            return {"codes": ("int8", (rows, width)), "scales": ("float32", (rows, 1))}
        is_aligned = columns % BLOCK == 0 and width % BLOCK == 0  # each row of the slice consists of whole blocks
        # A row that starts anywhere in a block overlaps one more block.
        blocks = width // BLOCK if is_aligned else (width + BLOCK - 2) // BLOCK + 1
        kept: dict[str, tuple[str, tuple[int, ...]]] = {
            "codes": ("uint8", (rows, -(-width // 2))),
            "scales": ("uint8" if self.double else "float32", (rows, blocks)),
        }
        if not is_aligned:
            kept["phases"] = ("uint8", (rows,))
        if self.double:
            kept |= {"places": ("int32", (rows,)), "statistics": ("float32", (statistics, 2))}
        return kept

    def num_statistics(self, shape: tuple[int, ...]) -> int:
        """Return the number of statistics of a Hugging Face matrix; blocks continue across its rows."""
        return ceil(prod(shape) / (BLOCK * STATISTICS_BLOCK)) if self.double else 0


def form_of(selection: Selection) -> QuantizedForm | None:
    """Return how a run quantizes its base; None if it does not."""
    if selection.quantization_bit is None:
        return None
    if selection.quantization_bit == 8:
        return QuantizedForm("int8")
    return QuantizedForm(selection.quantization_type, selection.double_quantization)


def is_quantized(weight: Weight, selection: Selection) -> bool:
    """Return whether a weight is quantized: matrices of the decoder's linear layers are; word embedding, output layer,
    norms, router, the gate of shared experts and vision encoders are not."""
    return form_of(selection) is not None and weight.stack is Stack.DECODER and weight.is_matrix


def quantized_buffers(
    weight: Weight, architecture: Architecture, form: QuantizedForm, part: Slice = WHOLE
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes of a rank's buffers for a quantized weight, by the engine's names."""
    *_, width = shape = engine_shape(weight, architecture, part)
    shapes = list(hf_shapes(weight, architecture, 0, part).values())
    statistics = sum(map(form.num_statistics, shapes))
    columns = width * part.tp_size if weight.layout is TensorLayout.COLUMNS else width
    return form.buffers(prod(shape[:-1]), columns, width, statistics)
