"""The case that is planned: a model, the settings of a run, the engine that trains it, and its machines."""

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

# CUDA streams of Transformer Engine's products (transformer_engine/pytorch/cpp_extensions/gemm.py), and the host's time
# for one of them in launches of this engine: a profile has 10 to 14 microseconds (yanring/Megatron-MoE-ModelZoo,
# issue 7, nvte_cublas_gemm), without Python and autograd.
STREAMS, OF_A_STREAM = 4, 0.5
# Operators of Transformers' loop for each expert besides its products: finding, gathering and weighting its tokens,
# gate times up, and adding to the output (models/qwen2_moe/modeling_qwen2_moe.py of version 4).
LOOPED = 8
_STANDARD = NormalDist()


class Engine(NamedTuple):
    """How an engine computes: mainly experts and their communication.

    Plans are for this engine, `OURS`. Published speeds are of other engines; benchmarks/planner_accuracy.py plans each
    twice: with its own engine, to measure the planner's error, and with this one, to show what a user gets.

    Attributes:
        products: of a rank's experts: one "grouped" kernel; or a kernel for each expert, on several "streams"
            (Transformer Engine's GroupedLinear); or operators for each expert in a Python "loop".
        dispatch: "ranks": a token is sent to each of its experts. "machines": once to each machine with any of them,
            and from there once to each rank, by kernels that also sort the tokens (DeepEP, HybridEP). "neighbours": the
            same, with the experts of a token next to each other, as the gate of a benchmark assigns them.
        runs: attention with variable lengths, for packed rows and context parallelism, is as fast as for whole rows
            (cuDNN through Transformer Engine); torch's kernels for it are slower.
        keeps_logits: the backward pass of the loss does not recompute them in chunks.
        overlaps: communication overlaps with the passes of another micro-batch (Megatron-Core's
            overlap_moe_expert_parallel_comm, DualPipeV).
        host: the host's time for an operator, relative to this engine.
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
    """The model of a plan; `name` is that which the user gave."""

    name: str
    architecture: Architecture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a cache key, compared by identity
class Case:
    """The input of one estimate.

    Attributes:
        settings: of the run: what is trained, layout, batch, precision, optimizer, recomputation and kernels.
        world_size: processes of the whole run; a multiple of settings.parallel.smallest_world.
        document_length: tokens of the mean document in a packed row; None if a row is one document or a pair.
        image_tokens: image and video tokens of a row, of a pair in both sequences; None for one image of
            image_max_pixels in each sequence, if the model reads images.
        largest_picture: tokens of the largest image or video; None for those of an image of image_max_pixels.
        lengths: of rows; None if each has cutoff_len tokens.
        of_mean: whether to plan mean rows, as for time, or the longest ones, as for memory.
        engine: the engine that trains the model.
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
        """The same case with mean rows, as for time."""
        return self if self.lengths is None else replace(self, of_mean=True)

    @property
    def tokens_per_image(self) -> int:
        """Tokens of the largest image or video, one for each square of merged patches; 0 for a language model."""
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
        """Image and video tokens of a row."""
        if self.model.architecture.vision is None:
            return 0
        per_row = self.sequences_per_row
        tokens = per_row * self.tokens_per_image if self.image_tokens is None else self.image_tokens
        if self.of_mean and self.lengths is not None and self.lengths.media is not None:
            tokens = min(tokens, math.ceil(self.lengths.media))
        return min(tokens, per_row * self.settings.data.cutoff_len)

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return self.world_size // self.settings.parallel.model_parallel_size

    @property
    def shard_size(self) -> int:
        """Processes with the same weights other than experts, which shard their optimizer: dp · cp."""
        return self.dp_size * self.settings.parallel.context_parallel_size

    @property
    def expert_shard_size(self) -> int:
        """Processes with the same experts, which shard their optimizer."""
        return self.world_size // self.settings.parallel.expert_parallel_size

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype that the model computes in."""
        return self.settings.precision.params_itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of the gradient buffers."""
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
        """Tokens of the longest sequence, or those that the mean micro-batch is padded to, rounded up to a multiple
        that the layout can split."""
        multiple, length = self.settings.parallel.sequence_multiple, self.settings.data.cutoff_len
        if self.lengths is not None:
            length = min(length, math.ceil(round(self._padded[0], 6)) if self.of_mean else self.lengths.longest)
        return -(-length // multiple) * multiple

    @property
    def _padded(self) -> tuple[float, float]:
        """Mean and standard deviation of a micro-batch's length on the slowest replica.

        A micro-batch is as long as its longest row; with pipeline stages, all micro-batches are as long as the longest
        row of the step. With group_by_length rows differ little. Packed rows are concatenated without padding. Replicas
        wait for the one with the longest micro-batches: the largest of dp normal variables (Blom's approximation).
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
        """Mean tokens of a document, weighted by tokens; more than `sequence_length` if the lengths of micro-batches
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
        """Tokens of a step; without padding if the lengths of rows are known."""
        if self.lengths is None:
            return self.global_batch_size * self.row_tokens
        return round(
            self.global_batch_size * self.sequences_per_row * min(self.lengths.mean, self.settings.data.cutoff_len)
        )

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row: two for a preference pair; a packed row of pairs is as long as two rows."""
        return 2 if self.settings.run.stage in PAIR_STAGES else 1

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row; of a pair, those of both sequences."""
        return self.sequences_per_row * self.sequence_length
