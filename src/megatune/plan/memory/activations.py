"""Activations of a stage at the peak of a step, from the memory of passes and the micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import add, mul
from typing import NamedTuple, TypeVar

from megatune.plan.case import Case
from megatune.plan.memory.stage import StageMemory
from megatune.plan.memory.tensors import ChunkContent, LayerContent, stage_chunks
from megatune.plan.operators.attention import heads_of
from megatune.plan.operators.decoder import (
    Recompute,
    decoder_layer,
    embedding,
    head,
    inputs,
    mtp_inputs,
    recompute_of,
)
from megatune.plan.operators.experts import saves_input_twice
from megatune.plan.operators.linear import layer_norm
from megatune.plan.operators.operator import Memory, Operator, chain, memory_of, recomputed, repeat
from megatune.plan.operators.shapes import Shapes, layer_shapes, shapes_of
from megatune.plan.operators.vision import (
    Images,
    encoder_inputs,
    encoder_layer,
    frozen_layer_bytes,
    images_of,
    media_embedding,
    mergers,
)
from megatune.plan.schedule import in_flight

T = TypeVar("T")
Contents = tuple[tuple[ChunkContent, ...], ...]  # chunks by stage and virtual stage
_Runs = tuple[tuple[LayerContent, int], ...]  # kinds of layers, each with its number of consecutive layers


class _Media(NamedTuple):
    """Memory of the vision encoder and of inserting its features, and bytes that deepstack adds to the first layers."""

    memory: Memory
    added: int


class Activations:
    """Peak bytes of activations of the stages of a case, on the fullest rank of experts, times the calibrated factor.

    With 1F1B the peak is when the most micro-batches are in flight and one of them is at the peak of its forward or
    backward pass. Every token is assumed to be trained, and every row to be as long as the longest.

    Args:
        shapes, contents: of the case, if already computed.
    """

    def __init__(self, case: Case, shapes: Shapes | None = None, contents: Contents | None = None) -> None:
        settings = case.settings
        self._factor, self._count = case.machine.calibration.activations, case.num_micro_batches
        self._contents = contents or stage_chunks(settings.parallel, case.model.architecture, settings.finetuning)
        self._shapes, self._recompute, images = shapes or shapes_of(case), recompute_of(settings), images_of(case)
        self._media = _media_memory(self._shapes, images) if images else None

    def total(self, stage: int) -> int:
        return round(sum(self._peak(self._shapes, stage)) * self._factor)

    def parts(self, stage: int) -> StageMemory:
        """Return the parts of `total`: `logits_and_loss` is the increase of the peak by the output layer and the loss,
        `expert_imbalance` the excess of the fullest expert rank over an even share, `activations` the rest."""
        even = self._shapes if self._shapes.imbalance == 1.0 else self._shapes.replace(imbalance=1.0)
        bare, loss = self._peak(even, stage)
        activations, both = round(bare * self._factor), round((bare + loss) * self._factor)
        return StageMemory(
            activations=activations, logits_and_loss=both - activations, expert_imbalance=self.total(stage) - both
        )

    def _peak(self, shapes: Shapes, stage: int) -> tuple[int, int]:
        """Return the peak bytes without output layer and loss, and the increase by these."""
        chunks, others = self._contents[stage], (self._recompute, self._media)
        of_each = {chunk: _pass(shapes, chunk, *others, False) for chunk in dict.fromkeys(chunks)}
        passes = [of_each[chunk] for chunk in chunks]
        bare = self._fullest(shapes, stage, passes)
        if not chunks[-1].loss:
            return bare, 0
        passes[-1] = _pass(shapes, chunks[-1], *others, True)
        return bare, max(self._fullest(shapes, stage, passes) - bare, 0)

    def _fullest(self, shapes: Shapes, stage: int, passes: Sequence[Memory]) -> int:
        """Return the peak bytes of 1F1B: those of all micro-batches in flight, and the temporaries of one pass."""
        kept, pp = tuple([memory.kept for memory in passes]), len(self._contents)
        if pp > 1 and shapes.on_cpu:
            # A GPU frees what was sent to the next stage; a CPU's communication may still have to read it.
            sent = [0 if chunk.loss else shapes.hidden for chunk in self._contents[stage]]
            kept = tuple(map(add, kept, sent))
        held = in_flight(pp, len(kept), stage, self._count, kept if len(kept) > 1 else None)
        return sum(map(mul, held, kept)) + max([max(memory.forward, memory.backward) for memory in passes])


@lru_cache(16384)
def _pass(shapes: Shapes, chunk: ChunkContent, recompute: Recompute, media: _Media | None, with_loss: bool) -> Memory:
    """Return the memory of a micro-batch in one virtual stage."""
    memories, added = [inputs(shapes)], 0
    groups, kept = _groups(chunk, recompute)
    if chunk.embedding and media is not None:
        # Recomputed layers save the added tensors; otherwise these are freed after the forward pass.
        added = 0 if groups else media.added
        memories += [media.memory, Memory(media.added - added)]
    elif chunk.embedding:
        memories.append(embedding(shapes).memory)
    memories += [repeat(_again(shapes, group), times) for group, times in groups]
    memories += _runs(shapes, kept, recompute.modules)
    if chunk.loss:
        norm, *rest = (operator.memory for operator in head(shapes))
        end = [norm, *(rest if with_loss else [Memory(0, shapes.hidden, shapes.hidden)])]
        memories += [*end, *_mtp(shapes, chunk, recompute), *end] if chunk.has_mtp else end
    whole = chain(memories)
    return whole._replace(forward=whole.forward + added) if added else whole


def _mtp(shapes: Shapes, chunk: ChunkContent, recompute: Recompute) -> list[Memory]:
    """Return the memory of the MTP layer and its inputs; it is recomputed if one more layer of the chunk would be."""
    looked_up, *before = (operator.memory for operator in mtp_inputs(shapes))
    inner = chain((*before, _layer(shapes, chunk.layers[-1], recompute.modules)))
    if recompute.num_layers >= len(chunk.layers):
        inner = recomputed(inner, 2 * shapes.hidden, shapes.hidden)
    return [looked_up, inner]


@lru_cache(16384)
def _again(shapes: Shapes, group: _Runs) -> Memory:
    """Return the memory of layers that are recomputed together."""
    if all(layer.gradient == "none" for layer, _ in group):
        return chain(_runs(shapes, group, ()))
    # Gradients flow to the beginning of a recomputed group.
    reached = [(layer._replace(gradient="through") if layer.gradient == "none" else layer, n) for layer, n in group]
    return recomputed(chain(_runs(shapes, reached, ())), shapes.hidden, shapes.hidden)


def _runs(shapes: Shapes, runs: Iterable[tuple[LayerContent, int]], modules: tuple[str, ...]) -> list[Memory]:
    return [repeat(_layer(shapes, layer, modules), times) for layer, times in runs]


@lru_cache(16384)
def _layer(shapes: Shapes, layer: LayerContent, modules: tuple[str, ...]) -> Memory:
    memory = layer_memory(layer_shapes(shapes, layer.kind, layer.gradient == "weights"), layer.kind.sparse, modules)
    # Without a backward pass nothing is kept; the layer's tensors are held during its forward pass.
    return memory if layer.gradient != "none" else Memory(0, memory.kept + memory.forward)


@lru_cache(4096)
def _groups(chunk: ChunkContent, recompute: Recompute) -> tuple[tuple[tuple[_Runs, int], ...], _Runs]:
    """Return the groups of layers that are recomputed together, equal ones with their number, and the other layers."""
    layers = chunk.layers[: len(chunk.layers) - chunk.has_mtp]
    last = min(recompute.num_layers, len(layers))
    size = recompute.group_size
    groups = [layers[first : min(first + size, last)] for first in range(0, last, size)]
    return tuple((_run_lengths(group), times) for group, times in _run_lengths(groups)), _run_lengths(layers[last:])


def _run_lengths(values: Iterable[T]) -> tuple[tuple[T, int], ...]:
    return tuple((value, len(list(same))) for value, same in groupby(values))


@lru_cache(4096)
def layer_memory(shapes: Shapes, sparse: bool, modules: tuple[str, ...]) -> Memory:
    """Return the memory of a layer with its norms and residual connections; `modules` are recompute_modules."""
    before, after = shapes.architecture.pre_norms, shapes.architecture.post_norms
    attention, rest = (branch[before : -1 - after] for branch in decoder_layer(shapes, sparse))
    inner = _experts(shapes, rest, modules) if sparse else memory_of(rest)
    if ("moe" if sparse else "mlp") in modules:
        inner = recomputed(inner, shapes.hidden, shapes.hidden)
    branches = attention_memory(shapes, attention, modules), inner
    return chain((_branch(shapes, each, modules) for each in branches), hold=shapes.hidden)


def _media_memory(shapes: Shapes, images: Images) -> _Media:
    added = images.tower.num_deepstack_mergers * shapes.hidden
    return _Media(chain((vision_memory(shapes, images), media_embedding(shapes, images).memory)), added)


def vision_memory(shapes: Shapes, images: Images) -> Memory:
    """Return the memory of the encoder and its mergers; deepstack's mergers count before the layers."""
    layer, at_once = memory_of(encoder_layer(shapes, images)), frozen_layer_bytes(shapes, images)
    if images.recomputed:
        hidden = images.patches * images.tower.hidden_size * shapes.itemsize
        layer = recomputed(layer, hidden, hidden)._replace(forward=at_once - hidden)
    elif not images.tower_trained:
        layer = Memory(0, at_once, 0)
    *deepstack, last = (operator.memory for operator in mergers(shapes, images))
    before, after = encoder_inputs(shapes, images).memory, repeat(layer, images.tower.depth)
    return chain((before, *deepstack, after, last))


def _branch(shapes: Shapes, inner: Memory, modules: tuple[str, ...]) -> Memory:
    """Return the memory of a residual branch: the norm before `inner`, or the norm after it, or both."""
    norm = layer_norm(shapes).memory
    inner = _normed(shapes, norm, inner, modules) if shapes.architecture.pre_norms else inner
    return chain((inner, *(norm,) * shapes.architecture.post_norms))


def _normed(shapes: Shapes, norm: Memory, inner: Memory, modules: tuple[str, ...]) -> Memory:
    if "layernorm" not in modules:
        return chain((norm, inner))
    # The norm's output, which `inner` saves first, is recomputed into a new tensor before it is needed, and copied to
    # its original storage.
    return Memory(
        shapes.hidden + inner.kept - min(inner.kept, shapes.hidden),
        inner.forward + shapes.hidden,
        max(inner.backward, norm.backward - shapes.hidden) + norm.kept + shapes.hidden,
    )


def attention_memory(shapes: Shapes, operators: Sequence[Operator], modules: tuple[str, ...]) -> Memory:
    """Return the memory of self-attention with recomputed modules."""
    if shapes.kind.delta or ("core_attn" not in modules and "mla_up_proj" not in modules):
        return memory_of(operators)
    heads = heads_of(shapes)
    inputs_bytes = heads.query + heads.key + heads.value
    *before, (_, (*core, context)), (_, after) = (
        (module, [operator.memory for operator in same])
        for module, same in groupby(operators, lambda operator: operator.module in ("core_attn", "context"))
    )
    if "core_attn" in modules:
        # The context is also recomputed, and freed before that of the projection.
        core, context = [recomputed(chain(core), inputs_bytes, heads.context)], Memory(heads.context)
    attended = chain((*core, context))
    if "mla_up_proj" in modules and shapes.architecture.mla is not None:
        # Queries, keys and values are discarded, recomputed and copied to their original storage. Values that a kernel
        # padded are other tensors, which it keeps.
        discarded = inputs_bytes - (heads.value if shapes.kernel == "padded" else 0)
        kept, forward, backward = attended
        attended = Memory(kept - discarded, forward + discarded, backward + discarded + inputs_bytes)
    return chain((*(memory for _, memories in before for memory in memories), attended, *after))


def _experts(shapes: Shapes, operators: Sequence[Operator], modules: tuple[str, ...]) -> Memory:
    if "shared_experts" not in modules and "moe_act" not in modules:
        return memory_of(operators)
    memories = [operator.memory for operator in operators]
    names = [operator.module for operator in operators]
    if "moe_act" in modules:
        # Gate and up, the output of fc1, are kept. The rest is recomputed and copied to its original storage.
        place = names.index("moe_act")
        gate_up, activation, second = memories[place - 1].forward, memories[place], memories[place + 1]
        extra = activation.kept - gate_up + 2 * second.kept
        memories[place : place + 2] = (
            Memory(gate_up, activation.forward + activation.kept - gate_up, activation.backward + extra),
            Memory(0, second.forward + second.kept, second.backward + extra),
        )
    if "shared_experts" in modules and (count := names.count("shared_experts")):
        shared = recomputed(chain(memories[:count]), shapes.hidden, shapes.hidden)
        router = memories[count]
        if "mlp.shared_experts.linear_fc1" not in shapes.keeps and not saves_input_twice(shapes):
            # The router and the recomputation save the same input.
            router = router._replace(kept=router.kept - shapes.hidden)
        memories[: count + 1] = shared, router
    return chain(memories)
