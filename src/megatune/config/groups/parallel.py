"""How the model is spread over processes, and what runs while they talk to each other."""

from __future__ import annotations

import math
from typing import Literal

from megatune.config.pipeline import parse_layout
from megatune.config.setting import Group, setting


class ParallelSettings(Group):
    tensor_model_parallel_size: int = setting(
        1,
        unit="processes",
        ge=1,
        advice="Splits every layer over this many processes, with two exchanges a layer. Keep it inside one machine; "
        "use the smallest size at which the model fits.",
    )
    pipeline_model_parallel_size: int = setting(
        1,
        unit="stages",
        ge=1,
        advice="Splits the layers into this many stages, one after the other. Works across machines; stages idle "
        "while the pipeline fills, less so with more micro-batches in a step.",
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        unit="model chunks per stage",
        ge=2,
        advice="Gives each stage this many smaller groups of layers, so that stages idle less. Costs that many times "
        "more exchanges between stages, and needs micro-batches in multiples of pipeline_model_parallel_size.",
    )
    sequence_parallel: bool = setting(
        False,
        advice="Splits along the sequence what tensor parallelism leaves whole, such as norms. Saves memory of "
        "activations at no cost in time: turn it on whenever tensor_model_parallel_size is above 1.",
    )
    use_distributed_optimizer: bool = setting(
        True,
        advice="Each data-parallel process keeps its share of the optimizer's state only. Saves memory at no cost in "
        "time.",
    )
    overlap_grad_reduce: bool = setting(
        False,
        advice="Sum gradients over data-parallel processes while the backward pass still runs. Turn it on across GPUs.",
    )
    overlap_param_gather: bool = setting(
        False,
        advice="Collect updated parameters while the next forward pass already runs. Needs use_distributed_optimizer "
        "and overlap_grad_reduce.",
    )
    overlap_p2p_comm: bool = setting(
        True, advice="With virtual stages, exchange activations between stages while computing."
    )
    context_parallel_size: int = setting(
        1,
        unit="processes",
        ge=1,
        advice="Splits the sequence of every row over this many processes, in all layers. For rows so long that their "
        "activations do not fit otherwise; the processes hold the same weights, and exchange keys and values.",
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = setting(
        "p2p",
        advice="How context-parallel processes attend to each other's tokens. p2p passes keys and values around a ring "
        "while computing; all_gather collects them first, simplest and good for few key/value heads; a2a trades "
        "sequence for heads (Ulysses), with the least to send, and needs a head for each process.",
    )
    expert_model_parallel_size: int = setting(
        1,
        unit="processes",
        ge=1,
        advice="Deals the experts of each layer to this many processes, and sends tokens to them. The first choice for "
        "large mixtures of experts; it takes data-parallel processes and leaves the global batch as it is.",
    )
    expert_tensor_parallel_size: int | None = setting(
        None,
        unit="processes",
        ge=1,
        advice="Splits each expert over this many processes. null takes tensor_model_parallel_size; 1 keeps experts "
        "whole, which is faster where they fit.",
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None,
        unit="layers",
        ge=1,
        advice="Layers of the first pipeline stage, which also holds the word embedding. null takes an equal share.",
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None,
        unit="layers",
        ge=1,
        advice="Layers of the last pipeline stage, which also computes the loss over the vocabulary. Fewer than the "
        "others balance a large vocabulary. null gives it its equal share.",
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False,
        advice="Count the word embedding as one layer when layers are dealt to pipeline stages: the first stage gets "
        "one fewer.",
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False,
        advice="Count the output layer and loss as one layer when layers are dealt to pipeline stages: the last stage "
        "gets one fewer.",
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        advice="Says stage by stage what each holds, stages parted by |: E the embedding, t a layer, L the loss; "
        "t*3 repeats, (tt|)*4 too. Et*3|t*4|t*4|t*3L is 14 layers on 4 stages, or on 2 with 2 virtual stages each.",
    )

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

    @property
    def smallest_world(self) -> int:
        """The fewest processes that hold whole copies of the model and of its experts; the world is a multiple."""
        return math.lcm(self.model_parallel_size, self.expert_parallel_size)

    @property
    def sequence_multiple(self) -> int:
        """The whole row's length is a multiple of this: context parallelism deals two equal parts to each process, and
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
