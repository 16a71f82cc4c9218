"""How much a model computes: its parameters, and the operations of a training step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from megatune.architecture import Architecture
from megatune.families import FAMILIES
from megatune.families.weights import Stack, hf_shape, hf_shapes, layers_of
from megatune.plan.case import Case
from megatune.plan.operators.vision import Images, attended_patches, images_of

# Forward pass once, backward pass twice (towards the inputs, towards the weights).
_PASSES = 3


def num_parameters(architecture: Architecture) -> int:
    """Return elements of the model as its checkpoint holds them: tied embeddings once, no padding, all experts."""
    return sum(
        prod(shape)
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        for layer in layers_of(weight, architecture)
        for shape in hf_shapes(weight, architecture, layer).values()
    )


def num_matmul_parameters(architecture: Architecture) -> int:
    """Count parameters of the decoder that a token is multiplied with: all matrices but the word embedding, which is
    looked up, and of the routed experts as many as it goes to. The output layer counts, tied or not."""
    total = architecture.vocab_size * architecture.hidden_size
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if weight.per_layer and weight.stack is Stack.DECODER:
            size = sum(prod(hf_shape(tensor, architecture)) for tensor in weight.hf if len(tensor.shape) == 2)
            times = architecture.moe.router_topk if architecture.moe is not None and weight.per_expert else 1
            total += size * times * len(layers_of(weight, architecture))
    return total


def train_flops(architecture: Architecture, lengths: Iterable[int]) -> float:
    """Return model floating-point operations of a training step over documents of these lengths, in FLOP.

    Counted as the field does for model FLOP/s utilization (arXiv:2204.02311): a multiply and an add are two, nothing
    recomputed counts, and of causal attention only the half that is not masked.

    Args:
        lengths: tokens of each document, without padding; tokens attend to those of their own one.
    """
    lengths = list(lengths)
    matmuls = 2 * num_matmul_parameters(architecture) * sum(lengths)
    # Scores take 2 · s² · the channels of all heads' queries, their product with the values 2 · s² · those of the
    # values; half of both is masked.
    channels = architecture.query_size + architecture.attention_size
    attention = architecture.num_layers * channels * sum(length * length for length in lengths)
    return float(_PASSES * (matmuls + attention))


def model_flops(case: Case) -> float:
    """Return model floating-point operations of a step, in FLOP: as `train_flops`, without the weights' gradients of
    frozen matrices, a third of their products; with those of images."""
    rows, length = case.global_batch_size, case.sequence_length
    document = round(min(case.document_length or length, length))
    matmuls, whole = _document_flops(case.model.architecture, document)
    finetuning = case.settings.finetuning
    frozen = finetuning.finetuning_type == "lora" or finetuning.freeze_language_model
    images = images_of(case)
    of_images = _vision_flops(images) * case.num_micro_batches * case.dp_size if images else 0.0
    return rows * length / document * (whole - (matmuls / 3 if frozen else 0.0)) + of_images


@lru_cache(maxsize=4096)
def _document_flops(architecture: Architecture, length: int) -> tuple[float, float]:
    """Return, of a document, FLOP of all matrices, and with attention."""
    return 2.0 * _PASSES * num_matmul_parameters(architecture) * length, train_flops(architecture, [length])


def _vision_flops(images: Images) -> float:
    """Return FLOP of a micro-batch's pictures: forward once, and once more towards each of weights and inputs where
    these, or what is before them, are trained."""
    tower, patches = images.tower, images.tokens * images.tower.spatial_merge_size**2
    attention = 4 * tower.depth * tower.hidden_size * attended_patches(images)
    total = patches * (2 * tower.num_parameters + attention) * (_PASSES if images.tower_trained else 1)
    of_merger = 2 * images.tokens * tower.num_projector_parameters / tower.num_mergers
    for trained in (images.projector_trained, *[images.deepstack_trained] * tower.num_deepstack_mergers):
        total += of_merger * (_PASSES if trained else 1 + images.tower_trained)
    return total
