"""What a forward and backward pass of the engine really holds: live bytes of all tensors, operator by operator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from live_bytes import LiveBytes
from megatron.core import parallel_state

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.data.batches import SCORED, Batch, BatchMedia, DocumentValues, Extra, TokenValues, assign_to_ranks
from megatune.data.rows import LABEL
from megatune.engine import step
from megatune.engine.groups import build
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.engine.model import Chunk, build_model
from megatune.engine.step import Objective
from megatune.objectives.choose import CrossEntropy
from megatune.objectives.classification import Classification
from megatune.objectives.preference import Reward

DOCUMENTS = 4  # of a packed row
GRID = (1, 16, 16)  # patches of an image


def measure_step(architecture: Architecture, settings: Settings, trainable: FinetuningSettings, images: int = 0) -> int:
    """On every rank: a step's most live bytes, with random weights, every token trained, and so many images a row;
    of a reward model rows are pairs, of a classifier their class is 0."""
    model = _built(architecture, settings, trainable)
    count = settings.batch.gradient_accumulation_steps
    batches = [_batch(architecture, settings, images, index) for index in range(count)]
    with LiveBytes() as found:
        step.forward_backward(model, batches, _objective(architecture.num_labels))
    return found.peak


def _objective(num_labels: int) -> Objective:
    if num_labels > 1:
        return Classification("single_label_classification", num_labels)
    return Reward() if num_labels else CrossEntropy()


def measure_log_probs(architecture: Architecture, settings: Settings) -> int:
    """On every rank: the most live bytes of log-probabilities of all tokens, with random weights."""
    model = _built(architecture, settings, FinetuningSettings())
    count = settings.batch.gradient_accumulation_steps
    batches = [_batch(architecture, settings, 0, index) for index in range(count)]
    with LiveBytes() as found:
        step.token_log_probs(model, batches)
    return found.peak


def _built(architecture: Architecture, settings: Settings, trainable: FinetuningSettings) -> list[Chunk]:
    """Build a model of random weights."""
    build(settings.parallel, seed=0, timeout=settings.run.ddp_timeout)
    # A frozen language model alone is refused; it is frozen below.
    is_frozen = architecture.vision is None and trainable.freeze_language_model
    built = FinetuningSettings() if is_frozen else trainable
    model = build_model(architecture, settings.model_copy(update={"finetuning": built}))
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
            for matrix in chunk.modules():
                if isinstance(matrix, QuantizedMatrix):  # of zeros
                    matrix.allocate(matrix.shape[-1], matrix.form.num_statistics(matrix.shape))
    if is_frozen:
        _freeze(model)
    return model


def _freeze(model: Sequence[torch.nn.Module]) -> None:
    """Leave training to norms, and let hidden states have a gradient from the embedding on."""
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.requires_grad = parameter.dim() == 1
        for name, module in chunk.named_modules():
            if name.rpartition(".")[2] == "embedding":
                module.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _batch(architecture: Architecture, settings: Settings, images: int, seed: int) -> Batch:
    """Rows of cutoff_len tokens, which begin with images; packed, all rows of the micro-batch in one, as four documents
    each."""
    rows, length = settings.batch.per_device_train_batch_size, settings.data.cutoff_len
    generator = torch.Generator().manual_seed(seed)
    shape = (1, rows * length) if settings.packing else (rows, length)
    tokens = torch.randint(architecture.vocab_size, shape, generator=generator)
    if not settings.packing:
        positions, lengths = torch.arange(length).repeat(rows, 1), (length,) * rows
        media = _media(architecture, positions, images) if images else None
        extras: dict[str, Extra] = {}
        if architecture.num_labels:
            extras = {SCORED: TokenValues(positions == length - 1), LABEL: DocumentValues(torch.zeros(rows, 1))}
        return Batch(tokens, tokens, positions, lengths, extras=extras, media=media)
    document = length // DOCUMENTS
    count = rows * DOCUMENTS
    starts = torch.arange(count + 1, dtype=torch.int32) * document
    positions = torch.arange(document).repeat(count)[None]
    return Batch(tokens, tokens, positions, (document,) * count, starts)


def _media(architecture: Architecture, positions: torch.Tensor, images: int) -> BatchMedia:
    """On every rank of the first stage the pixels that it encodes."""
    vision, (rows, length), patches = architecture.vision, positions.shape, math.prod(GRID)
    assert vision is not None
    size = parallel_state.get_tensor_and_context_parallel_world_size()
    owners = assign_to_ranks([patches] * images * rows, size)
    mine = owners.count(parallel_state.get_tensor_and_context_parallel_rank())
    if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        mine = 0
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tokens = images * patches // vision.spatial_merge_size**2
    return BatchMedia(
        pixel_values=torch.ones(mine * patches, channels),
        grids=torch.tensor([GRID] * images * rows),
        owners=torch.tensor(owners),
        places=(torch.arange(rows)[:, None] * length + torch.arange(tokens)).flatten(),
        rotary_position_ids=positions.repeat(3, 1, 1),
    )
