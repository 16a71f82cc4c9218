"""The output layer and the loss over the vocabulary.

Legend: T tokens, P = T / tp with sequence parallelism; h hidden size, v rows of the vocabulary on a rank.
"""

from __future__ import annotations

from megatune.families.weights import padded_vocab_size
from megatune.plan.memory.linear import linear
from megatune.plan.memory.operators import Operator, chain
from megatune.plan.memory.shapes import Shapes

# As engine.layers.cross_entropy.CHUNK_BYTES: of one chunk's logits, were they fp32.
CHUNK_BYTES = 2**30
CHUNK_BYTES_ON_CPU = 2**28


def head(shapes: Shapes) -> Operator:
    """From the last norm's output to the loss, if every token is trained."""
    return _in_chunks(shapes) if shapes.loss_fusion else _whole(shapes)


def vocabulary_rows(shapes: Shapes) -> tuple[int, int]:
    """Rows of the fullest rank's vocabulary that are real, and with padding."""
    padded = padded_vocab_size(shapes.architecture.vocab_size, shapes.tp) // shapes.tp
    return min(padded, shapes.architecture.vocab_size), padded


def _in_chunks(shapes: Shapes) -> Operator:
    """Kept are the hidden states and five numbers a token. Each pass holds the logits of a chunk of tokens, which
    is at most CHUNK_BYTES in fp32; on a CPU operator by operator, with an fp32 copy of 16-bit logits."""
    rows, _ = vocabulary_rows(shapes)
    tokens, size = shapes.tokens, shapes.size
    count = -(-tokens * rows * 4 // (CHUNK_BYTES_ON_CPU if shapes.on_cpu else CHUNK_BYTES))
    some = -(-tokens // count)
    chunk, inputs = some * rows, some * shapes.architecture.hidden_size * size
    numbers = 36 * tokens
    forward = chunk * (size + (shapes.wide if shapes.on_cpu else 0))
    softmax = chunk * (2 * size + shapes.wide if shapes.on_cpu and shapes.wide else size if shapes.on_cpu else 2 * size)
    adding = chunk * size
    if shapes.on_cpu and shapes.wide and shapes.wide_gradients:
        adding += 4 * (chunk + some * shapes.architecture.hidden_size)
    backward = shapes.whole_hidden + inputs + max(softmax, adding, chunk * size + inputs)
    if shapes.sequence_parallel:
        backward = max(backward, shapes.whole_hidden + shapes.hidden)
    return Operator(shapes.hidden + numbers, forward, backward)


def _whole(shapes: Shapes) -> Operator:
    """Logits of all tokens, and their softmax in fp32, which is kept."""
    _, padded = vocabulary_rows(shapes)
    tokens, size, hidden = shapes.tokens, shapes.size, shapes.architecture.hidden_size
    logits, softmax = tokens * padded * size, 4 * tokens * padded
    is_padded = shapes.architecture.vocab_size % (padded * shapes.tp) != 0
    product = linear(
        shapes, "output_layer", hidden, padded, gathers=shapes.sequence_parallel, keeps=shapes.weights_trained
    )
    # fp32 logits become the softmax in place; 16-bit ones are still there, and a copy where padding was masked.
    held = (logits if shapes.wide else 0) + (logits if is_padded else 0)
    loss = Operator(softmax, held + 32 * tokens, (logits if shapes.wide else 0) + (logits if is_padded else 0))
    return chain((product, loss))
