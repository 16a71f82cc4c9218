"""Shapes and switches of one rank's passes: everything in a case that its operators depend on, as a cache key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from megatune.architecture import Architecture, LayerKind, MixtureOfExperts
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.kernels import CPU, attention_kernels, needs_varlen
from megatune.config.settings import ExpertSettings, PerformanceSettings, Settings
from megatune.families import FAMILIES
from megatune.families.adapters import adapters
from megatune.families.dense import EMBEDDING, ENGINE_LAYER, GLOBAL_HEADS, OUTPUT_LAYER, output_weight
from megatune.families.quantized import form_of
from megatune.families.trained import ALL_MODULES, is_named, is_trained
from megatune.families.weights import Stack, Weight
from megatune.plan.case import OURS, Case, Engine

# Compute capability by generation; that of Ampere for any other GPU.
_CAPABILITIES = {
    "cpu": CPU,
    "volta": (7, 0),
    "turing": (7, 5),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "blackwell-rtx": (12, 0),
}
_AMPERE = (8, 0)
OUTPUT = OUTPUT_LAYER.engine.removesuffix(".weight")
# Coefficients of variation of the experts' tokens with and without load balancing: assumptions. Published runs of
# Qwen3-30B-A3B on 16 expert-parallel ranks with a balancing loss take 1.08 times as long as with forced balance, and
# Qwen3-235B-A22B on 8 ranks 1.09 (128k tokens) to 1.24 times (16k); 0.2 gives 1.17 and 1.10 for the fullest rank.
BALANCED_VARIATION, FREE_VARIATION = 0.2, 0.5

_OUTSIDE = LayerKind()  # outside of layers
Kernel = Literal["fused", "padded", "varlen", "plain", "math"]


class LinearAdapter(NamedTuple):
    """The adapter of a linear layer in the decoder.

    Attributes:
        name: of the layer, as in `Shapes.keeps`.
        width: of the latent: the sum of the ranks of its matrices that have an adapter.
        masked: B is rearranged in each pass, so that each matrix is multiplied with its part of the latent.
    """

    name: str
    width: int
    masked: bool


@dataclass(
    frozen=True, slots=True, kw_only=True, eq=False
)  # a key of many caches, created once and compared by identity
class Shapes:
    """One rank's share of a micro-batch.

    Attributes:
        on_cpu: operators are those of the engine on a CPU.
        itemsize: bytes of an element in the model's dtype.
        gradient_itemsize: bytes of an element in the gradient buffers.
        rows: of a micro-batch inside the model; one with packed documents.
        length: tokens of a row on this rank, s / cp.
        document: mean tokens of a document, weighted by tokens.
        packing: a row holds several documents.
        varlen: all layers use attention kernels with variable lengths.
        kernel: the attention kernel, by its memory: torch's "fused" ones for whole documents; "padded" if these need
            the same number of channels for queries, keys and values; "varlen" with variable lengths; "plain" matrix
            products; "math" for torch's fallback, which keeps all scores.
        keeps: linear layers that save their input for the backward pass, by the engine's names in a layer
            ("self_attention.linear_qkv", "mlp.experts.weight1"); and "output_layer".
        weights_trained: weights of linear layers have gradients.
        embedding_trained, output_trained: the word embedding and the output layer have gradients.
        adapters: of linear layers in `keeps`.
        decomposed: the adapters are DoRA: they also train the magnitude of rows.
        drops: the adapters have dropout.
        quantized_bits: of an element of the layers' frozen matrices, which are dequantized for each product; 0 if they
            are not quantized.
        fp8: linear layers multiply in fp8.
        router_itemsize: bytes of an element in the router's dtype.
        imbalance: rows of the fullest rank's experts over an even share.
        engine: the engine that computes them.
        kind: the kind of a layer; `architecture` then has the heads of such a layer.
    """

    architecture: Architecture
    on_cpu: bool
    itemsize: int
    gradient_itemsize: int
    rows: int
    length: int
    document: float
    packing: bool
    varlen: bool
    kernel: Kernel
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    cp_comm_type: str
    performance: PerformanceSettings
    experts: ExpertSettings
    keeps: frozenset[str]
    weights_trained: bool
    embedding_trained: bool
    output_trained: bool
    adapters: tuple[LinearAdapter, ...]
    decomposed: bool
    drops: bool
    quantized_bits: int
    fp8: bool
    router_itemsize: int
    imbalance: float
    engine: Engine = OURS
    kind: LayerKind = _OUTSIDE

    def replace(self, **changes: Any) -> Shapes:
        """Return the unique object with other values."""
        return _shapes(**{name: getattr(self, name) for name in self.__slots__} | changes)

    def adapter_of(self, name: str) -> LinearAdapter | None:
        """Return the adapter of a linear layer."""
        return next((one for one in self.adapters if one.name == name), None)

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch on this rank."""
        return self.rows * self.length

    @property
    def document_tokens(self) -> int:
        """Tokens of a document as an integer; of a row if it is not packed."""
        return round(self.document) if self.packing else self.length * self.cp

    @property
    def attended(self) -> float:
        """Tokens of a document without a window in which a query sees as many keys on average: w · (2 - w / d) for a
        window of w and a document of d tokens."""
        window, document = self.kind.window, self.document
        return document if window is None or window >= document else window * (2 - window / document)

    @property
    def sp_tokens(self) -> int:
        """P: tokens that this rank normalizes: T / tp with sequence parallelism, or T."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of this rank's hidden states, P · h."""
        return self.sp_tokens * self.architecture.hidden_size * self.itemsize

    @property
    def whole_hidden(self) -> int:
        """Bytes of hidden states at the input of linear layers, T · h."""
        return self.tokens * self.architecture.hidden_size * self.itemsize

    @property
    def fp32_itemsize(self) -> int:
        """Bytes of an element's fp32 copy; 0 if the model is fp32."""
        return 0 if self.itemsize == 4 else 4


_shapes = lru_cache(maxsize=8192)(Shapes)


@lru_cache(maxsize=4096)
def shapes_of(case: Case) -> Shapes:
    """Return the shapes of a case."""
    settings, architecture = case.settings, case.model.architecture
    parallel, experts, trainable = settings.parallel, settings.experts, settings.finetuning
    cp, size, moe = parallel.context_parallel_size, case.itemsize, architecture.moe
    rows, length = case.micro_batch_size * case.sequences_per_row, case.sequence_length
    trained_linears, lora = _trained_linears(architecture, trainable), _adapters(architecture, trainable)
    embedding, output = _trained_ends(architecture, trainable)
    router = experts.moe_router_dtype or (moe.router_dtype if moe else None)
    return _shapes(
        architecture=architecture,
        on_cpu=case.machine.device.on_cpu,
        itemsize=size,
        gradient_itemsize=case.gradient_itemsize,
        rows=1 if settings.packing else rows,
        length=(rows * length if settings.packing else length) // cp,
        document=case.document,
        packing=settings.packing,
        varlen=needs_varlen(settings),
        kernel=_kernel(case),
        tp=parallel.tensor_model_parallel_size,
        cp=cp,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        cp_comm_type=parallel.cp_comm_type,
        performance=settings.performance,
        experts=experts,
        keeps=trained_linears.union(one.name for one in lora),
        weights_trained=bool(trained_linears),
        embedding_trained=embedding,
        output_trained=output,
        adapters=lora,
        decomposed=trainable.use_dora,
        drops=trainable.lora_dropout > 0,
        quantized_bits=form.bits if (form := form_of(trainable)) is not None else 0,
        fp8=settings.precision.fp8 is not None,
        router_itemsize={"fp32": 4, "fp64": 8}[router] if router else size,
        imbalance=expert_imbalance(settings, moe) if moe else 1.0,
        engine=case.engine,
    )


@lru_cache(maxsize=256)
def _trained_linears(architecture: Architecture, trainable: FinetuningSettings) -> frozenset[str]:
    """Return the names of the linear layers, in a trained decoder layer, whose weights are trained."""
    if trainable.finetuning_type == "lora" or trainable.freeze_language_model:
        return frozenset()
    modules, is_full = trainable.freeze_trainable_modules, trainable.finetuning_type == "full"
    matrices = [weight for weight in _of_layers(architecture) if all(len(one.shape) == 2 for one in weight.hf)]
    inside = (_name(each) for each in matrices if is_full or is_named(each, architecture, modules))
    return frozenset((*inside, *([OUTPUT] if is_full or ALL_MODULES in modules else [])))


@lru_cache(maxsize=256)
def _trained_ends(architecture: Architecture, trainable: FinetuningSettings) -> tuple[bool, bool]:
    """Return whether the word embedding and the output layer are trained."""
    embedding, output = (
        is_trained(weight, 0, architecture, trainable) for weight in (EMBEDDING, output_weight(architecture))
    )
    return embedding, output


@lru_cache(maxsize=256)
def _adapters(architecture: Architecture, trainable: FinetuningSettings) -> tuple[LinearAdapter, ...]:
    """Return the adapters of the decoder's layers."""
    lora = adapters(architecture, trainable)
    return tuple(
        LinearAdapter(_name(weight), sum(int(one.shape[0]) for one in adapter.a.hf), len(weight.hf) > 1)
        for weight in _of_layers(architecture)
        if (adapter := lora.get(weight.engine)) is not None
    )


def _of_layers(architecture: Architecture) -> list[Weight]:
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    return [weight for weight in weights if weight.per_layer and weight.stack is Stack.DECODER]


def _name(weight: Weight) -> str:
    """Return the engine's name of a weight within its layer; the same for both sizes of heads."""
    return weight.engine.removeprefix(f"{ENGINE_LAYER}.").removesuffix(".weight").replace(GLOBAL_HEADS, "")


@lru_cache(maxsize=4096)
def layer_shapes(shapes: Shapes, kind: LayerKind, trained: bool) -> Shapes:
    """Return the shapes of a layer of a kind, trained or frozen."""
    if shapes.kind != kind:
        exchange = shapes.cp_comm_type
        if exchange == "p2p" and kind.window is not None:  # a ring would send keys that no query sees
            exchange = "all_gather"
        architecture = shapes.architecture.of_heads(kind.has_global_heads)
        shapes = shapes.replace(kind=kind, architecture=architecture, cp_comm_type=exchange)
    return shapes if trained else frozen(shapes)


@lru_cache(maxsize=8192)
def without_experts(shapes: Shapes) -> Shapes:
    """Return shapes that do not depend on the sharding of experts: one object for all of them."""
    return shapes.replace(ep=1, etp=1, imbalance=1.0)


@lru_cache(maxsize=4096)
def frozen(shapes: Shapes) -> Shapes:
    """Return the shapes of a frozen layer."""
    return shapes.replace(keeps=frozenset(), weights_trained=False, adapters=())


def _kernel(case: Case) -> Kernel:
    settings, architecture = case.settings, case.model.architecture
    mla = architecture.mla
    queries = max(architecture.kv_channels, architecture.of_heads(True).kv_channels)
    if mla is not None:
        queries = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    values = queries if mla is None else mla.v_head_dim
    best, *_ = attention_kernels(
        _CAPABILITIES.get(case.machine.device.generation, _AMPERE),
        settings.performance.attention_backend,
        settings.precision.params_dtype,
        max(queries, values),
        varlen=needs_varlen(settings),
        grouped=architecture.num_query_groups != architecture.num_attention_heads,
    )
    match best:
        case "plain" | "math":
            return best
        case "flash" if queries != values:
            return "padded"
    return "varlen" if best == "varlen" else "fused"


def expert_imbalance(settings: Settings, moe: MixtureOfExperts) -> float:
    """Return the rows of the fullest expert-parallel rank relative to an even share.

    Each of ep ranks sums E / ep experts, and the largest of ep normal variables is about √(2 · ln ep) standard
    deviations above the mean: 1 + c · √(ep / E) · √(2 · ln ep) with c the variation of one expert. A capacity limits
    it, and replaces it if rows are padded to it. It is that of one layer in a mean step, as time needs it; memory uses
    the same, although the sum over layers varies less, and the worst micro-batch more.
    """
    experts, ep = settings.experts, settings.parallel.expert_model_parallel_size
    capacity = experts.moe_expert_capacity_factor
    if capacity and experts.moe_pad_expert_input_to_capacity:
        return capacity
    variation = BALANCED_VARIATION if is_balanced(settings) else FREE_VARIATION
    factor = 1 + variation * math.sqrt(ep / moe.num_experts) * math.sqrt(2 * math.log(ep))
    return min(factor, capacity) if capacity else factor


def is_balanced(settings: Settings) -> bool:
    """Return whether a loss, a bias or Sinkhorn's normalization balances the router."""
    experts, kind = settings.experts, settings.experts.moe_router_load_balancing_type
    has_loss = kind != "none" and bool(experts.moe_aux_loss_coeff)
    return has_loss or kind == "sinkhorn" or experts.moe_router_bias_update_rate > 0
