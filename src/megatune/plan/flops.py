"""Counts the parameters of a model, and the floating-point operations of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from megatune.architecture import Architecture, LayerKind
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import FAMILIES
from megatune.families.dense import output_weight
from megatune.families.trained import is_trained
from megatune.families.weights import Stack, hf_shape, hf_shapes, is_in_layer, layers_of
from megatune.plan.case import Case
from megatune.plan.memory.tensors import layer_contents
from megatune.plan.operators.vision import Images, attended_patches, images_of

# One product forward, two backward (gradients of inputs and of weights).
_PASSES = 3


def num_parameters(architecture: Architecture) -> int:
    """Count the elements of a model's checkpoint: tied embeddings once, without padding, all experts."""
    return sum(
        len(layers) * sum(map(prod, hf_shapes(weight, architecture, layers[0]).values()))
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        if (layers := layers_of(weight, architecture))
    )


@lru_cache(maxsize=256)
def num_matmul_parameters(architecture: Architecture) -> int:
    """Count the decoder's parameters that a token is multiplied with: all matrices except the word embedding, and only
    the routed experts of one token. The output layer counts, tied or not."""
    layers = (
        _layer_matmul_parameters(architecture, architecture.layer_kind(layer))
        for layer in range(architecture.num_layers)
    )
    return _output_parameters(architecture) + sum(layers)


def _output_parameters(architecture: Architecture) -> int:
    return prod(hf_shape(output_weight(architecture).hf[0], architecture))


@lru_cache(maxsize=4096)
def _layer_matmul_parameters(architecture: Architecture, kind: LayerKind) -> int:
    total = 0
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        is_ours = weight.per_layer and weight.stack is Stack.DECODER and not weight.is_buffer
        if is_ours and is_in_layer(weight, kind):
            size = sum(prod(hf_shape(tensor, architecture)) for tensor in weight.hf if len(tensor.shape) == 2)
            total += size * (architecture.moe.router_topk if architecture.moe is not None and weight.per_expert else 1)
    return total


def train_flops(
    architecture: Architecture, lengths: Iterable[int], trainable: FinetuningSettings | None = None
) -> float:
    """Return the model FLOP of the decoder in a training step over documents of these lengths.

    They are counted as usual for model FLOP/s utilization (arXiv:2204.02311): a multiply-add is two operations,
    recomputation does not count, and attention counts only pairs that neither the causal mask nor a window masks.

    Args:
        lengths: tokens of each document, without padding; tokens attend within their document.
        trainable: to leave out gradients of frozen matrices, and those before the first trained one; None trains all.
    """
    lengths = list(lengths)
    by_token, by_window = _flops(architecture, trainable or FinetuningSettings())
    attention = (flops * _pairs(lengths, window) for window, flops in by_window.items())
    return float(by_token * sum(lengths) + sum(attention))


def _pairs(lengths: Sequence[int], window: int | None) -> int:
    """Return twice the number of unmasked pairs of a query and a key in documents of these lengths."""
    seen = ((length, length if window is None else min(window, length)) for length in lengths)
    return sum(most * (2 * length - most) for length, most in seen)


@lru_cache(maxsize=4096)
def _flops(architecture: Architecture, trainable: FinetuningSettings) -> tuple[int, dict[int | None, int]]:
    """Return the FLOP of a token in matrices and gated delta nets, and those of one of `_pairs` in attention by window.

    A matrix has a forward product, one for the gradient of its input, and one for that of its weight if it is trained;
    with adapters it is not, and the adapters themselves are not counted. In attention a pair takes two FLOP for each
    channel of all heads' queries, and of their values.
    """
    of_weights = _PASSES - 1 if trainable.finetuning_type == "lora" else _PASSES
    matrices = {"weights": of_weights, "through": _PASSES - 1, "none": 1}
    output = is_trained(output_weight(architecture), 0, architecture, trainable)
    outputs = 1 + architecture.mtp_num_layers  # MTP layers use the output layer, too
    by_token = 2 * (_PASSES if output else _PASSES - 1) * _output_parameters(architecture) * outputs
    by_window: Counter[int | None] = Counter()
    for kind, gradient in layer_contents(architecture, trainable):
        passes = 1 if gradient == "none" else _PASSES
        by_token += 2 * matrices[gradient] * _layer_matmul_parameters(architecture, kind)
        by_token += passes * _state_flops(architecture) * kind.delta
        by_window[kind.window] += passes * _channels(architecture, kind)
    return by_token, by_window


def _channels(architecture: Architecture, kind: LayerKind) -> int:
    """Return the channels of all heads' queries and values in a layer; 0 without attention."""
    of_layer = architecture.of_heads(kind.has_global_heads)
    return 0 if kind.delta else of_layer.query_size + of_layer.attention_size


def _state_flops(architecture: Architecture) -> int:
    """Return the FLOP of a token in a gated delta net without its projections, as Megatron-LM counts them: the state is
    read for the key, corrected, and read for the query; and those of its convolution."""
    delta = architecture.delta
    if delta is None:
        return 0
    convolution = 2 * delta.conv_kernel_size * delta.conv_size
    return 8 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim + convolution


def model_flops(case: Case) -> float:
    """Return the model FLOP of a step: `train_flops` of the decoder, and those of the vision encoder."""
    document = max(1, round(case.document if case.lengths is None else case.lengths.document))
    images = images_of(case)
    of_images = _vision_flops(images) * case.num_micro_batches * case.dp_size if images else 0.0
    of_document = _document_flops(case.model.architecture, document, case.settings.finetuning)
    return case.tokens / document * of_document + of_images


@lru_cache(maxsize=1024)
def _document_flops(architecture: Architecture, document: int, trainable: FinetuningSettings) -> float:
    return train_flops(architecture, [document], trainable)


def _vision_flops(images: Images) -> float:
    """Return the FLOP of a micro-batch's images: a forward product, and one each for the gradients of weights and of
    inputs if they are needed."""
    tower, patches = images.tower, images.tokens * images.tower.spatial_merge_size**2
    attention = 4 * tower.depth * tower.hidden_size * attended_patches(images)
    both = _PASSES if images.weights_trained else _PASSES - 1
    total = patches * (2 * tower.num_parameters + attention) * (both if images.tower_trained else 1)
    of_merger = 2 * images.tokens * tower.num_projector_parameters / tower.num_mergers
    for trained in (images.projector_trained, *[images.deepstack_trained] * tower.num_deepstack_mergers):
        total += of_merger * (both if trained else 1 + images.tower_trained)
    return total
