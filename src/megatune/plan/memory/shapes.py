"""What of a case decides about activations: the key of everything that is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatune.architecture import Architecture
from megatune.plan.case import Case

# Generations whose cuDNN attention torch takes before its own flash attention; see engine.device.sdpa_kernels.
_CUDNN_FIRST = ("hopper", "blackwell")
# Generations before torch's flash attention (compute capability 8.0).
_WITHOUT_FLASH = ("volta", "turing")
_FLASH_CHANNELS = 256

Kernel = Literal["one", "padded", "runs", "plain", "math"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Sizes and switches of one rank's forward pass.

    Attributes:
        on_cpu: operators are those that the engine takes without a GPU.
        size: bytes of a number of the model's dtype.
        rows: of a micro-batch inside the model; one, where documents share it.
        length: tokens of a row on this rank, s / cp.
        document: tokens of the longest document.
        kernel: what attends: "one" for torch's choice for whole documents; "padded", where that wants queries, keys and
            values of as many channels; "runs" for the kernel with variable lengths; "plain" for matrix products;
            "math" for torch's own, which keep all scores.
        keeps: linear layers ("linear_qkv", ...) that need their input in the backward pass.
        weights_trained: linear layers' own weights get gradients.
        adapter: rank of the adapters of linear layers in `keeps`; 0 without.
        modules: what selective recomputation computes again.
        gathers_tokens: every expert-parallel rank gets all tokens of all of them.
        overlaps: shared experts compute while tokens travel.
        imbalance: rows of the fullest rank's experts over an even share.
    """

    architecture: Architecture
    on_cpu: bool
    size: int
    rows: int
    length: int
    document: int
    kernel: Kernel
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    cp_comm_type: str
    norm_fusion: bool
    activation_fusion: bool
    loss_fusion: bool
    gradient_fusion: bool
    wide_gradients: bool
    keeps: frozenset[str]
    weights_trained: bool
    adapter: int
    modules: frozenset[str]
    gathers_tokens: bool
    capacity_factor: float | None
    pads: bool
    overlaps: bool
    router_size: int
    imbalance: float

    def __hash__(self) -> int:
        # Quick: it is asked for many times a case. What is left out tells few cases apart.
        return hash((
            self.rows, self.length, self.tp, self.cp, self.ep, self.etp, self.sequence_parallel, self.kernel,
            self.modules, self.imbalance, self.keeps, self.architecture.num_layers, self.architecture.hidden_size,
        ))  # fmt: skip

    @property
    def tokens(self) -> int:
        """T: of a micro-batch on this rank."""
        return self.rows * self.length

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


LINEARS = frozenset({"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"})


def shapes_of(case: Case) -> Shapes:
    """The numbers of a case."""
    settings, architecture = case.settings, case.model.architecture
    parallel, performance, experts = settings.parallel, settings.performance, settings.experts
    trainable, generation = case.settings.finetuning, case.machine.device.generation
    packed = settings.packing
    cp = parallel.context_parallel_size
    rows, length = case.micro_batch_size, case.sequence_length
    size = case.itemsize
    lora = trainable.finetuning_type == "lora"
    trains_weights = not lora and not trainable.freeze_language_model
    keeps = LINEARS if trains_weights else frozenset(trainable.lora_layers) if lora else frozenset()
    moe = architecture.moe
    router = experts.moe_router_dtype or (moe.router_dtype if moe else None)
    return Shapes(
        architecture=architecture,
        on_cpu=generation == "cpu",
        size=size,
        rows=1 if packed else rows,
        length=(rows * length if packed else length) // cp,
        document=min(round(case.document_length or length), length) if packed else length,
        kernel=_kernel(case, size),
        tp=parallel.tensor_model_parallel_size,
        cp=cp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        cp_comm_type=parallel.cp_comm_type,
        norm_fusion=performance.rms_norm_fusion,
        activation_fusion=performance.bias_activation_fusion,
        loss_fusion=performance.cross_entropy_loss_fusion,
        gradient_fusion=performance.gradient_accumulation_fusion,
        wide_gradients=settings.precision.accumulate_allreduce_grads_in_fp32,
        keeps=keeps,
        weights_trained=trains_weights,
        adapter=trainable.lora_rank if lora else 0,
        modules=frozenset(settings.recompute.selective_modules),
        gathers_tokens=experts.moe_token_dispatcher_type == "allgather",
        capacity_factor=experts.moe_expert_capacity_factor,
        pads=experts.moe_pad_expert_input_to_capacity,
        overlaps=experts.moe_shared_expert_overlap,
        router_size={"fp32": 4, "fp64": 8}[router] if router else size,
        imbalance=1.0,
    )


def _kernel(case: Case, size: int) -> Kernel:
    """As engine.layers.attention chooses, by the device's generation."""
    settings, mla = case.settings, case.model.architecture.mla
    backend, generation = settings.performance.attention_backend, case.machine.device.generation
    queries = case.model.architecture.kv_channels if mla is None else mla.qk_head_dim + mla.qk_pos_emb_head_dim
    values = queries if mla is None else mla.v_head_dim
    on_cpu = generation == "cpu"
    flash = on_cpu or (size == 2 and max(queries, values) <= _FLASH_CHANNELS and generation not in _WITHOUT_FLASH)
    parallel = settings.parallel
    across = parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a"
    if backend in ("unfused", "local") or ((settings.packing or across) and not flash):
        return "plain"
    if settings.packing or across:
        return "runs"
    if not flash and case.model.architecture.num_query_groups != case.model.architecture.num_attention_heads:
        # What is left are kernels that take no groups of queries.
        return "math"
    flash_first = on_cpu or backend == "flash" or (backend == "auto" and generation not in _CUDNN_FIRST)
    return "padded" if flash_first and queries != values else "one"
