"""The validated settings of a reinforcement-learning run.

The dialect (`config.dialects.roll`) reads ROLL's files into these classes, which all other code uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args

from pydantic import Field

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, SamplerSettings, Validation
from megatune.config.rl.rollout import GroupFilter, PromptData, RewardSettings, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.setting import Group, SettingInfo, describe
from megatune.config.settings import Settings

# The key of strategy_config for the fraction of device memory of an engine, and its default.
SHARE_KEYS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
USUAL_SHARE = 0.9
REWARD_MODEL = "reward_model"  # the kind of a reward that is the score of a reward model
UNSCORED = "unscored"  # the kind of a reward that scores nothing, and its domain
# Heading -> place in a file -> group; ROLE and DOMAIN are the names of a role and of a domain.
_GROUPS: dict[str, dict[str, type[Group]]] = {
    "run": {"": RLRunSettings},
    "rollouts": {"": RolloutSettings},
    "algorithm": {"": AlgorithmSettings},
    "roles": {"ROLE": RoleSettings, "ROLE.strategy_args.strategy_config": SamplerSettings},
    "rewards": {"rewards.DOMAIN": RewardSettings},
}


class ModelRole(RoleSettings):
    """A role with a model that runs in our engine.

    Attributes:
        name: "actor_train", "reference", "critic", "teacher.NAME"; "rewards.DOMAIN" for a reward model.
        settings: of the engine: model, layout, precision, optimizer, adapters; `training` roles use all of them. Those
            of actor_train also have the run's trackers (`logging`).
        packed_tokens_train, packed_tokens_forward: maximum tokens of packed rows; None for one sample per row.
        dynamic_tokens_train, dynamic_tokens_forward: maximum tokens of micro-batches (use_dynamic_batching_*).
        teacher: for actor_train with opd_loss: jsd, the settings of the teacher that runs in its processes.
    """

    name: str
    settings: Settings
    training: bool = False
    packed_tokens_train: int | None = None
    packed_tokens_forward: int | None = None
    dynamic_tokens_train: int | None = None
    dynamic_tokens_forward: int | None = None
    teacher: Settings | None = None

    @property
    def samples_per_update(self) -> int:
        replicas = max(1, len(self.device_mapping) // self.settings.parallel.model_parallel_size)
        batch = self.settings.batch
        return batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas

    @property
    def min_micro_batches_train(self) -> int:
        return 1 if self.packed_tokens_train is None else self.sequence_packing_args.min_num_micro_batches_train

    @property
    def min_micro_batches_forward(self) -> int:
        return 1 if self.packed_tokens_forward is None else self.sequence_packing_args.min_num_micro_batches_forward

    @property
    def replays_routing(self) -> bool:
        """Whether training uses the routing of the sampling engine."""
        return self.router_replay.mode == "R3"


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """The adapter that engines get in each update, for a base model that they have already loaded.

    Attributes:
        config: adapter_config.json, as peft writes it.
        shapes: of its tensors, by peft's names.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


class InferRole(RoleSettings, SamplerSettings):
    """A role that samples responses: the policy, or a judge.

    Attributes:
        engine: "builtin", "vllm" or "sglang".
        devices_per_engine: devices of one engine; there are len(devices) / devices_per_engine engines.
        config: arguments of vLLM's or SGLang's engine, without those that are attributes here; {} for builtin.
        name: of the role: "actor_infer", "reward_model", "rewards.DOMAIN".
        return_routing: whether responses include the chosen experts, for router_replay.
        adapter: sent in updates instead of all weights, if the engine supports adapters.
    """

    model_name_or_path: str
    engine: Literal["builtin", "vllm", "sglang"] = "builtin"
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    devices_per_engine: int = 1
    config: dict[str, Any] = Field(default={})
    name: str = "actor_infer"
    return_routing: bool = False
    adapter: SentAdapter | None = None

    @property
    def num_engines(self) -> int:
        return len(self.device_mapping) // self.devices_per_engine

    @property
    def memory_share(self) -> float:
        """The fraction of each device's memory that the engine may use; 0 for the built-in engine, which uses free
        memory."""
        key = SHARE_KEYS.get(self.engine)
        return 0.0 if key is None else float(self.config.get(key) or USUAL_SHARE)


@dataclass(frozen=True, slots=True)
class RewardRole:
    """The reward of one domain.

    Attributes:
        kind: "math_rule", "code_sandbox", "general_rule", "crossthinkqa", "llm_judge", "multiple_choice",
            "general_val", "format", "length", "swift", "python" for a user's function at `function`, "module:name",
            "environment", whose own rewards are the score, or "reward_model", whose score is that of `model` only;
            UNSCORED for distillation without rewards.
        tag_included: tags of the rows of this domain.
        workers: number of processes.
        arguments: the keys of the role for this kind: code_url, use_local, judge_*, format_pattern, reward_type,
            response_length_penalty_coef, ..., `generating` for llm_judge, and `environment` with its name, arguments
            and max_turns.
        judge: the judge model on separate devices (judge_model_type: inference); `RLSettings.reward_model` is the one
            that several domains share (cluster).
        model: a reward model, whose score times score_weight is added.
        truncated_score: replaces the model's score of truncated responses.
    """

    domain: str
    kind: str
    tag_included: tuple[str, ...] = ()
    workers: int = 1
    function: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    group_filter: GroupFilter = field(default_factory=GroupFilter)
    judge: InferRole | None = None
    model: ModelRole | None = None
    score_weight: float = 1.0
    truncated_score: float | None = None


@dataclass(frozen=True, slots=True)
class RLSettings:
    """The settings of one run.

    Attributes:
        algorithm: with resolved values: pg_clip_low and pg_clip_high are those in use, enable_reference is whether a
            reference runs (with adapters it is the base model), enable_old_logprobs_recompute is whether the pass runs.
    """

    run: RLRunSettings
    rollout: RolloutSettings
    algorithm: AlgorithmSettings
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
    def scorers(self) -> dict[str, ModelRole]:
        """The reward models, by domain."""
        return {domain: role.model for domain, role in self.rewards.items() if role.model is not None}

    @property
    def models(self) -> list[ModelRole]:
        """The roles with a model that runs in our engine, in the order in which a step uses them."""
        found = (self.actor_train, *self.scorers.values(), self.reference, *self.teachers.values(), self.critic)
        return [role for role in found if role is not None]

    @property
    def samplers(self) -> list[InferRole]:
        """The roles that sample responses: actor_infer, then the judges."""
        judges = (self.reward_model, *(reward.judge for reward in self.rewards.values()))
        return [self.actor_infer, *(judge for judge in judges if judge is not None)]

    @property
    def judges(self) -> dict[str, InferRole]:
        """The judges, by domain; domains may share a judge and its engines."""
        own = {domain: role.judge for domain, role in self.rewards.items() if role.judge is not None}
        if self.reward_model is None:
            return own
        shared = [name for name, role in self.rewards.items() if role.arguments.get("judge_model_type") == "cluster"]
        return own | dict.fromkeys(shared, self.reward_model)

    def with_role(self, role: ModelRole | InferRole) -> RLSettings:
        """Return the settings with this role in the place of the one with its name."""
        kind, _, name = role.name.partition(".")
        changes: dict[str, Any] = {kind: role}
        if kind == "teacher":
            changes = {"teachers": {**self.teachers, name: role}}
        elif kind == "rewards":
            own: dict[str, Any] = {"model" if isinstance(role, ModelRole) else "judge": role}
            changes = {"rewards": {**self.rewards, name: replace(self.rewards[name], **own)}}
        return replace(self, **changes)

    @property
    def samples_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.num_return_sequences_in_group

    @property
    def sleep_level(self) -> int:
        """The sleep level of rollout engines; weights are freed only if every step updates all of them."""
        brings_all = self.actor_train.model_update_frequency == 1 and self.actor_infer.adapter is None
        return self.actor_infer.sleep_level if brings_all else 1

    @property
    def sampling_temperature(self) -> float:
        """The temperature for log-probabilities: that of sampling, or 1 with greedy decoding."""
        generating = self.actor_infer.generating_args
        return generating.temperature if generating.do_sample and generating.temperature > 0 else 1.0


def keys_of(group: type[Group]) -> dict[str, SettingInfo]:
    """Describe the keys of a group that are not nested groups, by name."""
    nested = nested_in(group)
    return {info.name: info for info in describe(group.__name__, group) if info.name not in nested}


def nested_in(group: type[Group]) -> dict[str, tuple[type[Group], bool]]:
    """Return the nested groups of a group by key, and whether the key has a list of them."""
    found: dict[str, tuple[type[Group], bool]] = {}
    for name, declared in group.model_fields.items():
        for kind in (declared.annotation, *get_args(declared.annotation)):
            if isinstance(kind, type) and issubclass(kind, Group):
                found[name] = kind, kind is not declared.annotation
    return found


@cache
def rl_pages() -> dict[str, dict[str, SettingInfo]]:
    """Describe every key, by heading and dotted path: "ROLE.generating_args.top_p"."""
    return {
        heading: dict(found for above, group in groups.items() for found in _keys(above, group))
        for heading, groups in _GROUPS.items()
    }


@cache
def rl_keys() -> dict[str, SettingInfo]:
    """Describe every key, by its dotted path."""
    return {dotted: info for page in rl_pages().values() for dotted, info in page.items()}


def find_key(key: str) -> tuple[str, SettingInfo] | None:
    """Return a key by its name, or by its dotted path with a role: top_p, "actor_infer.generating_args.top_p"."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for dotted, info in rl_keys().items():
            if dotted == end or dotted.endswith(f".{end}"):
                return dotted, info
    return None


def _keys(above: str, group: type[Group]) -> Iterator[tuple[str, SettingInfo]]:
    for name, info in keys_of(group).items():
        yield f"{above}.{name}" if above else name, info
    for name, (inner, _) in nested_in(group).items():
        yield from _keys(f"{above}.{name}" if above else name, inner)
