"""Rules of mixtures of experts: they need some, and experts are sharded and split evenly."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.groups.experts import ExpertSettings
from megatune.config.rules.problem import Context, Problem, divisors, nearest

# What asks for something that only experts can do; the others say how it would be done.
_ASKING = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_shared_expert_overlap",
    "moe_router_bias_update_rate",
    "moe_router_topk",
)


def dense_model(context: Context) -> Iterator[Problem]:
    """A dense model has no experts to shard, to balance or to bound. How they would be computed may be said."""
    architecture, parallel, experts = context.architecture, context.settings.parallel, context.settings.experts
    if architecture is None or architecture.moe is not None:
        return
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    asked = [name for name in sizes if (getattr(parallel, name) or 1) > 1]
    asked += [name for name in _ASKING if getattr(experts, name)]
    if context.settings.recompute.moe_layer_recompute:
        asked.append("moe_layer_recompute")
    why = f"a {architecture.model_type} has no experts"
    for name in asked:
        yield Problem((name,), f"{name} with a dense model", why, f"remove {name}")


def sharding(context: Context) -> Iterator[Problem]:
    """Every expert-parallel process holds the same number of experts, and every slice of one is as large."""
    architecture, parallel = context.architecture, context.settings.parallel
    if architecture is None or architecture.moe is None:
        return
    moe, ep, etp = architecture.moe, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if moe.num_experts % ep:
        what = f"expert_model_parallel_size {ep} does not divide the model's {moe.num_experts} experts"
        fix = f"write expert_model_parallel_size: {nearest(ep, divisors(moe.num_experts))}, the nearest that does"
        yield Problem(("expert_model_parallel_size",), what, "each process holds the same number of experts", fix)
    channels = moe.moe_ffn_hidden_size
    if channels % etp:
        implied = "" if parallel.expert_tensor_parallel_size else " (tensor_model_parallel_size, as it is not set)"
        what = f"expert_tensor_parallel_size {etp}{implied} does not divide an expert's {channels} channels"
        why = "each process takes an equal, whole share of every expert"
        fix = f"write expert_tensor_parallel_size: {nearest(etp, divisors(channels))}"
        yield Problem(("expert_tensor_parallel_size", "tensor_model_parallel_size"), what, why, fix)
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        what = "tensor_model_parallel_size above 1 without sequence_parallel"
        why = "without it every tensor-parallel process would send all tokens to the experts"
        yield Problem(("sequence_parallel", "tensor_model_parallel_size"), what, why, "write sequence_parallel: true")


def routing(context: Context) -> Iterator[Problem]:
    """How a model routes is part of the model."""
    architecture, experts = context.architecture, context.settings.experts
    if architecture is None or architecture.moe is None:
        return
    for name, value in (
        ("moe_router_topk", architecture.moe.router_topk),
        ("moe_router_pre_softmax", architecture.moe.pre_softmax),
    ):
        asked = getattr(experts, name)
        if asked is not None and asked != value:
            said = str(value).lower() if isinstance(value, bool) else value
            what = f"{name} {str(asked).lower()}, and the model's is {said}"
            why = "the checkpoint that comes out would be run with what its config.json says"
            yield Problem((name,), what, why, f"remove {name}, or change config.json")
    if experts.moe_router_bias_update_rate and not architecture.moe.expert_bias:
        what = "moe_router_bias_update_rate with a model that has no bias on its experts"
        why = f"a {architecture.model_type} balances by a loss: moe_aux_loss_coeff"
        yield Problem(("moe_router_bias_update_rate",), what, why, "remove moe_router_bias_update_rate")
    elif experts.moe_router_bias_update_rate and context.settings.finetuning.finetuning_type == "lora":
        rate = f"moe_router_bias_update_rate {experts.moe_router_bias_update_rate:g} with finetuning_type: lora"
        why = "the bias is the base's, which stays as it is"
        fix = "remove moe_router_bias_update_rate"
        yield Problem(("moe_router_bias_update_rate", "finetuning_type"), rate, why, fix)
    if experts.moe_router_load_balancing_type == "sinkhorn" and architecture.moe.score_function != "softmax":
        what = f"moe_router_load_balancing_type sinkhorn with a {architecture.model_type}"
        why = "sinkhorn balances the softmax of the router's logits; this model takes their sigmoid"
        fix = "write moe_router_load_balancing_type: seq_aux_loss"
        yield Problem(("moe_router_load_balancing_type",), what, why, fix)


def balancing(context: Context) -> Iterator[Problem]:
    """What belongs to one way of balancing is not set with another."""
    experts: ExpertSettings = context.settings.experts
    kind = experts.moe_router_load_balancing_type
    if experts.moe_aux_loss_coeff and kind in ("sinkhorn", "none"):
        what = f"moe_aux_loss_coeff {experts.moe_aux_loss_coeff:g} with moe_router_load_balancing_type {kind}"
        why = "there is no auxiliary loss to weigh"
        fix = "write moe_router_load_balancing_type: aux_loss, or moe_aux_loss_coeff: 0"
        yield Problem(("moe_aux_loss_coeff", "moe_router_load_balancing_type"), what, why, fix)
    if experts.moe_pad_expert_input_to_capacity and experts.moe_expert_capacity_factor is None:
        what = "moe_pad_expert_input_to_capacity: true without moe_expert_capacity_factor"
        why = "without it experts have no capacity"
        fix = "write moe_expert_capacity_factor: 1.5, or moe_pad_expert_input_to_capacity: false"
        yield Problem(("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor"), what, why, fix)


def dropping(context: Context) -> Iterator[Problem]:
    """What cannot be combined with bounding the experts, or with choosing one only."""
    experts, architecture = context.settings.experts, context.architecture
    if experts.moe_router_load_balancing_type == "sinkhorn" and experts.moe_expert_capacity_factor is not None:
        what = "moe_expert_capacity_factor with moe_router_load_balancing_type sinkhorn"
        why = "sinkhorn keeps experts equally busy itself"
        fix = "remove moe_expert_capacity_factor"
        yield Problem(("moe_expert_capacity_factor", "moe_router_load_balancing_type"), what, why, fix)
    moe = None if architecture is None else architecture.moe
    if moe is not None and moe.router_topk == 1 and moe.score_function == "softmax" and not moe.pre_softmax:
        what = "the model sends each token to one expert and normalizes its share, which is then always 1"
        fix = "train a checkpoint with num_experts_per_tok above 1, or with norm_topk_prob: false"
        yield Problem(("model_name_or_path",), what, "its router would never learn", fix)


def shared_experts(context: Context) -> Iterator[Problem]:
    """Shared experts overlap with the exchange of the alltoall dispatcher only, where there are some."""
    experts, architecture = context.settings.experts, context.architecture
    if not experts.moe_shared_expert_overlap:
        return
    path = "moe_shared_expert_overlap"
    if experts.moe_token_dispatcher_type == "allgather":
        what = "moe_shared_expert_overlap: true with moe_token_dispatcher_type allgather"
        fix = "write moe_token_dispatcher_type: alltoall, or moe_shared_expert_overlap: false"
        yield Problem((path, "moe_token_dispatcher_type"), what, "allgather has no exchange to compute beside", fix)
    moe = None if architecture is None else architecture.moe
    if architecture is not None and moe is not None and not moe.shared_expert_intermediate_size:
        what = "moe_shared_expert_overlap: true with a model without shared experts"
        yield Problem((path,), what, f"a {architecture.model_type} has none", "remove moe_shared_expert_overlap")


RULES = (dense_model, sharding, routing, balancing, dropping, shared_experts)
