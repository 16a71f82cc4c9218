"""Rules of the parallel layout, including that of experts: divisibility and valid combinations."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.rules.rule import Context, Problem, divisors, multiples_around, nearest, needs_of
from megatune.errors import with_article
from megatune.references import assign, either, ref, remove, write

_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_CP = "context_parallel_size"
_COMM = "cp_comm_type"
_BIAS, _BALANCING = "moe_router_bias_update_rate", "moe_router_load_balancing_type"
_OVERLAP = "moe_shared_expert_overlap"


def tensor_parallel_fits(architecture: Architecture, size: int) -> bool:
    """Return whether tensor parallelism of this size can split the model's heads and feed-forward."""
    return not any(remainder for _, _, remainder in _shares(architecture, size))


def _shares(architecture: Architecture, tp: int) -> list[tuple[int, str, int]]:
    """List what tensor parallelism splits: size, name, and remainder."""
    heads, groups, moe = architecture.num_attention_heads, architecture.num_query_groups, architecture.moe
    shares = [(heads, "attention heads", heads % tp)]
    if architecture.mla is None:  # with MLA every head has its own key and value
        shares += _key_value_shares(heads, groups, architecture.gated_query_size, architecture.key_value_size, tp)
    if (others := architecture.global_heads) is not None:
        keys, groups = architecture.global_key_value_size, others.num_query_groups
        queries = architecture.global_query_size - keys * others.keys_are_values  # there are no values
        shares += _key_value_shares(heads, groups, queries, keys, tp, " of layers without a window")
    if architecture.delta is not None:
        key_heads = architecture.delta.num_key_heads
        shares.append((key_heads, "key heads of its gated delta nets", key_heads % tp))
    if moe is None or not all(moe.layers):
        shares.append((architecture.ffn_hidden_size, "MLP channels", architecture.ffn_hidden_size % tp))
    if moe is not None and moe.shared_expert_intermediate_size:
        shared = moe.shared_expert_intermediate_size
        shares.append((shared, "channels of the shared experts", shared % tp))
    return shares


def _key_value_shares(
    heads: int, groups: int, queries: int, keys: int, tp: int, of: str = ""
) -> Iterator[tuple[int, str, int]]:
    """Yield the split of key/value heads; if processes share one, that of all rows of the projection, which they
    exchange."""
    yield groups, f"key/value heads{of}", groups % tp and tp % groups
    if groups < tp and not tp % groups and not heads % tp:
        rows = queries + 2 * keys
        yield rows, f"rows of queries, keys and values{of}", rows % tp


def tensor_parallel(context: Context) -> Iterator[Problem]:
    """Heads, key/value heads and the feed-forward are split over tensor-parallel processes."""
    architecture, tp = context.architecture, context.settings.parallel.tensor_model_parallel_size
    if architecture is None or tensor_parallel_fits(architecture, tp):
        return
    unequal = [f"{number} {name}" for number, name, remainder in _shares(architecture, tp) if remainder]
    heads = architecture.num_attention_heads
    valid = nearest(tp, (size for size in divisors(heads) if tensor_parallel_fits(architecture, size)))
    what = f"{ref(_TP, tp)} does not split the model's {', '.join(unequal)}"
    why = "each process takes an equal number of each; key/value heads may also be shared by several processes"
    yield Problem((_TP,), what, why, f"{write(_TP, valid)}, the nearest valid size")


def sequence_parallel(context: Context) -> Iterator[Problem]:
    """Sequence parallelism has tokens for each tensor-parallel process."""
    parallel, cutoff = context.settings.parallel, context.settings.data.cutoff_len
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and cutoff < tp:
        what = f"{ref('cutoff_len', cutoff)} is shorter than {ref(_TP, tp)}"
        why = f"{ref('sequence_parallel')} gives each tensor-parallel process a part of the sequence"
        yield Problem(("cutoff_len", _TP, "sequence_parallel"), what, why, f"{write('cutoff_len', tp)} or more")


def context_parallel(context: Context) -> Iterator[Problem]:
    """Heads divide over context-parallel processes, with Ulysses and in gated delta nets."""
    architecture, parallel = context.architecture, context.settings.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if architecture is None or cp == 1:
        return
    if architecture.delta is not None and not architecture.delta.num_key_heads % tp:
        key_heads = architecture.delta.num_key_heads // tp
        if key_heads % cp:
            what = f"{ref(_CP, cp)} does not divide the {key_heads} key heads of a process"
            why = "a gated delta net gives each context-parallel process whole rows of an equal number of heads"
            fix = f"{write(_CP, nearest(cp, divisors(key_heads)))}, the nearest that divides them"
            yield Problem((_CP, _TP), what, why, fix)
    if parallel.cp_comm_type != "a2a":
        if architecture.bidirectional_images:
            what = f"{ref(_CP, cp)} with {ref(_COMM, parallel.cp_comm_type)} splits images that attend to themselves"
            why = "in this model image tokens also attend to later tokens of the image, which needs whole rows"
            yield Problem((_CP, _COMM), what, why, write(_COMM, "a2a"))
        return
    heads, left = divmod(architecture.num_attention_heads, tp)
    if left or heads % cp == 0:
        return
    what = f"{ref(_CP, cp)} with {ref(_COMM, 'a2a')} does not divide the {heads} attention heads of a process"
    why = "a2a gives each context-parallel process an equal number of heads"
    valid = nearest(cp, divisors(heads))
    other = "" if architecture.bidirectional_images else f"{assign(_COMM, 'p2p')}, or "
    fix = f"write {other}{assign(_CP, valid)}, the nearest that divides them"
    yield Problem((_CP, _COMM, _TP), what, why, fix)


def world(context: Context) -> Iterator[Problem]:
    """The world size is a multiple of the replicas of the model and of its experts."""
    parallel, asked = context.settings.parallel, context.settings.run.num_processes
    num_processes = asked if context.world_size is None else context.world_size
    if num_processes is None:
        return
    tp, pp, cp = (getattr(parallel, name) for name in (_TP, _PP, _CP))
    if num_processes % parallel.model_parallel_size:
        what = f"the {parallel.model_parallel_size} that one replica of the model takes"
        parts = f"{ref(_TP, tp)} times {ref(_PP, pp)}"
        parts += f" times {ref(_CP, cp)}" if cp > 1 else ""
        names = ("num_processes", _TP, _PP, *([_CP] if cp > 1 else []))
        why = f"{parts} is {parallel.model_parallel_size}"
    elif num_processes % parallel.expert_parallel_size:
        what = f"the {parallel.expert_parallel_size} that one replica of the experts takes"
        etp, ep = parallel.expert_tensor_size, parallel.expert_model_parallel_size
        why = f"{ref(_ETP, etp)} times {ref(_EP, ep)} times {ref(_PP, pp)} is {parallel.expert_parallel_size}"
        if parallel.expert_tensor_parallel_size is None and etp > 1:
            why += f"; {ref(_ETP)} is {ref(_TP)} if it is not set"
        names = ("num_processes", _EP, _ETP)
    else:
        return
    key = "num_processes" if asked == num_processes else "the number of processes"
    valid = multiples_around(num_processes, parallel.smallest_world)
    started = f"start {either(valid)} processes" if key != "num_processes" else write(key, *valid)
    smaller = _that_fits(context, num_processes)
    fix = f"write {smaller}, or {started}" if smaller else started
    yield Problem(names, f"{num_processes} processes are not a multiple of {what}", why, fix)


def _that_fits(context: Context, num_processes: int) -> str:
    """Return a smaller size of the layout with which it fits the processes; "" if there is none."""
    parallel, architecture = context.settings.parallel, context.architecture
    moe = None if architecture is None else architecture.moe

    def fits(name: str, size: int) -> bool:
        if architecture is not None and name == _TP and not tensor_parallel_fits(architecture, size):
            return False
        tried = parallel.model_copy(update={name: size})
        return num_processes % tried.model_parallel_size == 0 and num_processes % tried.expert_parallel_size == 0

    if parallel.expert_tensor_size > 1 and parallel.expert_model_parallel_size > 1 and fits(_ETP, 1):
        return assign(_ETP, 1)
    for name in (_EP, _PP, _CP, _TP):
        whole = moe.num_experts if name == _EP and moe is not None else getattr(parallel, name)
        smaller = (size for size in reversed(divisors(whole)) if size < getattr(parallel, name))
        if found := next((size for size in smaller if fits(name, size)), None):
            return assign(name, found)
    return ""


RULES = (needs_of("parallel"), tensor_parallel, sequence_parallel, context_parallel, world)


def sharding(context: Context) -> Iterator[Problem]:
    """Experts divide over expert-parallel processes, and their channels over tensor-parallel ones."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or architecture.moe is None:
        return
    moe, ep, etp = architecture.moe, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if moe.num_experts % ep:
        what = f"{ref(_EP, ep)} does not divide the model's {moe.num_experts} experts"
        fix = f"{write(_EP, nearest(ep, divisors(moe.num_experts)))}, the nearest that does"
        yield Problem((_EP,), what, "each process holds the same number of experts", fix)
    channels = moe.moe_ffn_hidden_size
    if channels % etp:
        implied = "" if parallel.expert_tensor_parallel_size else f" ({ref(_TP)}, as it is not set)"
        what = f"{ref(_ETP, etp)}{implied} does not divide an expert's {channels} channels"
        why = "each process takes an equal number of channels of every expert"
        fix = write(_ETP, nearest(etp, divisors(channels)))
        yield Problem((_ETP, _TP), what, why, fix)
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        what = f"{ref(_TP)} above 1 without {ref('sequence_parallel')}"
        why = "without it every tensor-parallel process would send all tokens to the experts"
        yield Problem(("sequence_parallel", _TP), what, why, write("sequence_parallel", True))


def routing(context: Context) -> Iterator[Problem]:
    """Settings of the router fit the model's router."""
    architecture, experts = context.architecture, context.settings.experts
    if architecture is None or architecture.moe is None:
        return
    moe, kind = architecture.moe, with_article(architecture.model_type)
    if experts.moe_router_bias_update_rate and not moe.expert_bias:
        what = f"{ref(_BIAS)} with a model that has no bias on its experts"
        yield Problem((_BIAS,), what, f"{kind} balances with a loss: {ref('moe_aux_loss_coeff')}", remove(_BIAS))
    if experts.moe_router_load_balancing_type == "sinkhorn" and moe.score_function != "softmax":
        why = "sinkhorn balances the softmax of the router's logits; this model uses their sigmoid"
        what = f"{ref(_BALANCING, 'sinkhorn')} with {kind}"
        yield Problem((_BALANCING,), what, why, write(_BALANCING, "seq_aux_loss"))
    if moe.router_topk == 1 and moe.score_function == "softmax" and not moe.pre_softmax:
        what = "the model sends each token to one expert and normalizes its weight, which is then always 1"
        fix = "train a checkpoint with num_experts_per_tok above 1, or with norm_topk_prob: false"
        yield Problem(("model_name_or_path",), what, "its router would never learn", fix)
    if experts.moe_shared_expert_overlap and not moe.shared_expert_intermediate_size:
        what = f"{assign(_OVERLAP, True)} with a model without shared experts"
        yield Problem((_OVERLAP,), what, f"{kind} has none", remove(_OVERLAP))
    if experts.moe_shared_expert_overlap and moe.separate_norms:
        why = "its shared expert has separate norms, which the overlapped computation does not support"
        yield Problem((_OVERLAP,), f"{assign(_OVERLAP, True)} with {kind}", why, remove(_OVERLAP))


EXPERT_RULES = (needs_of("experts"), sharding, routing)
