"""Keys of a role: its devices, its strategy, and how its samples become micro-batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.rl.rollout import Generating, PromptData
from megatune.config.setting import Count, Group, NonNegative, Positive

PolicyVariant = Literal["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"]


class SequencePacking(Group):
    algorithm: Literal["none", "load_balance"] = "none"
    """What limits the length of packed rows.
    How: Rows have about equal work in both; in ROLL only with load_balance.
    When: Use load_balance, with the longest rows that memory allows.
    - none: the samples of a micro-batch times sequence_length, unless the max_packed_sequence_length keys are set
    - load_balance: the max_packed_sequence_length keys"""
    max_packed_sequence_length_train: Annotated[Count, "tokens"] | None = None
    """The maximum length of a packed row in training. null is per_device_train_batch_size times sequence_length.
    How: It must be at least sequence_length; context parallelism divides it.
    When: As long as memory allows: longer rows use a GPU better."""
    max_packed_sequence_length_forward: Annotated[Count, "tokens"] | None = None
    """The maximum length of a packed row in forward-only passes. null is infer_batch_size times sequence_length.
    How: As for training.
    When: Longer than in training."""
    min_num_micro_batches_train: Annotated[Count, "micro-batches"] = 1
    """Minimum number of micro-batches per update.
    How: A larger number makes rows shorter.
    When: With a pipeline, which needs several times as many as stages."""
    min_num_micro_batches_forward: Annotated[Count, "micro-batches"] = 1
    """Minimum number of micro-batches in forward-only passes.
    How: As for training.
    When: As for training."""


class StrategySettings(Group):
    strategy_name: Literal["megatron_train", "megatron_infer", "hf_infer", "builtin", "vllm", "sglang"] | None = None
    """The engine of the role.
    How: strategy_config has its settings; those of megatron_train and megatron_infer are the same as in every other
    run, and `megatune explain` explains them.
    When: Required for roles with a model.
    - megatron_train: this program's engine, in any layout; actor_train and critic
    - megatron_infer: the same, forward only; reference, teachers and reward models
    - hf_infer: as megatron_infer, with a full model on each device; for roles that sample the same as builtin
    - builtin: this program's sampling engine, one per device
    - vllm: vLLM, in this environment or the one of py_executable
    - sglang: SGLang, likewise"""


class RouterReplay(Group):
    mode: Literal["disable", "R2", "R3"] = "disable"
    """Which routing of experts training uses: its own, or that of the engine that sampled.
    How: The experts of each token are returned with the response, if the engine supports it.
    When: R3 for mixtures of experts, if the log-probability gap is large.
    - disable: its own routing
    - R2: that of the trainer's first forward pass
    - R3: that of the engine that sampled"""


class RoleSettings(Group):
    device_mapping: list[int] = Field(default=[])
    """Devices of the role, numbered over all machines: list(range(0,8)), [6, 7], or a sum of such lists.
    How: Roles with a common device share it by time-sharing, and free its memory while another role uses it; other
    roles may run at the same time. Each device of a trainer is a rank. On machines without GPUs a device is a CPU
    process, so that a file for many GPUs can be tried with fewer devices.
    When: Required, for all roles with a model."""
    num_gpus_per_worker: Annotated[Count, "devices"] = 1
    """Number of devices per sampling engine.
    How: With vllm it is tensor_parallel_size times pipeline_parallel_size of strategy_config, with sglang this is its
    tensor parallelism unless strategy_config says otherwise. The built-in engine and trainers take one.
    When: As few as model and KV cache need: more engines with fewer devices each have a higher throughput."""
    world_size: Annotated[Count, "processes"] | None = None
    """For rewards: the number of processes that score. null is 1.
    How: For roles with devices their number decides.
    When: As many as there are free cores: responses are scored while others are still sampled."""
    infer_batch_size: Annotated[Count, "samples"] = 16
    """Samples per micro-batch of forward-only passes: log-probabilities of actor_train and reference, values, scores of
    a reward model.
    How: No activations are stored, so more samples fit than in training.
    When: Smaller if the logits of long samples fill the memory."""
    model_update_frequency: Annotated[Count, "steps"] = 1
    """For actor_train: the number of steps between weight updates of the sampling engines.
    How: Between updates engines sample with older weights; the ratio of probabilities accounts for it.
    When: Leave it at 1."""
    backend_timeout: Annotated[Positive, "minutes"] = 30.0
    """How long a collective operation of the role's ranks may wait for the others.
    How: A rank that makes no progress for this long is reported, and the run stops.
    When: Raise it for slow storage."""
    system_envs: dict[str, Any] = Field(default={})
    """Environment variables of the role's processes; those of the top level are for all roles.
    How: The role's own take precedence.
    When: For settings of NCCL or of an engine."""
    worker_cls: str | None = None
    """The class of a role, by its name in ROLL: ActorPGWorker turns pg_variant on. null is the role's usual one.
    How: The classes are this program's own, under ROLL's names.
    When: With pg_variant, and for rewards, where it names the scoring method."""
    pg_variant: PolicyVariant | None = None
    """The policy loss of actor_train. null is the clipped ratio that the other keys describe.
    How: ROLL reads it only with worker_cls of ActorPGWorker, and so does this program.
    When: To compare them.
    - vanilla: advantage times log-probability, without a ratio
    - ppo: the clipped ratio
    - tis: vanilla, weighted by the ratio to the rollout, clipped at pg_ratio_high
    - topr: wrong responses weighted by the ratio, clipped at pg_ratio_high; right ones as in vanilla
    - cispo: vanilla, weighted by a clipped ratio without gradient
    - kimi15: vanilla, with the squared log-ratio as a penalty"""
    pg_ratio_low: NonNegative | None = None
    """The lower clipping bound of the ratio in pg_variant tis, topr and cispo. null is 0, or 0.9 for cispo, as in ROLL.
    How: Ratios below it are raised to it; they have no gradient.
    When: 0 with cispo means no lower bound, as in its paper."""
    pg_ratio_high: Positive | None = None
    """The upper clipping bound of the ratio in pg_variant tis, topr and cispo. null is 1, or 1.1 for cispo, as in ROLL.
    How: Ratios above it are lowered to it; they have no gradient.
    When: 5 is usual with cispo and pg_ratio_low 0."""
    topr_positive_weight: float = 1.0
    """With pg_variant: topr: the weight of responses with a positive advantage.
    How: It multiplies their losses.
    When: With topr."""
    topr_negative_weight: float = 1.0
    """With pg_variant: topr: the weight of the other responses.
    How: It multiplies their losses.
    When: With topr."""
    use_dynamic_batching_in_train: bool = False
    """Form training micro-batches by tokens, not by samples.
    How: Samples of similar lengths are batched together, up to max_tokens_per_microbatch_in_train tokens with padding.
    When: If lengths differ widely, and packing is not wanted."""
    max_tokens_per_microbatch_in_train: Annotated[int, Field(ge=0), "tokens"] = 0
    """The maximum number of tokens of such a training micro-batch.
    How: It must be at least sequence_length.
    When: Twice sequence_length is usual."""
    use_dynamic_batching_in_infer: bool = False
    """Form micro-batches of forward-only passes by tokens, not by samples.
    How: They have up to max_tokens_per_microbatch_in_infer tokens.
    When: As for training."""
    max_tokens_per_microbatch_in_infer: Annotated[Count, "tokens"] | None = None
    """The maximum number of tokens of such a forward-only micro-batch.
    How: It must be at least sequence_length.
    When: Two to four times that of training."""
    use_sequence_packing: bool = False
    """Put several samples into one row, without padding between them.
    How: Samples of a row do not attend to each other, and results are those of unpacked rows.
    When: Nearly always: responses differ in length, and padding costs as much as tokens do."""
    opd_kl_coef: NonNegative | None = None
    """For a teacher: the weight of its divergence. null is 1.
    How: See use_opd and is_pure_opd.
    When: With a teacher."""
    tag_included: list[str] = Field(default=[])
    """Tags of the rows that a reward scores, or that a teacher is used for. For a teacher, [] is all.
    How: A row's tag decides its domain; a row whose tag belongs to no reward is scored by math_rule, as in ROLL.
    When: Required for rewards."""
    strategy_args: StrategySettings = StrategySettings()
    sequence_packing_args: SequencePacking = SequencePacking()
    router_replay: RouterReplay = RouterReplay()
    generating_args: Generating = Generating()
    data_args: PromptData = PromptData()

    @property
    def devices(self) -> tuple[int, ...]:
        """Global device numbers; without GPUs each is a CPU process."""
        return tuple(self.device_mapping)


class SamplerSettings(Group):
    py_executable: str | None = None
    """The Python executable of the environment with vLLM or SGLang. null is the current one.
    How: The role's processes run with it; its versions of Ray and Python must be those of this environment. The
    engine's version is checked when it starts, and reported if it is not known to work.
    When: If the engine's packages conflict with those of this program, which is usual."""
    sleep_level: Literal[1, 2] = 2
    """What an engine frees between rollouts.
    How: The next weight update restores what was freed. If model_update_frequency is above 1 the level is 1, since
    steps without an update still need the weights.
    When: Leave it: with 1 vLLM keeps old weights in host memory that nobody needs.
    - 1: the KV cache
    - 2: the KV cache and the weights"""


class Validation(Group):
    """Validation problems that actor_infer samples between updates."""

    data_args: PromptData = PromptData()
    generating_args: Generating = Generating()
