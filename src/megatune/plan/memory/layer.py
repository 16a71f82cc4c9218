"""Bytes of one decoder layer, with what is recomputed inside of it, and of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from megatune.plan.operators.attention import heads_of
from megatune.plan.operators.experts import saves_input_twice
from megatune.plan.operators.layer import Branch, decoder_layer
from megatune.plan.operators.operator import Memory, Operator, chain, memory_of, recomputed, repeat
from megatune.plan.operators.shapes import Shapes
from megatune.plan.operators.vision import Images, projectors, vision_layer


@lru_cache(4096)
def layer_memory(shapes: Shapes, sparse: bool, modules: tuple[str, ...]) -> Memory:
    """Fold norm, attention, norm, feed-forward or experts, each branch around a residual connection.

    Args:
        modules: recompute_modules.
    """
    attention, rest = decoder_layer(shapes, sparse)
    inner = _experts(shapes, rest.inner, modules) if sparse else memory_of(rest.inner)
    if ("moe" if sparse else "mlp") in modules:
        inner = recomputed(inner, shapes.hidden, shapes.hidden)
    branches = (
        _branch(shapes, attention, attention_memory(shapes, attention.inner, modules), modules),
        _branch(shapes, rest, inner, modules),
    )
    return chain(branches, hold=shapes.hidden)


def vision_memory(shapes: Shapes, images: Images) -> Memory:
    """Fold the tower and its projectors."""
    layer = memory_of(vision_layer(shapes, images))
    if not images.tower_trained:
        layer = Memory(0, layer.kept, 0)
    return chain((repeat(layer, images.tower.depth), projectors(shapes, images).memory))


def _branch(shapes: Shapes, branch: Branch, inner: Memory, modules: tuple[str, ...]) -> Memory:
    before = branch.norm.memory
    if "layernorm" not in modules:
        return chain((before, inner))
    # The norm's output, which `inner` saves first, is computed again before anything of it is needed, in memory of its
    # own and copied to where it was.
    extra = before.kept - shapes.hidden + 2 * shapes.hidden
    return Memory(
        shapes.hidden + inner.kept - min(inner.kept, shapes.hidden),
        inner.forward + shapes.hidden,
        max(inner.backward, before.backward - shapes.hidden) + extra,
    )


def attention_memory(shapes: Shapes, operators: Sequence[Operator], modules: tuple[str, ...]) -> Memory:
    """Fold self-attention, with what is recomputed of it."""
    if "core_attn" not in modules and "mla_up_proj" not in modules:
        return memory_of(operators)
    heads = heads_of(shapes)
    made = heads.query + heads.key + heads.value
    *before, (_, (*core, context)), (_, (projection,)) = (
        (module, [operator.memory for operator in same])
        for module, same in groupby(operators, lambda operator: operator.module in ("core_attn", "context"))
    )
    if "core_attn" in modules:
        # The context is computed again, too, and freed before the projection's is.
        core, context = [recomputed(chain(core), made, heads.context)], Memory(heads.context)
    attended = chain((*core, context))
    if "mla_up_proj" in modules and shapes.architecture.mla is not None:
        # Queries, keys and values are discarded and made again, and copied to where they were. Values that a kernel
        # padded are other tensors, which it keeps.
        discarded = made - (heads.value if shapes.kernel == "padded" else 0)
        kept, forward, backward = attended
        attended = Memory(kept - discarded, forward + discarded, backward + discarded + made)
    return chain((*(memory for _, memories in before for memory in memories), attended, projection))


def _experts(shapes: Shapes, operators: Sequence[Operator], modules: tuple[str, ...]) -> Memory:
    if "shared_experts" not in modules and "moe_act" not in modules:
        return memory_of(operators)
    memories = [operator.memory for operator in operators]
    names = [operator.module for operator in operators]
    if "moe_act" in modules:
        # Gate and up, the output of the product before, are kept. The rest is computed again, and the result copied to
        # where it was.
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
        if "linear_fc1" not in shapes.keeps and not saves_input_twice(shapes):
            # The router saves the input that recomputation does.
            router = router._replace(kept=router.kept - shapes.hidden)
        memories[: count + 1] = shared, router
    return chain(memories)
