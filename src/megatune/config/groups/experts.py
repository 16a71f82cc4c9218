"""How a mixture of experts is trained; a dense model has no use for any of it."""

from __future__ import annotations

from typing import Annotated, Literal

from megatune.config.setting import Count, Group, NonNegative, Positive, setting


class ExpertSettings(Group):
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq"] = setting(
        "alltoall",
        advice="How tokens reach their experts.",
        how="Both give the same numbers. They differ in what is sent: with many experts a token, most processes need "
        "most tokens anyway.",
        when="alltoall, unless few processes share the experts.",
        values={
            "alltoall": "sends each token to the processes of its experts only",
            "allgather": "collects all tokens everywhere; faster for few processes or many experts a token",
            "alltoall_seq": "the older name of what alltoall does",
        },
    )
    moe_grouped_gemm: bool = setting(
        True,
        advice="Compute all local experts in one grouped matrix multiplication instead of one after the other.",
        how="Tokens are sorted by expert and multiplied by all experts' weights in one call.",
        when="Leave it on: it is several times faster on GPUs.",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"] = setting(
        "aux_loss",
        advice="How experts are kept equally busy.",
        how="An auxiliary loss, weighted by moe_aux_loss_coeff, pulls the router towards experts that get less than "
        "their share; sinkhorn balances the choice itself while training.",
        when="aux_loss is usual, with a coefficient above 0; seq_aux_loss where each document should be balanced.",
        values={
            "aux_loss": "an auxiliary loss over a micro-batch",
            "seq_aux_loss": "an auxiliary loss over each document",
            "sinkhorn": "balances the choice itself, without a loss",
            "none": "does nothing",
        },
    )
    moe_aux_loss_coeff: NonNegative = setting(
        0.0,
        advice="Weight of the load-balancing loss. 0 trains on the language-model loss alone, as Transformers does "
        "by default.",
        how="The log shows the loss without the weight: 1 where experts are equally busy.",
        when="1e-3 keeps experts busy in long runs. A short fine-tuning needs none.",
    )
    moe_z_loss_coeff: NonNegative | None = setting(
        None,
        advice="Weight of the router z-loss, which keeps the router's logits small; null is off.",
        how="It is the mean square of the log-sum-exp of the router's logits.",
        when="1e-3 is usual where the router's logits grow without bound in 16 bits.",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None,
        advice="The dtype that the router computes in. null takes what Transformers takes for the family.",
        how="Only the small product that makes the router's logits is concerned.",
        when="fp32 is steadier with many experts in 16 bits, where near ties would fall by rounding.",
        values={"fp32": "computes the router's logits in float32", "fp64": "computes the router's logits in float64"},
    )
    moe_router_topk: Annotated[Count, "experts"] | None = setting(
        None,
        advice="Experts of each token. null is right: config.json says it.",
        how="Another number than the model's is refused: the checkpoint that comes out would be run with "
        "config.json's.",
        when="Never; change config.json instead.",
    )
    moe_router_pre_softmax: bool | None = setting(
        None,
        advice="Softmax over all experts before the best are chosen. null is right: config.json says it.",
        how="Another value than the model's is refused: the checkpoint that comes out would be run with config.json's.",
        when="Never; change config.json instead.",
    )
    moe_router_bias_update_rate: NonNegative = setting(
        0.0,
        advice="For models that balance by a bias on each expert (DeepSeek-V3): how far the bias moves in a step.",
        how="The bias of experts that got less than their share goes up by this, that of the others down. It takes "
        "part in choosing experts, not in weighing them.",
        when="0 leaves the bias as it was pre-trained, as Transformers does; 1e-3 was used in pre-training.",
    )
    moe_expert_capacity_factor: Positive | None = setting(
        None,
        advice="Experts take at most this times their equal share of tokens; the others are dropped. null drops "
        "nothing.",
        how="Each process keeps the choices with the greatest shares, for each expert. It bounds memory and time of "
        "the fullest expert, and changes the numbers.",
        when="Where imbalance runs out of memory: 1.5 drops little. Transformers drops nothing, so prefer balancing.",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False,
        advice="With moe_expert_capacity_factor: pad every expert's tokens to its capacity, for fixed shapes.",
        how="Every expert then computes the same number of rows, some of them zeros.",
        when="Seldom: where shapes that change from step to step fragment a GPU's memory.",
    )
    moe_shared_expert_overlap: bool = setting(
        False,
        advice="Compute shared experts while tokens are dispatched to the others.",
        how="Shared experts see every token, so they need no exchange; they run beside it. Needs shared experts and "
        "the alltoall dispatcher.",
        when="Turn it on on GPUs with expert parallelism.",
    )
