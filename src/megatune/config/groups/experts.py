"""How a mixture of experts is trained; a dense model has no use for any of it."""

from __future__ import annotations

from typing import Annotated, Literal

from megatune.config.setting import EXPERTS, Group, Needs, NonNegative, Positive

_BALANCING, _BY_LOSS = "experts.moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss")
_EXPERTS = Needs(EXPERTS, why="the model has none", off=(0.0,))
_WEIGHED = Needs("experts.moe_aux_loss_coeff", of=_BY_LOSS)
_BALANCED = Needs(_BALANCING, _BY_LOSS, "there is no auxiliary loss to weigh", off=(0.0,))
_TRAINED_BASE = Needs(
    "finetuning.finetuning_type", ("full", "freeze"), "the bias is the base's, which stays as it is", "remove `{name}`"
)
_NO_SINKHORN = Needs(_BALANCING, (*_BY_LOSS, "none"), "sinkhorn keeps experts equally busy itself", "remove `{name}`")
_CAPACITY = Needs(
    "experts.moe_expert_capacity_factor",
    why="without it experts have no capacity",
    fix="write `moe_expert_capacity_factor: 1.5`, or remove `{name}`",
)
_EXCHANGE = Needs(
    "experts.moe_token_dispatcher_type", ("alltoall", "alltoall_seq"), "allgather has no communication to overlap with"
)


class ExpertSettings(Group):
    needed_by_all = (Needs(EXPERTS),)

    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq"] = "alltoall"
    """How tokens reach their experts.
    How: Both give the same numbers. They differ in what is sent: with many experts a token, most processes need most
    tokens anyway.
    When: alltoall, unless few processes share the experts.
    - alltoall: sends each token to the processes of its experts only
    - allgather: collects all tokens everywhere; faster for few processes or many experts a token
    - alltoall_seq: the older name of what alltoall does"""
    moe_grouped_gemm: bool = True
    """Compute all local experts in one grouped matrix multiplication instead of one after the other.
    How: Tokens are sorted by expert and multiplied by all experts' weights in one call.
    When: Leave it on: it is several times faster on GPUs."""
    moe_router_load_balancing_type: Annotated[Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"], _WEIGHED] = (
        "aux_loss"
    )
    """How experts are kept equally busy.
    How: An auxiliary loss, weighted by moe_aux_loss_coeff, pulls the router towards experts that get less than their
    share; sinkhorn balances the choice itself while training.
    When: aux_loss is usual, with a coefficient above 0; seq_aux_loss where each document should be balanced.
    - aux_loss: an auxiliary loss over a micro-batch
    - seq_aux_loss: an auxiliary loss over each document
    - sinkhorn: balances the choice itself, without a loss
    - none: does nothing"""
    moe_aux_loss_coeff: Annotated[NonNegative, _EXPERTS, _BALANCED] | None = None
    """Weight of the load-balancing loss. null takes router_aux_loss_coef of the model's config.json.
    How: The loss is summed over layers; the log shows its mean without the weight: 1 where experts are equally busy.
    LLaMA-Factory's moe_aux_loss_coef weighs Transformers' loss, which pools layers: it is multiplied by the experts of
    a token, and divided by the sparse layers.
    When: 1e-3 keeps experts busy in long runs. 0 trains on the language-model loss alone, as Transformers does by
    default, which is enough for a short fine-tuning."""
    moe_z_loss_coeff: Annotated[NonNegative, _EXPERTS] | None = None
    """Weight of the router z-loss, which keeps the router's logits small; null is off.
    How: It is the mean square of the log-sum-exp of the router's logits.
    When: 1e-3 is usual where the router's logits grow without bound in 16 bits."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """The dtype that the router computes in. null takes what Transformers takes for the family.
    How: Only the small product that makes the router's logits is concerned.
    When: fp32 is steadier with many experts in 16 bits, where near ties would fall by rounding.
    - fp32: computes the router's logits in float32
    - fp64: computes the router's logits in float64"""
    moe_router_bias_update_rate: Annotated[NonNegative, _EXPERTS, _TRAINED_BASE] = 0.0
    """For models that balance by a bias on each expert (DeepSeek-V3): how far the bias moves in a step.
    How: The bias of experts that got less than their share goes up by this, that of the others down. It takes part in
    choosing experts, not in weighing them.
    When: 0 leaves the bias as it was pre-trained, as Transformers does; 1e-3 was used in pre-training."""
    moe_expert_capacity_factor: Annotated[Positive, _EXPERTS, _NO_SINKHORN] | None = None
    """Experts take at most this times their equal share of tokens; the others are dropped. null drops nothing.
    How: Each process keeps the choices with the greatest shares, for each expert. It bounds memory and time of the
    fullest expert, and changes the numbers.
    When: Where imbalance runs out of memory: 1.5 drops little. Transformers drops nothing, so prefer balancing."""
    moe_pad_expert_input_to_capacity: Annotated[bool, _CAPACITY] = False
    """With moe_expert_capacity_factor: pad every expert's tokens to its capacity, for fixed shapes.
    How: Every expert then computes the same number of rows, some of them zeros.
    When: Seldom: where shapes that change from step to step fragment a GPU's memory."""
    moe_shared_expert_overlap: Annotated[bool, _EXPERTS, _EXCHANGE] = False
    """Compute shared experts while tokens are dispatched to the others.
    How: Shared experts see every token, so they need no exchange; they run beside it. Needs shared experts and the
    alltoall dispatcher.
    When: Turn it on on GPUs with expert parallelism."""
