"""What is planned: a model, the settings of a run, and the machines under it."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.architecture import Architecture
from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import Settings
from megatune.plan.machine import Machine

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as far as a plan needs it.

    Attributes:
        name: what the user called it.
    """

    name: str
    architecture: Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """

    model: PlannedModel
    settings: Settings
    world_size: int
    machine: Machine
    document_length: float | None = None
    image_tokens: int | None = None
    largest_picture: int | None = None

    @property
    def tokens_of_picture(self) -> int:
        """Tokens of one picture at most, one for each square of merged patches; 0 for a language model."""
        if (vision := self.model.architecture.vision) is None:
            return 0
        if self.largest_picture is not None:
            return self.largest_picture
        return max(1, self.settings.data.image_max_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2)

    @property
    def picture_tokens(self) -> int:
        """Tokens of a row that stand for pictures."""
        if self.model.architecture.vision is None:
            return 0
        per_row = self.sequences_per_row
        asked = per_row * self.tokens_of_picture if self.image_tokens is None else self.image_tokens
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
        return _BYTES[self.settings.precision.params_dtype]

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
        """Tokens of the longest sequence, cutoff_len made up to what the layout cuts evenly."""
        multiple = self.settings.parallel.sequence_multiple
        return -(-self.settings.data.cutoff_len // multiple) * multiple

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row: of a preference pair one for each answer; a packed row of pairs is as long as two."""
        return 2 if self.settings.run.stage in PAIR_STAGES else 1

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row, of a pair those of both its sequences."""
        return self.sequences_per_row * self.sequence_length
