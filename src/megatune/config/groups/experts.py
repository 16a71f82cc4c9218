"""How a mixture of experts is trained; a dense model has no use for any of it."""

from __future__ import annotations

from typing import Literal

from megatune.config.setting import Group, setting


class ExpertSettings(Group):
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq"] = setting(
        "alltoall",
        advice="How tokens reach their experts. alltoall sends each token to its experts' processes only; allgather "
        "collects all tokens everywhere, simpler and faster for few processes or many experts a token. alltoall_seq is "
        "the older name of what alltoall does.",
    )
    moe_grouped_gemm: bool = setting(
        True,
        advice="Compute all local experts in one grouped matrix multiplication instead of one after the other. Several "
        "times faster on GPUs.",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"] = setting(
        "aux_loss",
        advice="How experts are kept equally busy: an auxiliary loss over a micro-batch (aux_loss) or over each "
        "document (seq_aux_loss), weighted by moe_aux_loss_coeff; sinkhorn balances the choice itself; none does "
        "nothing.",
    )
    moe_aux_loss_coeff: float = setting(
        0.0,
        ge=0,
        advice="Weight of the load-balancing loss. 0 trains on the language-model loss alone, as Transformers does by "
        "default; 1e-3 keeps experts busy in long runs.",
    )
    moe_z_loss_coeff: float | None = setting(
        None,
        ge=0,
        advice="Weight of the router z-loss, which keeps the router's logits small. 1e-3 is usual; null is off.",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None,
        advice="The dtype that the router computes in. null takes what Transformers takes for the family; fp32 is "
        "steadier with many experts in 16 bits.",
    )
    moe_router_topk: int | None = setting(
        None, unit="experts", ge=1, advice="Experts of each token. null is right: config.json says it."
    )
    moe_router_pre_softmax: bool | None = setting(
        None, advice="Softmax over all experts before the best are chosen. null is right: config.json says it."
    )
    moe_router_bias_update_rate: float = setting(
        0.0,
        ge=0,
        advice="For models that balance by a bias on each expert (DeepSeek-V3): how far the bias moves in a step. 0 "
        "leaves it as it was pre-trained, as Transformers does; 1e-3 was used in pre-training.",
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        gt=0,
        advice="Experts take at most this times their equal share of tokens; the others are dropped. Bounds memory, "
        "and changes the numbers. null drops nothing.",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False, advice="With moe_expert_capacity_factor: pad every expert's tokens to its capacity, for fixed shapes."
    )
    moe_shared_expert_overlap: bool = setting(
        False,
        advice="Compute shared experts while tokens travel to the others. Needs shared experts and the alltoall "
        "dispatcher; helps on GPUs with expert parallelism.",
    )
