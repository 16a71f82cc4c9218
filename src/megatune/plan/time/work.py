"""What one rank computes of a layer, as numbers: the key under which a layer's seconds are kept."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.architecture import Architecture
from megatune.plan.case import Case
from megatune.plan.routing import expert_imbalance
from megatune.plan.time.efficiency import Rates, rates_of

PLAIN_BACKENDS = ("unfused", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One rank's share of a micro-batch in one layer.

    Attributes:
        tokens: of the rank's part of the rows, in attention: mbs · s / cp.
        outer_tokens: where sequence parallelism splits them once more.
        document: tokens that a document has, in the mean weighted by tokens.
        packed: rows hold several documents, or parts of one: the kernels are those with variable lengths.
        ring: ranks that pass keys and values around, each attending in as many turns; 1 without.
        tp: ranks that share each matrix.
        ep, etp: ranks that share the experts, and each expert.
        itemsize: bytes of an activation.
        gradient_itemsize: bytes of an element of the buffers that gradients are added up in.
        fused_*: the settings of these fusions.
        trained: the decoder's weights have gradients.
        lora_rank: of adapters; 0 without. lora_target: the matrices that have them.
        imbalance: rows of the fullest expert rank over an even share.
    """

    architecture: Architecture
    rates: Rates
    tokens: float
    outer_tokens: float
    document: float
    packed: bool
    ring: int
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
    imbalance: float


def work_of(case: Case) -> Work:
    """The work of every layer of this case."""
    settings, trainable = case.settings, case.settings.finetuning
    parallel, performance, precision = settings.parallel, settings.performance, settings.precision
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = case.micro_batch_size * case.sequence_length / cp
    lora, moe = trainable.finetuning_type == "lora", case.model.architecture.moe
    return Work(
        architecture=case.model.architecture,
        rates=rates_of(case.machine, precision.params_dtype),
        tokens=tokens,
        outer_tokens=tokens / tp if parallel.sequence_parallel else tokens,
        document=min(case.document_length or case.sequence_length, case.sequence_length),
        # Heads that were exchanged for the sequence (a2a) see whole rows.
        packed=settings.packing or (cp > 1 and parallel.cp_comm_type != "a2a"),
        ring=cp if parallel.cp_comm_type == "p2p" else 1,
        plain_attention=performance.attention_backend in PLAIN_BACKENDS,
        tp=tp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        itemsize=case.itemsize,
        gradient_itemsize=case.gradient_itemsize,
        fused_activation=performance.bias_activation_fusion,
        fused_rope=performance.apply_rope_fusion,
        fused_norm=performance.rms_norm_fusion,
        fused_loss=performance.cross_entropy_loss_fusion,
        fused_accumulation=performance.gradient_accumulation_fusion,
        grouped_experts=settings.experts.moe_grouped_gemm,
        trained=not lora and not trainable.freeze_language_model,
        lora_rank=trainable.lora_rank if lora else 0,
        lora_target=trainable.lora_layers if lora else (),
        imbalance=expert_imbalance(settings, moe) if moe else 1.0,
    )
