"""How the model and its experts are spread over processes, and what runs while they talk to each other."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatune.config.pipeline import parse_layout
from megatune.config.setting import EXPERTS, Count, Group, Needs, NonNegative, Positive

_PP, _VPP, _CP = (f"parallel.{name}_parallel_size" for name in ("pipeline_model", "virtual_pipeline_model", "context"))
_STAGES = Needs(_PP, why="there is one stage, which holds everything", least=2)
_TP = Needs(
    "parallel.tensor_model_parallel_size",
    why="it splits the sequence over the tensor-parallel processes; there is one",
    least=2,
)
_EXPERTS = Needs(EXPERTS, why="the model has none", off=(1,))
_BUCKETS = "it gathers what the distributed optimizer sharded, in the buckets that overlapped reduction keeps"
_SHARDED = Needs("parallel.use_distributed_optimizer", (True,), _BUCKETS)
_REDUCED = Needs("parallel.overlap_grad_reduce", (True,), _BUCKETS)
_VIRTUAL = Needs(_VPP, least=2, otherwise=Needs("parallel.pipeline_model_parallel_layout"))
_BALANCING, _BY_LOSS = "experts.moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss")
_HAS_EXPERTS = Needs(EXPERTS, why="the model has none", off=(0.0,))
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


class ParallelSettings(Group):
    tensor_model_parallel_size: Annotated[Count, "processes"] = 1
    """Tensor parallelism: splits every layer over this many processes.
    How: Heads and feed-forward channels are split; each layer exchanges its activations twice in the forward and twice
    in the backward pass, which nothing hides. Weights, gradients and most activations are divided by it.
    When: Keep it inside one machine, where the link is fast, and use the smallest size at which the model fits. Across
    machines use pipeline parallelism."""
    pipeline_model_parallel_size: Annotated[Count, "stages"] = 1
    """Pipeline parallelism: splits the layers into this many stages, one after the other.
    How: A micro-batch passes from stage to stage, one small message each. Stages idle while the pipeline fills and
    drains: (stages − 1) / micro-batches of the computing. The first stage holds activations of as many micro-batches as
    there are stages.
    When: For models that do not fit in one machine with tensor parallelism. Use several times as many micro-batches as
    stages, or virtual stages."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2), "model chunks per stage", _STAGES] | None = None
    """Interleaved pipeline: gives each stage this many smaller groups of layers, so that stages idle less.
    How: Idle time is divided by it. Each micro-batch passes through every stage this many times, with as many more
    messages, and the first stage holds somewhat more activations.
    When: When a pipeline has few micro-batches a step. Needs micro-batches in multiples of
    pipeline_model_parallel_size, and layers for every group."""
    sequence_parallel: Annotated[bool, _TP] = False
    """Splits along the sequence what tensor parallelism leaves whole, such as norms and the inputs of layers.
    How: The two exchanges of a layer become a gather and a scatter with the same bytes; what lies between them is
    divided by tensor_model_parallel_size.
    When: Turn it on whenever tensor_model_parallel_size is above 1: it saves memory of activations at no cost in time.
    Mixtures of experts need it."""
    use_distributed_optimizer: bool = True
    """Each data-parallel process keeps its share of the optimizer's state only (ZeRO-1).
    How: Gradients are scattered instead of summed everywhere, each process updates its share, and the weights are
    gathered: the same bytes as without it.
    When: Leave it on: with data parallelism it saves up to 12 bytes a parameter at no cost in time."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel processes while the backward pass still runs.
    How: Gradients are sent in buckets as soon as they are complete, during the last micro-batch of a step.
    When: Leave it unset: it is true where several GPUs hold a copy of the model each, and hides most of the exchange.
    On one process it does nothing."""
    overlap_param_gather: Annotated[bool, _SHARDED, _REDUCED] = False
    """Collect updated parameters while the next forward pass already runs.
    How: Each bucket of weights is gathered before the layer that needs it, one bucket ahead. Needs
    use_distributed_optimizer and overlap_grad_reduce.
    When: Leave it unset: it is true where several GPUs hold a copy of the model each."""
    overlap_p2p_comm: Annotated[bool, _VIRTUAL] = True
    """With virtual stages, exchange activations between stages while computing.
    How: Sends and receives are posted ahead of the computing that needs them. Without virtual stages there is nothing
    to overlap with.
    When: Leave it on."""
    context_parallel_size: Annotated[Count, "processes"] = 1
    """Context parallelism: splits the sequence of every row over this many processes, in all layers.
    How: Each process holds two pieces of every row, one early and one late, so that causal work is even; attention
    exchanges keys and values. Activations are divided by it; weights are not, and the optimizer's state is shared among
    these processes, too.
    When: For rows so long that their activations do not fit otherwise. It takes processes from data parallelism: try
    recomputation first."""
    cp_comm_type: Annotated[Literal["p2p", "all_gather", "a2a"], Needs(_CP, least=2)] = "p2p"
    """How context-parallel processes attend to each other's tokens.
    How: All give the same numbers. They differ in what is sent, in what can be hidden behind computing, and in what
    they ask of the number of heads.
    When: p2p for long rows; all_gather for few key/value heads; a2a where heads suffice and the link is fast.
    - p2p: passes keys and values around a ring while computing
    - all_gather: collects keys and values first
    - a2a: trades sequence for heads (Ulysses): the least to send; needs a head for each process"""
    expert_model_parallel_size: Annotated[Count, "processes", _EXPERTS] = 1
    """Expert parallelism: shards the experts of each layer over this many processes, and sends tokens to them.
    How: Weights, gradients and optimizer state of experts are divided by it. It takes data- and context-parallel
    processes and leaves the global batch as it is; each expert layer sends tokens there and back.
    When: The first choice for large mixtures of experts. Keep it inside one machine where that suffices: the exchange
    is large."""
    expert_tensor_parallel_size: Annotated[Count, "processes", _EXPERTS] | None = None
    """Splits each expert over this many processes. null takes tensor_model_parallel_size.
    How: An expert is small, so its parts make thin matrix products.
    When: 1 with expert parallelism wherever whole experts fit: it is faster."""
    decoder_first_pipeline_num_layers: Annotated[Count, "layers", _STAGES] | None = None
    """Layers of the first pipeline stage, which also holds the word embedding. null takes an equal share.
    How: The other stages share the rest.
    When: Fewer than the others where the first stage is the fullest: it also holds activations of the most
    micro-batches."""
    decoder_last_pipeline_num_layers: Annotated[Count, "layers", _STAGES] | None = None
    """Layers of the last pipeline stage, which also computes the loss over the vocabulary. null takes an equal share.
    How: The other stages share the rest. The slowest stage sets the pace of all.
    When: Fewer than the others balance a large vocabulary: the output layer takes the time of one layer or more."""
    account_for_embedding_in_pipeline_split: Annotated[bool, _STAGES] = False
    """Count the word embedding as one layer when layers are assigned to pipeline stages: the first stage gets one
    fewer.
    How: Layers plus what is counted are shared equally.
    When: Where the first stage is the fullest, or to make an odd number of layers divide."""
    account_for_loss_in_pipeline_split: Annotated[bool, _STAGES] = False
    """Count the output layer and loss as one layer when layers are assigned to pipeline stages: the last stage gets one
    fewer.
    How: Layers plus what is counted are shared equally.
    When: For large vocabularies: otherwise the others wait for the last stage."""
    pipeline_model_parallel_layout: Annotated[str, _STAGES] | None = None
    """Says stage by stage what each holds, stages parted by |: E the embedding, t a layer, L the loss; t*3 repeats,
    (tt|)*4 too.
    How: Et*3|t*4|t*4|t*3L is 14 layers on 4 stages, or on 2 with 2 virtual stages each. Parts are assigned to the
    stages in turn.
    When: Where none of the simpler keys balances the stages."""

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model; the world is a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Processes that each expert is split over."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Processes that hold one copy of all experts; the world is a multiple of it, too."""
        return self.expert_tensor_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def sizes(self, world_size: int) -> dict[str, int]:
        """List every size by its short name, in the order of written layouts; expert tensor parallelism apart."""
        return {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "vpp": self.virtual_stages or 1,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "dp": world_size // self.model_parallel_size,
        }

    def words(self, world_size: int, *, has_experts: bool) -> str:
        """Name every size above 1, as people write layouts: tp2 pp4 vpp2 ep8 etp1 dp4; "" for one process."""
        sizes = self.sizes(world_size)
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if has_experts and self.expert_tensor_size != self.tensor_model_parallel_size:
            words.insert(len(words) - (sizes["dp"] > 1), f"etp{self.expert_tensor_size}")
        return " ".join(words)

    @property
    def smallest_world(self) -> int:
        """The fewest processes that hold whole copies of the model and of its experts; the world is a multiple."""
        return math.lcm(self.model_parallel_size, self.expert_parallel_size)

    @property
    def sequence_multiple(self) -> int:
        """The whole row's length is a multiple of this: context parallelism gives two equal parts to each process, and
        sequence parallelism cuts each one's tokens once more."""
        parts = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return parts * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def document_multiple(self) -> int:
        """In a packed row every document begins at a multiple of this."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def virtual_stages(self) -> int | None:
        """Groups of layers of each pipeline stage, None for one; a written layout says it by its number of parts."""
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
    moe_aux_loss_coeff: Annotated[NonNegative, _HAS_EXPERTS, _BALANCED] | None = None
    """Weight of the load-balancing loss. null takes router_aux_loss_coef of the model's config.json.
    How: The loss is summed over layers; the log shows its mean without the weight: 1 where experts are equally busy.
    LLaMA-Factory's moe_aux_loss_coef weighs Transformers' loss, which pools layers: it is multiplied by the experts of
    a token, and divided by the sparse layers.
    When: 1e-3 keeps experts busy in long runs. 0 trains on the language-model loss alone, as Transformers does by
    default, which is enough for a short fine-tuning."""
    moe_z_loss_coeff: Annotated[NonNegative, _HAS_EXPERTS] | None = None
    """Weight of the router z-loss, which keeps the router's logits small; null is off.
    How: It is the mean square of the log-sum-exp of the router's logits.
    When: 1e-3 is usual where the router's logits grow without bound in 16 bits."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """The dtype that the router computes in. null takes what Transformers takes for the family.
    How: Only the small product that makes the router's logits is concerned.
    When: fp32 is steadier with many experts in 16 bits, where near ties would fall by rounding.
    - fp32: computes the router's logits in float32
    - fp64: computes the router's logits in float64"""
    moe_router_bias_update_rate: Annotated[NonNegative, _HAS_EXPERTS, _TRAINED_BASE] = 0.0
    """For models that balance by a bias on each expert (DeepSeek-V3): how far the bias moves in a step.
    How: The bias of experts that got less than their share goes up by this, that of the others down. It takes part in
    choosing experts, not in weighing them.
    When: 0 leaves the bias as it was pre-trained, as Transformers does; 1e-3 was used in pre-training."""
    moe_expert_capacity_factor: Annotated[Positive, _HAS_EXPERTS, _NO_SINKHORN] | None = None
    """Experts take at most this times their equal share of tokens; the others are dropped. null drops nothing.
    How: Each process keeps the choices with the greatest shares, for each expert. It bounds memory and time of the
    fullest expert, and changes the numbers.
    When: Where imbalance runs out of memory: 1.5 drops little. Transformers drops nothing, so prefer balancing."""
    moe_pad_expert_input_to_capacity: Annotated[bool, _CAPACITY] = False
    """With moe_expert_capacity_factor: pad every expert's tokens to its capacity, for fixed shapes.
    How: Every expert then computes the same number of rows, some of them zeros.
    When: Seldom: where shapes that change from step to step fragment a GPU's memory."""
    moe_shared_expert_overlap: Annotated[bool, _HAS_EXPERTS, _EXCHANGE] = False
    """Compute shared experts while tokens are dispatched to the others.
    How: Shared experts see every token, so they need no exchange; they run beside it. Needs shared experts and the
    alltoall dispatcher.
    When: Turn it on on GPUs with expert parallelism."""
