"""Keys of a role: its devices, its strategy, and how its samples become micro-batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.rl.rollout import Generating, PromptData
from megatune.config.setting import Count, Group, NonNegative, Positive

PolicyVariant = Literal["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"]


class SequencePacking(Group):
    algorithm: Literal["none", "load_balance"] = "none"
    """What bounds the rows that samples are packed into.
    How: Rows are of about equal work in both; in ROLL those of none are not.
    When: Use load_balance, with the longest rows that memory allows.
    - none: the samples of a micro-batch times sequence_length, unless the lengths below are written
    - load_balance: the lengths below"""
    max_packed_sequence_length_train: Annotated[Count, "tokens"] | None = None
    """The longest row in training. null is per_device_train_batch_size times sequence_length.
    How: At least sequence_length; context parallelism divides it.
    When: What memory allows: longer rows use a GPU better."""
    max_packed_sequence_length_forward: Annotated[Count, "tokens"] | None = None
    """The longest row where nothing is trained. null is infer_batch_size times sequence_length.
    How: As for training.
    When: Longer than in training."""
    min_num_micro_batches_train: Annotated[Count, "micro-batches"] = 1
    """Micro-batches of an update at least.
    How: More make rows shorter than they could be.
    When: With a pipeline, which wants several times its stages."""
    min_num_micro_batches_forward: Annotated[Count, "micro-batches"] = 1
    """The same where nothing is trained.
    How: As for training.
    When: As for training."""


class StrategySettings(Group):
    strategy_name: Literal["megatron_train", "megatron_infer", "hf_infer", "builtin", "vllm", "sglang"] | None = None
    """What computes the role.
    How: strategy_config has its settings; those of megatron_train and megatron_infer are the engine's of every other
    run, and `megatune explain` explains them.
    When: Required for roles with a model.
    - megatron_train: this program's engine, in any layout; actor_train and critic
    - megatron_infer: the same, forward only; reference, teachers and reward models
    - hf_infer: as megatron_infer, with a whole model on each device; of a role that samples the same as builtin
    - builtin: this program's engine for sampling, one device each
    - vllm: vLLM, in this environment or the one of py_executable
    - sglang: SGLang, likewise"""


class RouterReplay(Group):
    mode: Literal["disable", "R2", "R3"] = "disable"
    """Which experts training takes: its own choice, or that of the engine that sampled.
    How: The choice of each token comes with the response, where the engine gives it.
    When: R3 with models of experts, where the log-probability gap is large.
    - disable: its own
    - R2: that of the trainer's first forward pass
    - R3: that of the engine that sampled"""


class RoleSettings(Group):
    device_mapping: list[int] = Field(default=[])
    """Devices of the role, numbered over all machines: list(range(0,8)), [6, 7], or a sum of such lists.
    How: Roles with a device in common share it by turns, and leave its memory when it is not theirs; roles without one
    may work at the same time. Each device of a trainer is a rank. On machines without GPUs a device is a process of the
    CPU, so that a file for many GPUs can be tried with fewer numbers.
    When: Required, for all roles with a model."""
    num_gpus_per_worker: Annotated[Count, "devices"] = 1
    """Devices of one engine that samples.
    How: With vllm it is tensor_parallel_size times pipeline_parallel_size of strategy_config, with sglang this is its
    tensor parallelism unless strategy_config says otherwise. The built-in engine and trainers take one.
    When: As many as the model needs to fit beside its cache; more engines of fewer devices sample more."""
    world_size: Annotated[Count, "processes"] | None = None
    """Processes that score, of a reward. null is 1.
    How: Of roles with devices it follows from them.
    When: As many as there are cores to spare: rewards are scored while others are still sampled."""
    infer_batch_size: Annotated[Count, "samples"] = 16
    """Samples of one micro-batch that only runs forward: log-probabilities of actor_train and reference, values, scores
    of a reward model.
    How: No activations are kept, so more fit than in training.
    When: Smaller where the logits of long samples fill a device."""
    model_update_frequency: Annotated[Count, "steps"] = 1
    """Steps between updates of the engines' weights, of actor_train.
    How: Between them engines sample with older weights; the ratio accounts for it.
    When: Leave it at 1."""
    backend_timeout: Annotated[Positive, "minutes"] = 30.0
    """How long a collective operation of the role's ranks may wait for the others.
    How: A rank that shows no progress for this long is named, and ends the run.
    When: Raise it for slow storage."""
    system_envs: dict[str, Any] = Field(default={})
    """Environment variables of the role's processes; those of the top level are for all roles.
    How: The role's own win.
    When: For NCCL's settings, or those of an engine."""
    worker_cls: str | None = None
    """The class of a role, as ROLL names it: ActorPGWorker switches pg_variant on. null is the role's usual one.
    How: Roles are this program's own; the name says which of ROLL's is meant.
    When: With pg_variant, and of rewards, where it says what scores."""
    pg_variant: PolicyVariant | None = None
    """The loss of actor_train. null is the clipped ratio that the other keys describe.
    How: ROLL reads it only with worker_cls of ActorPGWorker, and so does this program.
    When: To compare them.
    - vanilla: advantage times log-probability, without a ratio
    - ppo: the clipped ratio
    - tis: vanilla, weighted by the ratio to the rollout, cut at pg_ratio_high
    - topr: wrong responses weighted by the ratio, cut at pg_ratio_high; right ones as in vanilla
    - cispo: vanilla, weighted by a clipped ratio that has no gradient
    - kimi15: vanilla, with the squared log-ratio as a penalty"""
    pg_ratio_low: NonNegative | None = None
    """The lowest ratio of pg_variant: tis, topr and cispo. null is 0, or 0.9 of cispo, as in ROLL.
    How: Ratios below it are raised to it; they have no gradient.
    When: 0 with cispo leaves that side open, as its paper does."""
    pg_ratio_high: Positive | None = None
    """The highest ratio of pg_variant: tis, topr and cispo. null is 1, or 1.1 of cispo, as in ROLL.
    How: Ratios above it are cut to it; they have no gradient.
    When: 5 is usual with cispo and pg_ratio_low 0."""
    topr_positive_weight: float = 1.0
    """The weight of responses with a positive advantage, with pg_variant: topr.
    How: It multiplies their losses.
    When: With topr."""
    topr_negative_weight: float = 1.0
    """The weight of the other responses, with pg_variant: topr.
    How: It multiplies their losses.
    When: With topr."""
    use_dynamic_batching_in_train: bool = False
    """Make micro-batches of training by tokens, not by samples.
    How: Samples of like lengths come together, up to max_tokens_per_microbatch_in_train tokens with padding.
    When: Where lengths differ widely, and packing is not wanted."""
    max_tokens_per_microbatch_in_train: Annotated[int, Field(ge=0), "tokens"] = 0
    """The tokens of such a micro-batch.
    How: At least sequence_length.
    When: Twice sequence_length is usual."""
    use_dynamic_batching_in_infer: bool = False
    """The same for micro-batches that only run forward.
    How: Up to max_tokens_per_microbatch_in_infer tokens.
    When: As for training."""
    max_tokens_per_microbatch_in_infer: Annotated[Count, "tokens"] | None = None
    """The tokens of such a micro-batch.
    How: At least sequence_length.
    When: Two to four times what training takes."""
    use_sequence_packing: bool = False
    """Put several samples into one row, without padding between them.
    How: Samples of a row do not see each other, and the numbers are those of single rows.
    When: Nearly always: responses differ in length, and padding costs as much as tokens do."""
    opd_kl_coef: NonNegative | None = None
    """The weight of a teacher's divergence. null is 1.
    How: See use_opd and is_pure_opd.
    When: With a teacher."""
    tag_included: list[str] = Field(default=[])
    """Tags of the rows that a reward scores, or that a teacher teaches. Of a teacher, [] is all.
    How: A row's tag decides its domain; a row whose tag no reward has is scored by math_rule, as in ROLL.
    When: Required for rewards."""
    strategy_args: StrategySettings = StrategySettings()
    sequence_packing_args: SequencePacking = SequencePacking()
    router_replay: RouterReplay = RouterReplay()
    generating_args: Generating = Generating()
    data_args: PromptData = PromptData()

    @property
    def devices(self) -> tuple[int, ...]:
        """Global numbers, each for one rank or a part of an engine; processes of the CPU where there is no GPU."""
        return tuple(self.device_mapping)


class SamplerSettings(Group):
    py_executable: str | None = None
    """Python of the environment that vLLM or SGLang is installed in. null is this one.
    How: The role's processes run in it; Ray and Python must have the versions of this environment. The engine's version
    is asked for when it starts, and named where it is not one that is known to work.
    When: Where the engine's packages do not go together with this program's, which is usual."""
    sleep_level: Literal[1, 2] = 2
    """What an engine frees between rollouts.
    How: What it freed comes back with the next update of the weights. Where model_update_frequency is above 1 it is 1,
    since steps without an update sample with the weights that are there.
    When: Leave it: 1 has vLLM keep old weights in the machine's memory, for nobody.
    - 1: the cache
    - 2: the cache and the weights"""


class Validation(Group):
    """What is sampled between updates, by actor_infer."""

    data_args: PromptData = PromptData()
    generating_args: Generating = Generating()
