"""Sizes and switches of one rank's passes: what of a case decides about its operators, and the key of all caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatune.architecture import Architecture
from megatune.config.attention_kernel import CPU, PLAIN_BACKENDS, attends_in_runs, attention_kernels
from megatune.plan.case import Case
from megatune.plan.routing import expert_imbalance

# Compute capability by generation; that of Ampere for any other GPU.
_CAPABILITIES = {"cpu": CPU, "volta": (7, 0), "turing": (7, 5), "hopper": (9, 0), "blackwell": (10, 0)}
_AMPERE = (8, 0)
_LINEARS = frozenset({"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"})

Kernel = Literal["one", "padded", "runs", "plain", "math"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """One rank's share of a micro-batch.

    Attributes:
        on_cpu: operators are those that the engine has without a GPU.
        size: bytes of a number of the model's dtype.
        gradient_size: bytes of an element of the buffers that gradients are accumulated in.
        rows: of a micro-batch inside the model; one where documents share it.
        length: tokens of a row on this rank, s / cp.
        document: tokens of a document, in the mean weighted by tokens.
        packing: a row holds several documents.
        in_runs: attention kernels are those with variable lengths.
        kernel: the attention kernel, as far as memory differs: "one" for torch's choice for whole documents;
            "padded" where that wants queries, keys and values of as many channels; "runs" with variable lengths;
            "plain" matrix products; "math" for torch's own, which keep all scores.
        unfused: attention_backend asks for plain matrix products.
        keeps: linear layers ("linear_qkv", ...) that need their input in the backward pass.
        weights_trained: linear layers' own weights get gradients.
        adapter: rank of the adapters of linear layers in `keeps`; 0 without.
        gathers_tokens: every expert-parallel rank gets all tokens of all of them.
        overlaps: shared experts compute while tokens are dispatched.
        imbalance: rows of the fullest rank's experts over an even share.
    """

    architecture: Architecture
    on_cpu: bool
    size: int
    gradient_size: int
    rows: int
    length: int
    document: float
    packing: bool
    in_runs: bool
    kernel: Kernel
    unfused: bool
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    cp_comm_type: str
    norm_fusion: bool
    rope_fusion: bool
    activation_fusion: bool
    loss_fusion: bool
    gradient_fusion: bool
    keeps: frozenset[str]
    weights_trained: bool
    adapter: int
    grouped_experts: bool
    gathers_tokens: bool
    capacity_factor: float | None
    pads: bool
    overlaps: bool
    router_size: int
    imbalance: float

    def __hash__(self) -> int:
        # Quick: every case needs it many times. What is left out differs between few cases.
        return hash((
            self.rows, self.length, self.tp, self.cp, self.ep, self.etp, self.sequence_parallel, self.kernel,
            self.imbalance, self.keeps, self.architecture.num_layers, self.architecture.hidden_size,
        ))  # fmt: skip

    @property
    def tokens(self) -> int:
        """T: of a micro-batch on this rank."""
        return self.rows * self.length

    @property
    def document_tokens(self) -> int:
        """Whole tokens of a document; of a row where it is not packed."""
        return round(self.document) if self.packing else self.length * self.cp

    @property
    def part(self) -> int:
        """P: those of them that this rank normalizes: T / tp with sequence parallelism."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of this rank's hidden states, P · h."""
        return self.part * self.architecture.hidden_size * self.size

    @property
    def whole_hidden(self) -> int:
        """Bytes of hidden states where linear layers take them, T · h."""
        return self.tokens * self.architecture.hidden_size * self.size

    @property
    def wide(self) -> int:
        """Bytes of a number's fp32 copy; 0 where the number itself is fp32."""
        return 0 if self.size == 4 else 4


def shapes_of(case: Case) -> Shapes:
    """Read the sizes and switches of a case."""
    settings, architecture = case.settings, case.model.architecture
    parallel, performance, experts = settings.parallel, settings.performance, settings.experts
    trainable = case.settings.finetuning
    cp, size, moe = parallel.context_parallel_size, case.itemsize, architecture.moe
    rows, length = case.micro_batch_size, case.sequence_length
    lora = trainable.finetuning_type == "lora"
    trains_weights = not lora and not trainable.freeze_language_model
    router = experts.moe_router_dtype or (moe.router_dtype if moe else None)
    return Shapes(
        architecture=architecture,
        on_cpu=case.machine.device.generation == "cpu",
        size=size,
        gradient_size=case.gradient_itemsize,
        rows=1 if settings.packing else rows,
        length=(rows * length if settings.packing else length) // cp,
        document=min(case.document_length or length, length),
        packing=settings.packing,
        in_runs=attends_in_runs(settings),
        kernel=_kernel(case),
        unfused=performance.attention_backend in PLAIN_BACKENDS,
        tp=parallel.tensor_model_parallel_size,
        cp=cp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        cp_comm_type=parallel.cp_comm_type,
        norm_fusion=performance.rms_norm_fusion,
        rope_fusion=performance.apply_rope_fusion,
        activation_fusion=performance.bias_activation_fusion,
        loss_fusion=performance.cross_entropy_loss_fusion,
        gradient_fusion=performance.gradient_accumulation_fusion,
        keeps=_LINEARS if trains_weights else frozenset(trainable.lora_target) if lora else frozenset(),
        weights_trained=trains_weights,
        adapter=trainable.lora_rank if lora else 0,
        grouped_experts=experts.moe_grouped_gemm,
        gathers_tokens=experts.moe_token_dispatcher_type == "allgather",
        capacity_factor=experts.moe_expert_capacity_factor,
        pads=experts.moe_pad_expert_input_to_capacity,
        overlaps=experts.moe_shared_expert_overlap,
        router_size={"fp32": 4, "fp64": 8}[router] if router else size,
        imbalance=expert_imbalance(settings, moe) if moe else 1.0,
    )


def _kernel(case: Case) -> Kernel:
    """Return the engine's choice of attention kernel, as far as memory differs."""
    settings, architecture = case.settings, case.model.architecture
    mla = architecture.mla
    queries = architecture.kv_channels if mla is None else mla.qk_head_dim + mla.qk_pos_emb_head_dim
    values = queries if mla is None else mla.v_head_dim
    best, *_ = attention_kernels(
        _CAPABILITIES.get(case.machine.device.generation, _AMPERE),
        settings.performance.attention_backend,
        settings.precision.params_dtype,
        max(queries, values),
        in_runs=attends_in_runs(settings),
        grouped=architecture.num_query_groups != architecture.num_attention_heads,
    )
    match best:
        case "plain" | "math":
            return best
        case "varlen":
            return "runs"
        case "flash" if queries != values:
            return "padded"
    return "one"
