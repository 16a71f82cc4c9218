"""What one rank computes of a layer, as numbers: the key under which a layer's seconds are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.groups.experts import ExpertSettings
from megatune.config.settings import Settings
from megatune.plan.case import Case
from megatune.plan.time.efficiency import Rates, rates_of

PLAIN_BACKENDS = ("unfused", "local")

# Coefficients of variation of the experts' tokens, with and without something that balances them: assumptions.
# Published runs of Qwen3-30B-A3B over 16 expert-parallel ranks take 1.5 times as long as with forced balance; 0.5 gives
# 1.42 for the fullest rank.
BALANCED_VARIATION, FREE_VARIATION = 0.2, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One rank's share of a micro-batch in one layer.

    Attributes:
        tokens: of the rank's part of the rows, in attention: mbs · s / cp.
        outer_tokens: where sequence parallelism splits them once more.
        document: tokens that a document has, in the mean weighted by tokens.
        packed: rows hold several documents, or parts of one: the kernels are those with variable lengths.
        tp: ranks that share each matrix.
        ep, etp: ranks that share the experts, and each expert.
        itemsize: bytes of an activation.
        gradient_itemsize: bytes of an element of the buffers that gradients are added up in.
        fused_*: the settings of these fusions.
        trained: the decoder's weights have gradients.
        lora_rank: of adapters; 0 without. lora_target: the matrices that have them.
        variation: of the tokens of experts, over their mean. capacity: what bounds them, over their mean.
    """

    architecture: Architecture
    rates: Rates
    tokens: float
    outer_tokens: float
    document: float
    packed: bool
    plain_attention: bool
    tp: int
    ep: int
    etp: int
    itemsize: int
    gradient_itemsize: int
    fused_activation: bool
    fused_rope: bool
    fused_norm: bool
    fused_loss: bool
    fused_accumulation: bool
    grouped_experts: bool
    trained: bool
    lora_rank: int
    lora_target: tuple[str, ...]
    variation: float
    capacity: float | None


def work_of(case: Case) -> Work:
    """The work of every layer of this case."""
    settings, trainable = case.settings, case.trainable
    parallel, performance, precision = settings.parallel, settings.performance, settings.precision
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = case.micro_batch_size * case.sequence_length / cp
    itemsize = 4 if precision.params_dtype == "float32" else 2
    lora = trainable.kind == "lora"
    return Work(
        architecture=case.model.architecture,
        rates=rates_of(case.machine, precision.params_dtype),
        tokens=tokens,
        outer_tokens=tokens / tp if parallel.sequence_parallel else tokens,
        document=min(case.document_length or case.sequence_length, case.sequence_length),
        packed=settings.packing or cp > 1,
        plain_attention=performance.attention_backend in PLAIN_BACKENDS,
        tp=tp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        itemsize=itemsize,
        gradient_itemsize=gradient_itemsize(settings),
        fused_activation=performance.bias_activation_fusion,
        fused_rope=performance.apply_rope_fusion,
        fused_norm=performance.rms_norm_fusion,
        fused_loss=performance.cross_entropy_loss_fusion,
        fused_accumulation=performance.gradient_accumulation_fusion,
        grouped_experts=settings.experts.moe_grouped_gemm,
        trained=not lora and not trainable.freeze_language_model,
        lora_rank=trainable.lora_rank if lora else 0,
        lora_target=trainable.lora_target if lora else (),
        variation=_variation(settings.experts),
        capacity=settings.experts.moe_expert_capacity_factor,
    )


def gradient_itemsize(settings: Settings) -> int:
    """Bytes of an element of the buffers that gradients are added up and exchanged in."""
    precision = settings.precision
    return 4 if precision.params_dtype == "float32" or precision.accumulate_allreduce_grads_in_fp32 else 2


def _variation(experts: ExpertSettings) -> float:
    balanced = (
        experts.moe_aux_loss_coeff
        or experts.moe_router_bias_update_rate
        or experts.moe_router_load_balancing_type == "sinkhorn"
    )
    return BALANCED_VARIATION if balanced else FREE_VARIATION


def expert_imbalance(work: Work, moe: MixtureOfExperts) -> float:
    """Tokens of the fullest expert-parallel rank over those of an even share.

    Each of ep ranks sums E / ep experts; the largest of ep normal variables lies about √(2 · ln ep) deviations up.
    """
    if work.ep == 1:
        return 1.0
    spread = work.variation / math.sqrt(moe.num_experts / work.ep)
    factor = 1 + spread * math.sqrt(2 * math.log(work.ep))
    return min(factor, work.capacity) if work.capacity else factor
