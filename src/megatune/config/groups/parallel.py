"""Settings of parallelism, of communication overlap, and of mixtures of experts."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatune.config.pipeline import parse_layout
from megatune.config.setting import EXPERTS, Count, Group, Needs, NonNegative, Positive
from megatune.references import remove, write

_PP, _VPP, _CP = (f"parallel.{name}_parallel_size" for name in ("pipeline_model", "virtual_pipeline_model", "context"))
_STAGES = Needs(_PP, why="there is one stage, which holds everything", least=2)
_TP = Needs(
    "parallel.tensor_model_parallel_size",
    why="it splits the sequence over the tensor-parallel processes; there is one",
    least=2,
)
_EXPERTS = Needs(EXPERTS, why="the model has none", off=(1,))
_BUCKETS = "it gathers the shards of the distributed optimizer in the buckets of the overlapped reduction"
_SHARDED = Needs("parallel.use_distributed_optimizer", (True,), _BUCKETS)
_REDUCED = Needs("parallel.overlap_grad_reduce", (True,), _BUCKETS)
_VIRTUAL = Needs(_VPP, least=2, otherwise=Needs("parallel.pipeline_model_parallel_layout"))
_BALANCING, _BY_LOSS = "experts.moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss")
_HAS_EXPERTS = Needs(EXPERTS, why="the model has none", off=(0.0,))
_WEIGHED = Needs("experts.moe_aux_loss_coeff", of=_BY_LOSS)
_BALANCED = Needs(_BALANCING, _BY_LOSS, "there is no auxiliary loss to weigh", off=(0.0,))
_TRAINED_BASE = Needs(
    "finetuning.finetuning_type", ("full", "freeze"), "the bias belongs to the base model, which is frozen",
    remove('{name}'),
)  # fmt: skip
_NO_SINKHORN = Needs(_BALANCING, (*_BY_LOSS, "none"), "sinkhorn itself balances the load", remove("{name}"))
_CAPACITY = Needs(
    "experts.moe_expert_capacity_factor",
    why="without it experts have no capacity",
    fix=f"{write('moe_expert_capacity_factor', 1.5)}, or {remove('{name}')}",
)
_EXCHANGE = Needs(
    "experts.moe_token_dispatcher_type", ("alltoall", "alltoall_seq"), "allgather has no communication to overlap with"
)


class ParallelSettings(Group):
    tensor_model_parallel_size: Annotated[Count, "processes"] = 1
    """Tensor parallelism: splits every layer over this many processes.
    How: Heads and feed-forward channels are split; each layer communicates its activations twice in the forward and
    twice in the backward pass, which is not overlapped. Weights, gradients and most activations are divided by it.
    When: Keep it inside one machine, with its fast interconnect, and use the smallest size at which the model fits.
    Across machines use pipeline parallelism."""
    pipeline_model_parallel_size: Annotated[Count, "stages"] = 1
    """Pipeline parallelism: splits the layers into this many stages, one after the other.
    How: A micro-batch passes from stage to stage, with one small message each. Stages idle while the pipeline fills and
    drains, for (stages − 1) / micro-batches of the compute time. The first stage holds activations of as many
    micro-batches as there are stages.
    When: For models that do not fit in one machine with tensor parallelism. Use several times as many micro-batches as
    stages, or virtual stages."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2), "model chunks per stage", _STAGES] | None = None
    """Interleaved pipeline: gives each stage this many smaller groups of layers (virtual stages), so that stages idle
    less.
    How: Idle time is divided by it. Each micro-batch passes through every stage this many times, with as many more
    messages, and the first stage holds somewhat more activations.
    When: Use it if a pipeline has few micro-batches per step. The micro-batches must be a multiple of
    pipeline_model_parallel_size, and every group must have layers."""
    sequence_parallel: Annotated[bool, _TP] = False
    """Splits along the sequence what tensor parallelism replicates, such as norms and the inputs of layers.
    How: The two all-reduces of a layer become an all-gather and a reduce-scatter of the same bytes; the activations
    between them are divided by tensor_model_parallel_size.
    When: Turn it on whenever tensor_model_parallel_size is above 1: it saves activation memory at no cost in time.
    Mixtures of experts need it."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel processes (ZeRO-1).
    How: Gradients are reduce-scattered instead of all-reduced, each process updates its shard, and the weights are
    all-gathered: the same bytes as without it.
    When: Leave it on: with data parallelism it saves up to 12 bytes per parameter at no cost in time."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel processes during the backward pass.
    How: Gradients are sent in buckets as soon as they are complete, during the last micro-batch of a step.
    When: Leave it unset: it is true if several GPUs each hold a replica of the model, and hides most of the
    communication. On one process it has no effect."""
    overlap_param_gather: Annotated[bool, _SHARDED, _REDUCED] = False
    """Gather updated parameters during the next forward pass.
    How: Each bucket of weights is gathered before the layer that needs it, one bucket ahead. It needs
    use_distributed_optimizer and overlap_grad_reduce.
    When: Leave it unset: it is true if several GPUs each hold a replica of the model."""
    overlap_p2p_comm: Annotated[bool, _VIRTUAL] = True
    """With virtual stages: send and receive activations between stages during computation.
    How: Sends and receives are posted before the computation that needs them. Without virtual stages there is nothing
    to overlap with.
    When: Leave it on."""
    context_parallel_size: Annotated[Count, "processes"] = 1
    """Context parallelism: splits the sequence of every row over this many processes, in all layers.
    How: Each process holds two chunks of every row, one early and one late, so that causal attention is balanced;
    attention communicates keys and values. Activations are divided by it; weights are not, and the optimizer state is
    also sharded over these processes.
    When: For rows that are so long that their activations do not fit otherwise. It takes processes from data
    parallelism: try recomputation first."""
    cp_comm_type: Annotated[Literal["p2p", "all_gather", "a2a"], Needs(_CP, least=2)] = "p2p"
    """How context-parallel processes attend to each other's tokens.
    How: All give the same results. They differ in what is sent, in what can overlap with computation, and in the number
    of heads that they need.
    When: p2p for long rows; all_gather for few key/value heads; a2a if there are enough heads and the interconnect is
    fast.
    - p2p: passes keys and values around a ring during computation
    - all_gather: gathers keys and values first
    - a2a: switches from a sequence split to a head split (Ulysses): sends least; needs a head for each process"""
    expert_model_parallel_size: Annotated[Count, "processes", _EXPERTS] = 1
    """Expert parallelism: shards the experts of each layer over this many processes, and sends tokens to them.
    How: Weights, gradients and optimizer state of experts are divided by it. It uses the data- and context-parallel
    processes and does not change the global batch; each expert layer sends tokens to the experts and back.
    When: The first choice for large mixtures of experts. Keep it inside one machine if that suffices: it communicates a
    lot."""
    expert_tensor_parallel_size: Annotated[Count, "processes", _EXPERTS] | None = None
    """Splits each expert over this many processes. null takes tensor_model_parallel_size.
    How: An expert is small, so its shards have thin matrix products.
    When: 1 with expert parallelism if whole experts fit: it is faster."""
    decoder_first_pipeline_num_layers: Annotated[Count, "layers", _STAGES] | None = None
    """Layers of the first pipeline stage, which also holds the word embedding. null takes an equal share.
    How: The other stages share the rest.
    When: Fewer than the others if the first stage needs most memory: it also holds activations of the most
    micro-batches."""
    decoder_last_pipeline_num_layers: Annotated[Count, "layers", _STAGES] | None = None
    """Layers of the last pipeline stage, which also computes the loss over the vocabulary. null takes an equal share.
    How: The other stages share the rest. The slowest stage determines the speed of all.
    When: Fewer than the others if the vocabulary is large: the output layer takes the time of one layer or more."""
    account_for_embedding_in_pipeline_split: Annotated[bool, _STAGES] = False
    """Count the word embedding as one layer when layers are assigned to pipeline stages: the first stage gets one
    fewer.
    How: Layers plus what is counted are shared equally.
    When: Use it if the first stage needs most memory, or to make an odd number of layers divisible."""
    account_for_loss_in_pipeline_split: Annotated[bool, _STAGES] = False
    """Count the output layer and loss as one layer when layers are assigned to pipeline stages: the last stage gets one
    fewer.
    How: Layers plus what is counted are shared equally.
    When: For large vocabularies: otherwise the others wait for the last stage."""
    pipeline_model_parallel_layout: Annotated[str, _STAGES] | None = None
    """The modules of each stage, separated by |: E is the embedding, t a layer, L the loss; t*3 and (tt|)*4 are
    repetitions.
    How: Et*3|t*4|t*4|t*3L is 14 layers on 4 stages, or on 2 with 2 virtual stages each. Parts are assigned to the
    stages round-robin.
    When: Use it if none of the simpler keys balances the stages."""

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica of the model; the world size is a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Number of processes that each expert is split over."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Processes that hold one replica of all experts; the world size is a multiple of it, too."""
        return self.expert_tensor_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return all sizes but that of expert tensor parallelism, by their short names and in their usual order."""
        return {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "vpp": self.virtual_stages or 1,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "dp": world_size // self.model_parallel_size,
        }

    def layout_name(self, world_size: int, *, has_experts: bool) -> str:
        """Return the layout as text with every size above 1: tp2 pp4 vpp2 ep8 etp1 dp4; "" for one process."""
        sizes = self.sizes(world_size)
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if has_experts and self.expert_tensor_size != self.tensor_model_parallel_size:
            words.insert(len(words) - (sizes["dp"] > 1), f"etp{self.expert_tensor_size}")
        return " ".join(words)

    @property
    def smallest_world(self) -> int:
        """The smallest world size with whole replicas of the model and of its experts; others are multiples of it."""
        return math.lcm(self.model_parallel_size, self.expert_parallel_size)

    @property
    def sequence_multiple(self) -> int:
        """Divisor of every row's length: context parallelism gives two equal chunks to each process, and sequence
        parallelism splits the tokens of each process once more."""
        parts = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return parts * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def document_multiple(self) -> int:
        """In a packed row every sequence begins at a multiple of this."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def virtual_stages(self) -> int | None:
        """Groups of layers of each pipeline stage, None for one; also derived from pipeline_model_parallel_layout."""
        if self.virtual_pipeline_model_parallel_size or not self.pipeline_model_parallel_layout:
            return self.virtual_pipeline_model_parallel_size
        try:
            virtual = len(parse_layout(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size
        except ValueError:  # refused by the rules
            return None
        return virtual if virtual > 1 else None


class ExpertSettings(Group):
    needed_by_all = (Needs(EXPERTS),)

    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq"] = "alltoall"
    """How tokens reach their experts.
    How: Both give the same results. They differ in what is sent: with many experts per token, most processes need most
    tokens anyway.
    When: alltoall, unless the experts are on few processes.
    - alltoall: sends each token only to the processes of its experts
    - allgather: gathers all tokens everywhere; faster for few processes or many experts per token
    - alltoall_seq: an older name of alltoall"""
    moe_grouped_gemm: bool = True
    """Compute all local experts in one grouped matrix multiplication instead of one after the other.
    How: Tokens are sorted by expert and multiplied by all experts' weights in one call.
    When: Leave it on: on GPUs it is several times faster."""
    moe_router_load_balancing_type: Annotated[Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"], _WEIGHED] = (
        "aux_loss"
    )
    """How the load of experts is balanced.
    How: An auxiliary loss, weighted by moe_aux_loss_coeff, pulls the router towards experts with less than an equal
    share of tokens; sinkhorn balances the choice itself in training.
    When: aux_loss is usual, with a coefficient above 0; seq_aux_loss if each sequence should be balanced.
    - aux_loss: an auxiliary loss over a micro-batch
    - seq_aux_loss: an auxiliary loss over each sequence
    - sinkhorn: balances the choice itself, without a loss
    - none: no balancing"""
    moe_aux_loss_coeff: Annotated[NonNegative, _HAS_EXPERTS, _BALANCED] | None = None
    """Weight of the load-balancing loss. null takes router_aux_loss_coef of the model's config.json.
    How: The loss is summed over layers; the log shows its unweighted mean, which is 1 if the load is perfectly
    balanced. LLaMA-Factory's moe_aux_loss_coef weights Transformers' loss, which pools layers: it is multiplied by the
    number of experts per token, and divided by the number of sparse layers.
    When: 1e-3 keeps the load balanced in long runs. 0 trains on the language-model loss only, as Transformers does by
    default, which is enough for a short fine-tuning."""
    moe_z_loss_coeff: Annotated[NonNegative, _HAS_EXPERTS] | None = None
    """Weight of the router z-loss, which keeps the router's logits small; null is off.
    How: It is the mean square of the log-sum-exp of the router's logits.
    When: 1e-3 is usual if the router's logits grow without bound in 16-bit precision."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """The dtype that the router computes in. null takes that of Transformers for the model family.
    How: It affects only the small matrix product that computes the router's logits.
    When: fp32 is more stable with many experts in 16-bit precision, where rounding would decide near ties.
    - fp32: computes the router's logits in float32
    - fp64: computes the router's logits in float64"""
    moe_router_bias_update_rate: Annotated[NonNegative, _HAS_EXPERTS, _TRAINED_BASE] = 0.0
    """For models that balance with a bias of each expert (DeepSeek-V3): the change of the bias per step.
    How: The bias of experts with less than an equal share of tokens is raised by this, that of the others lowered. It
    affects the choice of experts, not their weights.
    When: 0 leaves the pretrained bias unchanged, as Transformers does; 1e-3 was used in pretraining."""
    moe_expert_capacity_factor: Annotated[Positive, _HAS_EXPERTS, _NO_SINKHORN] | None = None
    """The capacity of an expert is this times an equal share of tokens; tokens above it are dropped. null drops
    nothing.
    How: For each expert, each process keeps the tokens with the largest routing weights. It limits memory and time of
    the busiest expert, and changes the results.
    When: Use it if imbalance causes out-of-memory errors: 1.5 drops little. Transformers drops nothing, so prefer
    balancing."""
    moe_pad_expert_input_to_capacity: Annotated[bool, _CAPACITY] = False
    """With moe_expert_capacity_factor: pad every expert's tokens to its capacity, for fixed shapes.
    How: Every expert then computes the same number of rows, some of which are zeros.
    When: Rarely needed: if changing shapes fragment a GPU's memory."""
    moe_shared_expert_overlap: Annotated[bool, _HAS_EXPERTS, _EXCHANGE] = False
    """Compute shared experts while tokens are dispatched to the others.
    How: Shared experts process every token, so they need no communication and run during that of the others. It needs
    shared experts and the alltoall dispatcher.
    When: Turn it on for GPUs with expert parallelism."""
