"""How the model is spread over processes, and what runs while they talk to each other."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatune.config.pipeline import parse_layout
from megatune.config.setting import EXPERTS, Count, Group, Needs

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
