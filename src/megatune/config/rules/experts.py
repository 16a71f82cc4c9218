"""Rules of mixtures of experts: experts are sharded and split evenly, and trained as the model allows."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.rules.declared import needs_of
from megatune.config.rules.problem import Context, Problem, divisors, nearest

_BIAS, _BALANCING = "moe_router_bias_update_rate", "moe_router_load_balancing_type"
_OVERLAP = "moe_shared_expert_overlap"


def sharding(context: Context) -> Iterator[Problem]:
    """Every expert-parallel process holds the same number of experts, and every slice of one is as large."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or architecture.moe is None:
        return
    moe, ep, etp = architecture.moe, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if moe.num_experts % ep:
        what = f"`expert_model_parallel_size {ep}` does not divide the model's {moe.num_experts} experts"
        fix = f"write `expert_model_parallel_size: {nearest(ep, divisors(moe.num_experts))}`, the nearest that does"
        yield Problem(("expert_model_parallel_size",), what, "each process holds the same number of experts", fix)
    channels = moe.moe_ffn_hidden_size
    if channels % etp:
        implied = "" if parallel.expert_tensor_parallel_size else " (`tensor_model_parallel_size`, as it is not set)"
        what = f"`expert_tensor_parallel_size {etp}`{implied} does not divide an expert's {channels} channels"
        why = "each process takes an equal, whole share of every expert"
        fix = f"write `expert_tensor_parallel_size: {nearest(etp, divisors(channels))}`"
        yield Problem(("expert_tensor_parallel_size", "tensor_model_parallel_size"), what, why, fix)
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        what = "`tensor_model_parallel_size` above 1 without `sequence_parallel`"
        why = "without it every tensor-parallel process would send all tokens to the experts"
        yield Problem(("sequence_parallel", "tensor_model_parallel_size"), what, why, "write `sequence_parallel: true`")


def routing(context: Context) -> Iterator[Problem]:
    """How a model routes is part of the model."""
    architecture, experts = context.architecture, context.settings.experts
    if architecture is None or architecture.moe is None:
        return
    moe, kind = architecture.moe, f"a {architecture.model_type}"
    if experts.moe_router_bias_update_rate and not moe.expert_bias:
        what = f"`{_BIAS}` with a model that has no bias on its experts"
        yield Problem((_BIAS,), what, f"{kind} balances by a loss: `moe_aux_loss_coeff`", f"remove `{_BIAS}`")
    if experts.moe_router_load_balancing_type == "sinkhorn" and moe.score_function != "softmax":
        why = "sinkhorn balances the softmax of the router's logits; this model takes their sigmoid"
        yield Problem((_BALANCING,), f"`{_BALANCING} sinkhorn` with {kind}", why, f"write `{_BALANCING}: seq_aux_loss`")
    if moe.router_topk == 1 and moe.score_function == "softmax" and not moe.pre_softmax:
        what = "the model sends each token to one expert and normalizes its share, which is then always 1"
        fix = "train a checkpoint with num_experts_per_tok above 1, or with norm_topk_prob: false"
        yield Problem(("model_name_or_path",), what, "its router would never learn", fix)
    if experts.moe_shared_expert_overlap and not moe.shared_expert_intermediate_size:
        what = f"`{_OVERLAP}: true` with a model without shared experts"
        yield Problem((_OVERLAP,), what, f"{kind} has none", f"remove `{_OVERLAP}`")
    if experts.moe_shared_expert_overlap and moe.separate_norms:
        why = "the feed-forward beside its experts has norms of its own, which the overlapped computation leaves out"
        yield Problem((_OVERLAP,), f"`{_OVERLAP}: true` with {kind}", why, f"remove `{_OVERLAP}`")


RULES = (needs_of("experts"), sharding, routing)
