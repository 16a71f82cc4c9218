"""What is planned: a model, the settings of a run, the engine that trains it, and the machines under it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, NamedTuple

from megatune.architecture import Architecture
from megatune.config.groups.data import TILES
from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import Settings
from megatune.plan.machine import Machine
from megatune.plan.rows import RowLengths, longest_of

# Streams of Transformer Engine's products (transformer_engine/pytorch/cpp_extensions/gemm.py), and launches by this
# engine's measure that one of them takes the host: a profile has 10 to 14 microseconds (yanring/Megatron-MoE-ModelZoo,
# issue 7, nvte_cublas_gemm), without Python and autograd.
STREAMS, OF_A_STREAM = 4, 0.5
# Operators of Transformers' loop for each expert beside its products: finding, gathering and weighting its tokens,
# gate times up, and adding to the output (models/qwen2_moe/modeling_qwen2_moe.py of version 4).
LOOPED = 8
_STANDARD = NormalDist()


class Engine(NamedTuple):
    """How an engine computes and exchanges what goes through experts, so that a run of others can be planned as it ran.

    A plan is of this engine, `OURS`. Published speeds were made by others, and benchmarks/planner_accuracy.py plans
    each twice: by the engine that made it, which says how far the planner is off, and by this one, which says what a
    user gets.

    Attributes:
        products: of a rank's experts: one "grouped" kernel; or a kernel for each expert, on several "streams" at once
            (Transformer Engine's GroupedLinear); or operators for each expert in a Python "loop".
        dispatch: "ranks": a token is sent to each of its experts. "machines": once to each machine that has any, and
            from there once to each rank, by kernels that sort the tokens on their way (DeepEP, HybridEP). "neighbours":
            the same, with experts of a token that lie next to one another, as the gate of a benchmark deals them out.
        runs: attention to documents of a packed row, and to parts of one that other ranks hold, is as fast as to whole
            rows (cuDNN through Transformer Engine); torch has slower kernels for it.
        keeps_logits: the backward pass of the loss does not compute them again, chunk by chunk.
        overlaps: exchanges run next to the passes of another micro-batch (Megatron-Core's
            overlap_moe_expert_parallel_comm, DualPipeV).
        host: seconds that the host takes for an operator, over those of this engine.
    """

    products: Literal["grouped", "streams", "loop"] = "grouped"
    dispatch: Literal["ranks", "machines", "neighbours"] = "ranks"
    runs: bool = False
    keeps_logits: bool = False
    overlaps: bool = False
    host: float = 1.0


OURS = Engine()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as far as a plan needs it.

    Attributes:
        name: what the user called it.
    """

    name: str
    architecture: Architecture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key of caches, known by identity
class Case:
    """What one estimate is of.

    Attributes:
        settings: of the run; what is trained, layout, batch, precision, optimizer, recomputation and kernels are read
            from them.
        world_size: processes of the whole run; a multiple of settings.parallel.smallest_world.
        document_length: tokens of the mean document of a packed row; None where a row is one document, or a pair.
        image_tokens: tokens of a row that stand for pictures, of a pair in both its documents; None for one image of
            image_max_pixels in each, where the model reads any.
        largest_picture: tokens of one picture at most; None for those of an image of image_max_pixels.
        lengths: of rows; None where each is cutoff_len long.
        of_mean: rows are the mean ones, as time is planned for; False for the longest, as memory is.
        engine: what trains it.
    """

    model: PlannedModel
    settings: Settings
    world_size: int
    machine: Machine
    document_length: float | None = None
    image_tokens: int | None = None
    largest_picture: int | None = None
    lengths: RowLengths | None = None
    of_mean: bool = False
    engine: Engine = OURS

    @property
    def with_mean_rows(self) -> Case:
        """The same with its mean rows."""
        return self if self.lengths is None else replace(self, of_mean=True)

    @property
    def tokens_per_image(self) -> int:
        """Tokens of one picture at most, one for each square of merged patches; 0 for a language model."""
        if (vision := self.model.architecture.vision) is None:
            return 0
        if self.largest_picture is not None:
            return self.largest_picture
        if vision.square is not None:
            tiles = TILES[1] + 1 if self.settings.data.crop_to_patches else 1
            return tiles * int(vision.square // (vision.patch_size * vision.spatial_merge_size)) ** 2
        if vision.tokens_of_image is not None:
            return vision.tokens_of_image
        return max(1, self.settings.data.image_max_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2)

    @property
    def picture_tokens(self) -> int:
        """Tokens of a row that stand for pictures."""
        if self.model.architecture.vision is None:
            return 0
        per_row = self.sequences_per_row
        asked = per_row * self.tokens_per_image if self.image_tokens is None else self.image_tokens
        if self.of_mean and self.lengths is not None and self.lengths.pictures is not None:
            asked = min(asked, math.ceil(self.lengths.pictures))
        return min(asked, per_row * self.settings.data.cutoff_len)

    @property
    def dp_size(self) -> int:
        """Processes that train rows of their own."""
        return self.world_size // self.settings.parallel.model_parallel_size

    @property
    def shard_size(self) -> int:
        """Processes that hold the same weights outside of experts, and shard their optimizer: dp · cp."""
        return self.dp_size * self.settings.parallel.context_parallel_size

    @property
    def expert_shard_size(self) -> int:
        """Processes that hold the same experts, and shard their optimizer."""
        return self.world_size // self.settings.parallel.expert_parallel_size

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype that the model computes in."""
        return self.settings.precision.params_itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of the buffers that gradients are added up and exchanged in."""
        return 4 if self.settings.precision.accumulate_allreduce_grads_in_fp32 else self.itemsize

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward pass."""
        return self.settings.batch.per_device_train_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one process in a step."""
        return self.settings.batch.gradient_accumulation_steps

    @property
    def global_batch_size(self) -> int:
        """Rows of one step."""
        return self.micro_batch_size * self.num_micro_batches * self.dp_size

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence, or of what the mean micro-batch is padded to, made up to what the layout cuts
        evenly."""
        multiple, length = self.settings.parallel.sequence_multiple, self.settings.data.cutoff_len
        if self.lengths is not None:
            length = min(length, math.ceil(round(self._padded[0], 6)) if self.of_mean else self.lengths.longest)
        return -(-length // multiple) * multiple

    @property
    def _padded(self) -> tuple[float, float]:
        """Mean and standard deviation of a micro-batch's length, as the slowest replica has it.

        A micro-batch is as long as its longest row, with pipeline stages all of a step's are; group_by_length leaves
        little between them. Packed rows are joined, and padded to nothing. Replicas wait for the one with the longest
        micro-batches: the largest of dp normal variables (by Blom's approximation).
        """
        lengths, settings, count = self.lengths, self.settings, self.num_micro_batches
        assert lengths is not None
        size = self.micro_batch_size * self.sequences_per_row
        if settings.parallel.pipeline_model_parallel_size > 1:
            return longest_of(lengths, size * count * self.dp_size)
        mean, spread = longest_of(lengths, 1 if settings.packing or settings.data.group_by_length else size)
        if settings.packing:
            spread /= math.sqrt(size)
        deviations = _STANDARD.inv_cdf((self.dp_size - 0.375) / (self.dp_size + 0.25))
        waits = 0.0 if settings.data.group_by_length else spread * deviations / math.sqrt(count)
        return min(mean + waits, float(lengths.longest)), spread

    @property
    def document(self) -> float:
        """Tokens of a document, on average weighted by tokens; beyond `sequence_length` where lengths of micro-batches
        differ much."""
        length = self.sequence_length
        if self.lengths is None:
            return min(self.document_length or length, length)
        if self.settings.packing:
            return min(self.lengths.document, length)
        if not self.of_mean:
            return length
        mean, spread = self._padded
        return length * (1 + (spread / mean) ** 2)

    @property
    def tokens(self) -> int:
        """Tokens of a step; without padding where lengths of rows are known."""
        if self.lengths is None:
            return self.global_batch_size * self.row_tokens
        return round(
            self.global_batch_size * self.sequences_per_row * min(self.lengths.mean, self.settings.data.cutoff_len)
        )

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row: of a preference pair one for each answer; a packed row of pairs is as long as two."""
        return 2 if self.settings.run.stage in PAIR_STAGES else 1

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row, of a pair those of both its sequences."""
        return self.sequences_per_row * self.sequence_length
