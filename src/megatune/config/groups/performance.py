"""What trades memory for time, and which kernels compute. None of it changes what is learned."""

from __future__ import annotations

from typing import Literal

from megatune.config.setting import Group, setting


class RecomputeSettings(Group):
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None,
        advice="Compute activations again in the backward pass instead of keeping them. full keeps only the inputs of "
        "layers: the least memory, about a third more time. selective does it for recompute_modules only: cheap.",
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None,
        advice="With full: uniform recomputes all layers, in groups of recompute_num_layers; block only the first "
        "recompute_num_layers of each stage. null takes uniform.",
    )
    recompute_num_layers: int | None = setting(
        None,
        unit="layers",
        ge=1,
        advice="With full: layers of one recomputed group (uniform) or recomputed layers of each stage (block). null "
        "takes 1 with uniform, and all with block.",
    )
    recompute_modules: list[
        Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"]
    ] = setting(
        ["core_attn"],
        advice="With selective: what is recomputed. core_attn costs least; mlp and moe save most; layernorm and "
        "moe_act recompute what is cheap; mla_up_proj and shared_experts are of the models that have them.",
    )
    moe_layer_recompute: bool = setting(
        False, advice="Recompute whole expert layers in the backward pass: selective with the module moe."
    )


class PerformanceSettings(Group):
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = setting(
        "auto",
        advice="Which kernel attends: flash, fused (cuDNN), or unfused and local, which are plain matrix products with "
        "all scores in memory. auto takes the fastest that the device and the shapes allow; the banner says which.",
    )
    bias_activation_fusion: bool = setting(
        False, advice="Compute the feed-forward's activation in one pass over memory where that is possible."
    )
    apply_rope_fusion: bool = setting(
        False, advice="Compute rotary embeddings in one pass over memory where that is possible."
    )
    cross_entropy_loss_fusion: bool = setting(
        True,
        advice="Compute the output layer and the loss together, a chunk of tokens at a time, so that the logits of all "
        "tokens are never in memory. false computes all logits first.",
    )
    rms_norm_fusion: bool = setting(
        True,
        advice="Normalize in one pass over memory each way, keeping one number a token for the backward pass. false "
        "computes it operator by operator.",
    )
    gradient_accumulation_fusion: bool = setting(
        False,
        advice="Add weight gradients straight into the fp32 gradients, without a copy in between. Saves a pass over "
        "memory for each weight on GPUs.",
    )
    manual_gc: bool = setting(
        False,
        advice="Collect Python's garbage at the same steps on all processes, instead of whenever each one likes, so "
        "that they do not wait for each other.",
    )
    manual_gc_interval: int = setting(50, unit="steps", ge=1, advice="With manual_gc: collect every so many steps.")
