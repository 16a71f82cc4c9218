"""How the model is spread over processes, and what runs while they talk to each other."""

from __future__ import annotations

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
    bias_activation_fusion: bool = setting(
        False, advice="Compute the feed-forward's activation in one pass over memory where that is possible."
    )
    apply_rope_fusion: bool = setting(
        False, advice="Compute rotary embeddings in one pass over memory where that is possible."
    )

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model; the world is a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def num_model_chunks(self) -> int:
        """Groups of layers that the model is cut into, over all pipeline stages."""
        return self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)
