"""The vision encoder of a vision-language model and its mergers, on the first stage.

The images and videos of a micro-batch are distributed over the tensor- and context-parallel ranks of the stage: each
rank computes its share of them, and gathers the features of all. The encoder is Transformers' module: only linear
layers, LayerNorm, GELU and attention are fused.

Legend: n patches of the fullest rank's share, w hidden size and f feed-forward size of the encoder, e bytes of a
number; N tokens of all images and videos of a micro-batch, k deepstack mergers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.encoders import Vision
from megatune.families.trained import trained_weights
from megatune.families.weights import WHOLE, Stack, engine_shape
from megatune.plan.case import Case
from megatune.plan.operators.decoder import embedding
from megatune.plan.operators.linear import elementwise, linear_work
from megatune.plan.operators.operator import Attention, Memory, MemoryOp, Operator
from megatune.plan.operators.shapes import Shapes

_LAUNCHES = 30  # of a layer, in addition to its products


@dataclass(frozen=True, slots=True)
class Images:
    """A vision encoder, and its images and videos in a micro-batch.

    Attributes:
        tokens: of images and videos in the decoder.
        rank_tokens: those that the fullest rank computes.
        patches_of_image: patches of each image, or of each tile.
        tower_trained, projector_trained, deepstack_trained: whether they, or adapters in them, have gradients.
        weights_trained: whether these are gradients of their weights, not of adapters.
        num_trained: number of trained parameters.
        recomputed: each layer of a trained encoder is recomputed in the backward pass.
    """

    tower: Vision
    tokens: int
    rank_tokens: int
    patches_of_image: int
    tower_trained: bool
    projector_trained: bool
    deepstack_trained: bool
    weights_trained: bool
    num_trained: int
    recomputed: bool

    @property
    def patches(self) -> int:
        """n: of the fullest rank's share."""
        return self.rank_tokens * self.tower.spatial_merge_size**2

    def features(self, shapes: Shapes) -> int:
        """Return the bytes of the features of all images and videos, including deepstack."""
        return self.tokens * self.tower.num_mergers * shapes.architecture.hidden_size * shapes.itemsize


def images_of(case: Case) -> Images | None:
    """Return the images and videos of a micro-batch; None without any."""
    tower, settings = case.model.architecture.vision, case.settings
    tokens, parallel, trainable = case.picture_tokens, settings.parallel, settings.finetuning
    if tower is None or not tokens:
        return None
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    of_image, of_row = min(tokens, case.tokens_per_image), -(-tokens // case.tokens_per_image)
    whole, share = case.micro_batch_size * tokens, -(-case.micro_batch_size * of_row // ranks) * of_image
    of_media = of_image * tower.spatial_merge_size**2
    of_tile = of_media if tower.square is None else (tower.square // tower.patch_size) ** 2
    trained = _trained_stacks(case.model.architecture, trainable)
    return Images(
        tower,
        whole,
        min(share, whole),
        min(of_media, of_tile),
        Stack.VISION in trained,
        Stack.PROJECTOR in trained,
        Stack.DEEPSTACK in trained,
        trainable.finetuning_type != "lora",
        sum(trained.values()),
        Stack.VISION in trained and settings.recompute.recompute_granularity == "full",
    )


@lru_cache(maxsize=64)
def _trained_stacks(architecture: Architecture, trainable: FinetuningSettings) -> dict[Stack, int]:
    """Return the number of trained parameters of each part of the encoder, without frozen parts."""
    found: dict[Stack, int] = {}
    for weight, _ in trained_weights(architecture, trainable):
        if weight.stack is not Stack.DECODER:
            found[weight.stack] = found.get(weight.stack, 0) + prod(engine_shape(weight, architecture, WHOLE))
    return found


def attended_patches(images: Images) -> float:
    """Return the mean number of patches that a patch attends to over the layers."""
    tower, whole = images.tower, images.patches_of_image
    if tower.window_size is None:
        return whole
    window = min((tower.window_size // tower.patch_size) ** 2, whole)
    num_whole = len([layer for layer in tower.fullatt_block_indexes if layer < tower.depth])
    return window + num_whole / tower.depth * (whole - window)


def encoder_inputs(shapes: Shapes, images: Images) -> Operator:
    """Return the projection of patches, with the tensors that all layers use."""
    tower, size, patches = images.tower, shapes.itemsize, images.patches
    shapes = shapes.replace(weights_trained=images.tower_trained and images.weights_trained)
    channels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    # Indices and weights to interpolate the position embeddings.
    positions = 48 * patches if tower.num_position_embeddings else 0
    hidden = patches * tower.hidden_size * size
    # Pixels are fp32; they count only if they are copied.
    pixels = patches * channels * size if shapes.fp32_itemsize or not shapes.on_cpu else 0
    kept = _tables(images) + positions + pixels
    memory = Memory(kept, 0 if shapes.on_cpu else 4 * patches * channels, hidden)
    if not images.tower_trained:
        memory = Memory(0, kept + memory.forward, 0)
    # Pixels have no gradient.
    operator = Operator("vision", memory, *linear_work(shapes, patches, tower.hidden_size, channels))
    return operator._replace(backward=())


def encoder_layer(shapes: Shapes, images: Images) -> tuple[Operator, ...]:
    """Return one layer of the encoder; without a backward pass if it is frozen."""
    shapes = shapes.replace(weights_trained=images.tower_trained and images.weights_trained)
    tower, size, patches = images.tower, shapes.itemsize, images.patches
    width, ffn = tower.hidden_size, tower.intermediate_size
    up = 2 * ffn if tower.gated else ffn
    hidden, inner = patches * width * size, patches * ffn * size
    weight = width * up * size if shapes.weights_trained else 0

    def product(memory: Memory, columns: int, depth: int) -> Operator:
        return Operator("vision", memory, *linear_work(shapes, patches, columns, depth))

    norm = Operator("vision", _norm(shapes, images))
    attention = (Attention(patches, attended_patches(images), 1, 2 * width, "unmasked"),)
    # Queries, keys and values, in one tensor besides rotated queries and keys in Transformers' module; the context, and
    # one number per patch and head.
    kept = (6 if tower.layers is None else 4) * hidden + 4 * patches * tower.num_heads
    rotating = _rotating(shapes, images) - kept
    operators = (
        norm,
        product(Memory(hidden, 3 * hidden, 4 * hidden), 3 * width, width),
        Operator("vision", Memory(kept, max(rotating, 0), 6 * hidden), attention, attention, 3),
        product(Memory(0, 2 * hidden, 2 * hidden), width, width),
        norm,
        product(Memory(hidden, inner, hidden + inner + weight), up, width),
        # Gate, up, activation(gate) and their product, or the tensors before and after the activation.
        product(Memory(_activations(tower) * inner, hidden, 2 * inner + hidden + weight), width, ffn),
        Operator("vision", Memory(0), *elementwise(shapes, patches * (20 * width + 3 * up), 2, 3, _LAUNCHES)),
    )
    return operators if images.tower_trained else tuple(operator._replace(backward=()) for operator in operators)


def frozen_layer_bytes(shapes: Shapes, images: Images) -> int:
    """Return the peak bytes of a layer's forward pass that keeps nothing."""
    tower, hidden = images.tower, images.patches * images.tower.hidden_size * shapes.itemsize
    inner = images.patches * tower.intermediate_size * shapes.itemsize
    # Queries, keys and values, rotated and not, the context, which a CPU concatenates, and the projection's output.
    attending = (8 if shapes.on_cpu else 7) * hidden + 4 * images.patches * tower.num_heads
    activating = (3 if tower.hidden_act in ("silu", "quick_gelu") else 2) * inner + hidden
    # In addition the layer's input, the norm's output, the position embeddings, and the tensors that all layers use,
    # which a trained encoder keeps anyway.
    others = 3 if tower.num_position_embeddings else 2
    tables = 0 if images.tower_trained else _tables(images)
    return max(_rotating(shapes, images), attending, activating) + others * hidden + tables


def _tables(images: Images) -> int:
    """Return the bytes of fp32 cosine and sine, twice if windows reorder patches."""
    tower = images.tower
    return (2 if tower.window_size else 1) * 8 * images.patches * tower.hidden_size // tower.num_heads


def _rotating(shapes: Shapes, images: Images) -> int:
    """Return the bytes of queries, keys and values while keys are rotated in fp32, after queries."""
    numbers = images.patches * images.tower.hidden_size
    return 3 * numbers * shapes.itemsize + (6 if shapes.fp32_itemsize else 4) * 4 * numbers


def _activations(tower: Vision) -> int:
    """Return the number of kept tensors with the feed-forward's width."""
    return 4 if tower.gated else 3 if tower.hidden_act == "quick_gelu" else 2


def _norm(shapes: Shapes, images: Images) -> Memory:
    """Return the memory of a norm: LayerNorm keeps its input and two numbers per vector; RMSNorm, which is not fused,
    its input and the normalized input in fp32."""
    patches, numbers = images.patches, images.patches * images.tower.hidden_size
    hidden, wide = numbers * shapes.itemsize, 4 * numbers
    if images.tower.gated:
        return Memory(wide + hidden + 4 * patches, hidden + wide, 3 * wide)
    return Memory(hidden + 2 * shapes.itemsize * patches, hidden, 2 * hidden)


def media_embedding(shapes: Shapes, images: Images) -> Operator:
    """Return the embedding of rows with images or videos, whole on every tensor-parallel rank until the features are
    inserted; deepstack adds a tensor like the hidden states for each of its mergers."""
    looked_up, parts, features = embedding(shapes), images.tower.num_mergers, images.features(shapes)
    ranks = shapes.tp * shapes.cp
    # When gathered, every rank sends as much as the fullest one.
    gathered = 0 if ranks == 1 else (ranks + 1) * features * images.rank_tokens // images.tokens
    placed = 2 * parts * shapes.whole_hidden + (parts * shapes.hidden if shapes.sequence_parallel else 0)
    kept = looked_up.memory.kept + 8 * images.tokens + (features if images.num_trained else 0)
    forward = features + max(gathered, placed)
    returned = parts * shapes.whole_hidden + (features if images.num_trained else 0)
    memory = Memory(kept, forward, looked_up.memory.backward + returned)
    moved = (MemoryOp(4.0 * features + 2 * placed),)
    return looked_up._replace(memory=memory, forward=looked_up.forward + moved, launches=looked_up.launches + 10)


def mergers(shapes: Shapes, images: Images) -> Iterator[Operator]:
    """Yield deepstack's mergers and that of the last layer: norm, linear, GELU, linear on the concatenated patches of
    one token."""
    tower, size = images.tower, shapes.itemsize
    columns = tower.num_projector_parameters / tower.num_mergers
    averages = tower.layers is not None and tower.layers.projector == "average"
    merged = tower.hidden_size if averages else tower.merged_size
    merged_bytes, output = (images.rank_tokens * width * size for width in (merged, shapes.architecture.hidden_size))
    for place in range(tower.num_mergers):
        is_deepstack = place < tower.num_deepstack_mergers
        trained = images.deepstack_trained if is_deepstack else images.projector_trained
        of_merger = shapes.replace(weights_trained=trained and images.weights_trained)
        work = linear_work(of_merger, images.rank_tokens, columns / merged, merged)
        # The norm's input, which the encoder's next layer also keeps, RMSNorm's normalized input, and its output; the
        # tensors before and after GELU.
        both = trained and images.tower_trained
        kept = (4 + (both and tower.gated) if trained else 2) * merged_bytes if trained or images.tower_trained else 0
        kept -= merged_bytes if is_deepstack and images.tower_trained else 0
        weight = merged**2 * size if of_merger.weights_trained else 0
        backward = 2 * merged_bytes + output + weight if kept else 0
        memory = Memory(kept, 4 * merged_bytes + 2 * output - kept, backward)
        operator = Operator("projector", memory, *work)
        yield operator if trained or images.tower_trained else operator._replace(backward=())
