"""What one run of reinforcement learning with verifiable rewards does: ROLL's names, resolved and checked.

The dialect (`config.dialects.roll`) reads ROLL's files into these; everything below it works with these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megatune.config.settings import Settings

Normalization = Literal["batch", "group", "running"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Estimator = Literal["gae", "reinforce", "grpo", "rloo", "reinforce_plus_plus"]
PolicyVariant = Literal["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"]


@dataclass(frozen=True, slots=True)
class RunPart:
    exp_name: str = "rlvr"
    seed: int = 42
    output_dir: str = "./output"
    max_steps: int = 500
    save_steps: int = 50
    max_ckpt_to_keep: int = 0  # 0: all
    logging_steps: int = 1
    eval_steps: int = 10
    resume_from_checkpoint: bool | str = False
    rpc_timeout: float = 3600.0  # seconds that a call to a role may take
    rollout_dump_dir: str | None = None
    rollout_mock: Literal["dump", "mock"] | None = None
    rollout_mock_dir: str | None = None
    num_gpus_per_node: int = 8
    model_update_buffer_size_mb: int = 1024
    system_envs: dict[str, str] = field(default_factory=dict)
    checkpoint_output_dir: str | None = None  # a second place that checkpoints are copied to


@dataclass(frozen=True, slots=True)
class RolloutPart:
    rollout_batch_size: int = 128  # prompts of a step
    num_return_sequences_in_group: int = 1
    prompt_length: int = 1024
    sequence_length: int = 2048
    val_prompt_length: int | None = None
    val_sequence_length: int | None = None
    max_running_requests: int = 128
    async_generation_ratio: float = 0.0
    is_use_additional_prompts: bool = False
    max_additional_running_prompts: int = 16
    global_template: str | None = None
    tag_to_template: dict[str, str] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return self.sequence_length - self.prompt_length


@dataclass(frozen=True, slots=True)
class IsWeight:
    enabled: bool = False
    weight_type: Literal["token", "segment", "geometric", "sequence"] = "token"
    upper_bound: float = 1.2
    detach: bool = True


@dataclass(frozen=True, slots=True)
class CorrectionFilter:
    enabled: bool = False
    agg_type: Literal["token", "segment", "geometric", "sequence"] = "token"
    ratio_enabled: bool = True
    ratio_low: float = 0.8
    ratio_high: float = 1.2
    diff_enabled: bool = False
    diff_low: float = -0.2
    diff_high: float = 0.2


@dataclass(frozen=True, slots=True)
class AlgorithmPart:
    adv_estimator: Estimator = "gae"
    ppo_epochs: int = 1
    lambd: float = 0.95
    gamma: float = 1.0
    pg_clip_low: float = 0.2  # pg_clip, or the two of use_pg_clip_range
    pg_clip_high: float = 0.2
    dual_clip_loss: bool = False
    dual_clip: float = 1.4  # ROLL's 1 + 2 * pg_clip
    value_clip: float | None = None
    kl_penalty: Literal["kl", "abs", "mse", "full", "k3"] = "kl"
    target_kl: float | None = None
    init_kl_coef: float = 0.2
    kl_horizon: int = 10000
    add_token_level_kl: bool = False
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    entropy_loss_coef: float = 0.0
    reward_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    advantage_clip: float | None = None
    norm_mean_type: Normalization | None = None
    norm_std_type: Normalization | None = None
    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    critic_warmup: int = 0
    enable_reference: bool = False  # resolved: what needs a reference has one; of adapters it is the model below them
    recompute_old_log_probs: bool = False  # resolved from the two switches, the number of updates and what needs them
    train_infer_is_weight: IsWeight = IsWeight()
    train_infer_filters: tuple[CorrectionFilter, ...] = ()
    importance_sampling: Literal["token", "seq"] = "token"
    rl_loss_coef: float = 1.0
    max_len_mask: bool = False
    difficulty_mask: bool = False
    difficulty_low_threshold: float = 0.0
    difficulty_high_threshold: float = 1.0
    difficulty_loss_weight: bool = False
    length_loss_weight: bool = False
    error_max_len_clip: bool = False
    error_max_len_threshold: int = 9999999999
    is_pure_opd: bool = False
    use_opd: bool = False


@dataclass(frozen=True, slots=True)
class Generating:
    """How responses are sampled."""

    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 50  # 0: off
    max_new_tokens: int = 1024
    num_return_sequences: int = 1
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    do_sample: bool = True


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A role with a model of our engine.

    Attributes:
        name: "actor_train", "reference", "critic", "teacher.NAME".
        devices: global numbers, each for one rank; processes of the CPU where there is no GPU.
        settings: of the engine: model, layout, precision, optimizer, adapters; for `training` roles all are used. Those
            of actor_train also say what the run is reported to (`logging`).
        infer_batch_size: rows of a micro-batch that only runs forward.
        strategy: "megatron" computes with the engine, "hf" with Transformers, forward only.
        packed_tokens_train, packed_tokens_forward: rows are packed up to so many tokens; None: one sample a row.
    """

    name: str
    devices: tuple[int, ...]
    settings: Settings
    strategy: Literal["megatron", "hf"] = "megatron"
    training: bool = False
    infer_batch_size: int = 16
    packed_tokens_train: int | None = None
    packed_tokens_forward: int | None = None
    min_micro_batches_train: int = 1
    min_micro_batches_forward: int = 1
    dynamic_tokens_train: int | None = None  # micro-batches by tokens (use_dynamic_batching_*)
    dynamic_tokens_forward: int | None = None
    warmup_steps: int = 0
    pg_variant: PolicyVariant | None = None
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    model_update_frequency: int = 1
    router_replay: bool = False
    system_envs: dict[str, str] = field(default_factory=dict)
    opd_kl_coef: float | None = None
    tag_included: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InferRole:
    """A role that samples responses: the policy's, or a judge's.

    Attributes:
        engine: "builtin", "vllm" or "sglang".
        devices_per_engine: devices of one engine; there are len(devices) / devices_per_engine of them.
        config: handed to vllm's or sglang's engine, without what stands here by a name of its own; {} for builtin.
        py_executable: Python of the environment that the engine is installed in; None for this one.
        sleep_level: what is freed between rollouts: the cache (1), or weights, too (2).
        infer_batch_size: sequences that the built-in engine samples at once for a judge.
        name: of the role: "actor_infer", "reward_model", "rewards.DOMAIN".
        return_routing: whether the experts that were chosen come with each response, for router_replay.
    """

    devices: tuple[int, ...]
    model_name_or_path: str
    engine: Literal["builtin", "vllm", "sglang"] = "builtin"
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    devices_per_engine: int = 1
    generating: Generating = Generating()
    config: dict[str, Any] = field(default_factory=dict)
    py_executable: str | None = None
    system_envs: dict[str, str] = field(default_factory=dict)
    sleep_level: int = 1
    infer_batch_size: int = 16
    name: str = "actor_infer"
    return_routing: bool = False

    @property
    def num_engines(self) -> int:
        return len(self.devices) // self.devices_per_engine


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups are dropped by their rewards."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    threshold_up: float = float("inf")
    threshold_down: float = float("-inf")
    std_threshold: float = float("-inf")


@dataclass(frozen=True, slots=True)
class RewardRole:
    """What scores the responses of one domain.

    Attributes:
        kind: "math_rule", "code_sandbox", "general_rule", "crossthinkqa", "llm_judge", "multiple_choice",
            "general_val", "format", "length", or "python" for a user's function at `function`, "module:name".
        tag_included: tags of the rows of this domain.
        workers: processes.
        arguments: the keys of the role that were written and belong to the kind: code_url, use_local, judge_*,
            format_pattern, reward_type, response_length_penalty_coef, ..., and for llm_judge `generating`.
        judge: the model that judges, on devices of its own (judge_model_type: inference); `RLSettings.reward_model` is
            the one that several domains share (cluster).
    """

    domain: str
    kind: str
    tag_included: tuple[str, ...] = ()
    workers: int = 1
    devices: tuple[int, ...] = ()
    function: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    group_filter: GroupFilter = GroupFilter()
    judge: InferRole | None = None


@dataclass(frozen=True, slots=True)
class PromptData:
    """Rows that prompts are made of."""

    files: tuple[str, ...] = ()
    domain_shares: dict[str, float] = field(default_factory=dict)  # in the file's order: the last takes the rest
    template: str | None = None
    tag: str = "tag"
    id: str = "id"
    messages: str | None = None
    prompt: str | None = None
    response: str = "solution"
    sources: tuple[str, ...] = ()  # dataset_filter: rows with another `source` are left out; (): none is
    num_samples: int = 0  # dataset_filter: the first so many rows, after the filter; 0: all


@dataclass(frozen=True, slots=True)
class Validation:
    data: PromptData
    generating: Generating


@dataclass(frozen=True, slots=True)
class RLSettings:
    """All of one run, valid."""

    run: RunPart
    rollout: RolloutPart
    algorithm: AlgorithmPart
    data: PromptData
    actor_train: ModelRole
    actor_infer: InferRole
    rewards: dict[str, RewardRole]
    reference: ModelRole | None = None
    critic: ModelRole | None = None
    reward_model: InferRole | None = None
    teachers: dict[str, ModelRole] = field(default_factory=dict)
    validation: Validation | None = None

    @property
    def samples_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.num_return_sequences_in_group

    @property
    def sampling_temperature(self) -> float:
        """What logits are divided by for log-probabilities: the temperature of sampling. Where the likeliest token is
        always taken there is none, and they are those of the model itself."""
        generating = self.actor_infer.generating
        return generating.temperature if generating.do_sample and generating.temperature > 0 else 1.0
