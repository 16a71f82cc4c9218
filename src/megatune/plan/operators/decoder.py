"""The decoder: inputs, word embedding, layers and their recomputation, output layer and loss.

Legend: T tokens, P = T / tp with sequence parallelism; h hidden size, v rows of the vocabulary on a rank. For gated
delta nets: k key heads and n value heads of this rank, d channels of a key, e of a value, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from megatune.architecture import DeltaNet
from megatune.config.kernels import LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_ON_CPU
from megatune.config.settings import Settings
from megatune.families.mtp import PROJECTION
from megatune.families.weights import padded_vocab_size
from megatune.plan.operators.attention import self_attention
from megatune.plan.operators.experts import before_experts, routed_experts
from megatune.plan.operators.linear import elementwise, feed_forward, layer_norm, linear, linear_work
from megatune.plan.operators.operator import Memory, MemoryOp, Operator, Product
from megatune.plan.operators.shapes import Shapes, without_experts

# As in the engine: tokens of a chunk, and tokens whose intermediate tensors are in memory at once.
CHUNK, TOKENS_AT_ONCE = 64, 1024
_NAME = "self_attention"
_ALL_LAYERS = 10**9
Branch = tuple[Operator, ...]  # norms, the operators between them, and the sum into the residual stream


def decoder_layer(shapes: Shapes, sparse: bool) -> tuple[Branch, Branch]:
    """Return the residual branches of a layer: attention, and feed-forward or experts."""
    whole = without_experts(shapes)
    return mixer_branch(whole), expert_branch(shapes) if sparse else dense_branch(whole)


@lru_cache(maxsize=4096)
def mixer_branch(shapes: Shapes) -> Branch:
    """Return the branch of attention, or of a gated delta net."""
    return _branch(shapes, delta_net(shapes) if shapes.kind.delta else self_attention(shapes))


@lru_cache(maxsize=4096)
def dense_branch(shapes: Shapes) -> Branch:
    """Return the branch of a feed-forward."""
    return _branch(shapes, feed_forward(shapes, "mlp", shapes.architecture.ffn_hidden_size // shapes.tp))


def expert_branch(shapes: Shapes) -> Branch:
    """Return the branch of experts."""
    around, last = around_experts(without_experts(shapes)), -1 - shapes.architecture.post_norms
    return *around[:last], *experts(shapes), *around[last:]


@lru_cache(maxsize=4096)
def around_experts(shapes: Shapes) -> Branch:
    """Return the branch of experts without the experts, which is the same for any sharding of these."""
    return _branch(shapes, before_experts(shapes))


@lru_cache(maxsize=4096)
def experts(shapes: Shapes) -> tuple[Operator, ...]:
    """Return the operators of routed experts."""
    return tuple(routed_experts(shapes))


def _branch(shapes: Shapes, inner: Iterable[Operator]) -> Branch:
    norm, numbers = layer_norm(shapes), shapes.sp_tokens * shapes.architecture.hidden_size
    before, after = ((norm,) * has for has in (shapes.architecture.pre_norms, shapes.architecture.post_norms))
    return *before, *inner, *after, Operator("residual", Memory(0), *elementwise(shapes, numbers, 3, 2, 2))


class Recompute(NamedTuple):
    """The recomputation in each chunk of layers.

    Attributes:
        num_layers: number of layers, the first of a chunk, that are recomputed whole.
        group_size: number of these layers that are recomputed together.
        modules: modules that are recomputed in the other layers.
    """

    num_layers: int
    group_size: int
    modules: tuple[str, ...]


def recompute_of(settings: Settings) -> Recompute:
    """Read the recomputation from the settings; with block, moe_layer_recompute applies to the other layers."""
    recompute = settings.recompute
    if recompute.recompute_granularity != "full":
        return Recompute(0, 1, recompute.selective_modules)
    if recompute.recompute_method == "block":
        modules = ("moe",) if recompute.moe_layer_recompute else ()
        return Recompute(recompute.recompute_num_layers or _ALL_LAYERS, 1, modules)
    return Recompute(_ALL_LAYERS, recompute.recompute_num_layers or 1, ())


@lru_cache(maxsize=4096)
def inputs(shapes: Shapes) -> Memory:
    """Return the memory of cosine and sine of the positions, in the model's dtype, and of tokens, labels, positions and
    indices of trained tokens if they are copied: to a GPU, or for context parallelism."""
    copied, rows = 0 if shapes.on_cpu and shapes.cp == 1 else 33 * shapes.tokens, 1
    if shapes.architecture.mrope is not None:  # each row of a micro-batch has its positions, three per token
        rows, copied = shapes.rows, copied + (24 * shapes.tokens if copied else 0)
    return Memory(2 * rows * shapes.length * shapes.architecture.rotary_dim * shapes.itemsize + copied)


@lru_cache(maxsize=4096)
def embedding(shapes: Shapes) -> Operator:
    """Return the lookup; backward a scatter-add into a gradient of the weight's size, added to its buffer."""
    row, trained = shapes.architecture.hidden_size * shapes.itemsize, shapes.embedding_trained
    table = shapes.architecture.vocab_size * shapes.architecture.hidden_size / shapes.tp
    weight = _padded_vocabulary(shapes) * row if trained else 0
    memory = Memory(8 * shapes.tokens if shapes.tp > 1 else 0, shapes.whole_hidden, shapes.whole_hidden + weight)
    read = 2 * shapes.tokens * row
    written = read + table * (2 * shapes.itemsize + 2 * shapes.gradient_itemsize) if trained else 0.0
    return Operator("embedding", memory, (MemoryOp(read),), (MemoryOp(written),), 4)


@lru_cache(maxsize=4096)
def head(shapes: Shapes) -> tuple[Operator, Operator, Operator]:
    """Return the last norm, the output layer and the loss, assuming that every token is trained; or the scores.

    Fused, they are computed in chunks of tokens, and the backward pass recomputes the logits: the third product of
    four. Passes over logits: fp32 sums of exponentials forward, probabilities and their rounding backward.
    """
    if shapes.architecture.num_labels:
        return layer_norm(shapes), *_score(shapes)
    size, hidden = shapes.itemsize, shapes.architecture.hidden_size
    keeps = shapes.keeps | {"output_layer"} if shapes.output_trained else shapes.keeps - {"output_layer"}
    shapes = shapes.replace(weights_trained=shapes.output_trained, keeps=keeps)
    columns = shapes.architecture.vocab_size / shapes.tp
    forward, backward, launches, weight = linear_work(shapes, shapes.tokens, columns, hidden)
    if shapes.performance.cross_entropy_loss_fusion:
        memories = (Memory(0), _in_chunks(shapes))
    else:
        memories = _whole(shapes)
    if shapes.engine.keeps_logits or not shapes.performance.cross_entropy_loss_fusion:
        passes = 2 + 20 / size, 2 + 16 / size
    else:
        passes, backward = (6.0, 8.0), backward + forward
    if shapes.architecture.logits_softcap is not None:  # three operators, and four more backward
        passes = passes[0] + 6, passes[1] + (15 if shapes.performance.cross_entropy_loss_fusion else 9)
    output = Operator("output", memories[0], forward, backward, launches, weight)
    loss = Operator("loss", memories[1], *elementwise(shapes, shapes.tokens * columns, *passes, 20))
    return layer_norm(shapes), output, loss


@lru_cache(maxsize=4096)
def mtp_inputs(shapes: Shapes) -> tuple[Operator, ...]:
    """Return the inputs of an MTP layer: the embedding of the next tokens, two norms, and the projection of the
    concatenation."""
    hidden, norm = shapes.architecture.hidden_size, layer_norm(shapes)
    projection = linear(shapes, PROJECTION, "mtp", 2 * hidden, hidden, vectors=shapes.sp_tokens)
    return embedding(shapes), norm, norm, projection


def _score(shapes: Shapes) -> tuple[Operator, Operator]:
    """Return the scores and their loss: fp32 hidden states are kept, and a few numbers per token and score."""
    hidden, count = shapes.architecture.hidden_size, shapes.architecture.num_labels
    numbers, scores = shapes.sp_tokens * hidden, shapes.tokens * count
    # The 16-bit hidden states that fp32 ones are cast from, and the fp32 copy of the weight.
    narrow, weight = (shapes.hidden, 4 * count * hidden) if shapes.fp32_itemsize else (0, 0)
    memory = Memory(4 * numbers + 16 * shapes.tokens + weight, narrow, 4 * numbers + narrow + weight)
    moved = float(8 * numbers + narrow)
    forward, backward, launches, _ = linear_work(shapes.replace(weights_trained=True), shapes.sp_tokens, count, hidden)
    output = Operator("output", memory, (*forward, MemoryOp(moved)), (*backward, MemoryOp(2 * moved)), launches + 2)
    loss = Operator("loss", Memory(0, 8 * scores, 8 * scores), *elementwise(shapes, scores, 12, 12, 20))
    return output, loss


def _in_chunks(shapes: Shapes) -> Memory:
    """Return the memory of the fused loss. It keeps the hidden states and five numbers per token. Each pass holds the
    logits of a chunk of tokens, at most LOSS_CHUNK_BYTES in fp32; on a CPU with an fp32 copy of 16-bit logits."""
    rows = min(_padded_vocabulary(shapes), shapes.architecture.vocab_size)
    tokens, size = shapes.tokens, shapes.itemsize
    count = -(-tokens * rows * 4 // (LOSS_CHUNK_BYTES_ON_CPU if shapes.on_cpu else LOSS_CHUNK_BYTES))
    some = -(-tokens // count)
    chunk, taken = some * rows, some * shapes.architecture.hidden_size * size
    forward = chunk * (size + (shapes.fp32_itemsize if shapes.on_cpu else 0))
    softmax = chunk * (
        2 * size + shapes.fp32_itemsize
        if shapes.on_cpu and shapes.fp32_itemsize
        else size
        if shapes.on_cpu
        else 2 * size
    )
    adding = chunk * size
    if shapes.on_cpu and shapes.fp32_itemsize and shapes.gradient_itemsize == 4:
        adding += 4 * (chunk + some * shapes.architecture.hidden_size)
    backward = shapes.whole_hidden + taken + max(softmax, adding, chunk * size + taken)
    if shapes.sequence_parallel:
        backward = max(backward, shapes.whole_hidden + shapes.hidden)
    return Memory(shapes.hidden + 36 * tokens, forward, backward)


def _whole(shapes: Shapes) -> tuple[Memory, Memory]:
    """Return the memory of the logits of all tokens, and of their fp32 softmax, which is kept."""
    padded, tokens = _padded_vocabulary(shapes), shapes.tokens
    logits = tokens * padded * shapes.itemsize
    is_padded = shapes.architecture.vocab_size % (padded * shapes.tp) != 0
    hidden = shapes.architecture.hidden_size
    product = linear(shapes, "output_layer", "output", hidden, padded, gathers=shapes.sequence_parallel)
    # fp32 logits become the softmax in place; 16-bit ones stay, as does a copy if padding was masked.
    held = (logits if shapes.fp32_itemsize else 0) + (logits if is_padded else 0)
    return product.memory, Memory(4 * tokens * padded, held + 32 * tokens, held)


def _padded_vocabulary(shapes: Shapes) -> int:
    """Return rows of a rank's vocabulary, padding included."""
    return padded_vocab_size(shapes.architecture.vocab_size, shapes.tp) // shapes.tp


# --- gated delta nets: projections, convolution, the chunked rule and the gated norm ----------------------------------
# They compute in fp32 in models of any dtype, without fused kernels. Their memory traffic was counted operator by
# operator; a test counts it again.


def delta_net(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators from the normalized hidden states to the output projection."""
    architecture, delta, tokens = shapes.architecture, shapes.architecture.delta, shapes.tokens
    assert delta is not None
    hidden, size, spread = architecture.hidden_size, shapes.itemsize, shapes.sequence_parallel
    rows, mixed = (delta.qkvz_size + delta.ba_size) // shapes.tp, delta.conv_size // shapes.tp
    values, heads = delta.value_size // shapes.tp, delta.num_value_heads // shapes.tp
    yield linear(shapes, f"{_NAME}.in_proj", "qkv", hidden, rows, gathers=spread)
    # The projection's whole output is kept: the convolution and the norm's gate save parts of it.
    kept, wide = tokens * rows * size, 4 * tokens * mixed
    memory = Memory(kept, 3 * wide + tokens * mixed * size, 6 * wide)
    yield Operator("conv", memory, (MemoryOp(88 * tokens * mixed),), (MemoryOp(234 * tokens * mixed),), 16)
    # Three fp32 numbers per head: the decay, its softplus and its argument; and one in the model's dtype.
    small = tokens * heads * (12 + size)
    yield Operator("decay", Memory(small, 4 * tokens * heads, 8 * tokens * heads), launches=8)
    yield _rule(shapes, delta, heads, mixed)
    # It keeps its input, the output of the rule, with temporary fp32 copies.
    memory = Memory(tokens * values * size, 12 * tokens * values, 24 * tokens * values)
    yield Operator("norm", memory, (MemoryOp(66 * tokens * values),), (MemoryOp(217 * tokens * values),), 14)
    yield linear(shapes, f"{_NAME}.out_proj", "proj", values, hidden, scatters=spread, shares_gradient=True)


def _rule(shapes: Shapes, delta: DeltaNet, heads: int, mixed: int) -> Operator:
    """Return the delta rule. It keeps queries, keys and values, and a state of each head for every TOKENS_AT_ONCE
    tokens; the intermediate fp32 tensors of that many tokens are in memory."""
    tokens, d, e = shapes.tokens, delta.key_head_dim, delta.value_head_dim
    whole = tokens * shapes.cp // max(shapes.rows, 1)
    parts = -(-whole // TOKENS_AT_ONCE) * shapes.rows / shapes.cp
    states = int(4 * heads * d * e * parts)
    at_once = min(tokens * shapes.cp, TOKENS_AT_ONCE * shapes.rows) // shapes.cp
    # Per token and head: corrections, readings, the solution, queries and keys of the state, rows of chunks.
    inside = 4 * at_once * heads * (4 * e + 6 * d + 4 * CHUNK) + 4 * at_once * heads * d * e // CHUNK
    output = 4 * tokens * heads * e
    memory = Memory(tokens * mixed * shapes.itemsize + states, 2 * output + inside, 2 * output + 3 * inside)
    # Products per token and head: with keys and queries of the chunk, of the triangular system, with the state.
    columns = 3 * e + 2 * CHUNK + (CHUNK * (d + e) / 2 + CHUNK * e) / d
    forward = Product(tokens * heads, columns, d, 4)
    # Elements of keys, keys per value head, values, scores of a chunk, and states; below, the bytes moved for each.
    numbers = mixed - heads * e, 2 * heads * d, 2 * heads * e, 2 * heads * CHUNK, 2 * heads * d * e / CHUNK
    moved, moved_back = (
        MemoryOp(tokens / 2 * sum(number * bytes_ for number, bytes_ in zip(numbers, each, strict=True)))
        for each in ((90, 18, 69, 48, 23), (316, 112, 77, 236, 62))
    )
    launches = 40 * int(parts + 1) + 4 * whole // CHUNK
    return Operator("rule", memory, (forward, moved), (forward, forward, forward, moved_back), launches)
