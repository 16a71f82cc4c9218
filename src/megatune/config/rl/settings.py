"""All that one run of reinforcement learning with verifiable rewards does: its keys, checked, with what follows.

The dialect (`config.dialects.roll`) reads ROLL's files into these; everything below it works with these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from pydantic import Field

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, SamplerSettings, Validation
from megatune.config.rl.rollout import GroupFilter, PromptData, RewardSettings, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.setting import Group, SettingInfo, describe
from megatune.config.settings import Settings

# The key of strategy_config by which an engine's part of a device's memory is set, and that part where it is not.
SHARE_KEYS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
USUAL_SHARE = 0.9
REWARD_MODEL = "reward_model"  # the kind of a reward that is the score of a reward model
UNSCORED = "unscored"  # the kind of a reward that scores nothing, and its domain
# Headings -> groups by where they stand; ROLE and DOMAIN mean the name of a role and of a domain.
_GROUPS: dict[str, dict[str, type[Group]]] = {
    "run": {"": RLRunSettings},
    "rollouts": {"": RolloutSettings},
    "algorithm": {"": AlgorithmSettings},
    "roles": {"ROLE": RoleSettings, "ROLE.strategy_args.strategy_config": SamplerSettings},
    "rewards": {"rewards.DOMAIN": RewardSettings},
}


class ModelRole(RoleSettings):
    """A role with a model of our engine.

    Attributes:
        name: "actor_train", "reference", "critic", "teacher.NAME"; "rewards.DOMAIN" of a reward model.
        settings: of the engine: model, layout, precision, optimizer, adapters; for `training` roles all are used. Those
            of actor_train also say what the run is reported to (`logging`).
        packed_tokens_train, packed_tokens_forward: rows are packed up to so many tokens; None: one sample a row.
        dynamic_tokens_train, dynamic_tokens_forward: micro-batches by tokens (use_dynamic_batching_*).
        teacher: of actor_train with opd_loss: jsd: the engine of a model that is computed in its processes.
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
        """Whether training takes the experts that the engine took."""
        return self.router_replay.mode == "R3"


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """The adapter that engines get in each update, beside a base that they have loaded themselves.

    Attributes:
        config: adapter_config.json, as peft writes it.
        shapes: of its tensors, by peft's names.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


class InferRole(RoleSettings, SamplerSettings):
    """A role that samples responses: the policy's, or a judge's.

    Attributes:
        engine: "builtin", "vllm" or "sglang".
        devices_per_engine: devices of one engine; there are len(devices) / devices_per_engine of them.
        config: handed to vllm's or sglang's engine, without what stands here by a name of its own; {} for builtin.
        name: of the role: "actor_infer", "reward_model", "rewards.DOMAIN".
        return_routing: whether the experts that were chosen come with each response, for router_replay.
        adapter: what updates bring in place of all weights, where the engine takes adapters.
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
        """The part of each device's whole memory that the engine may take; 0 of the built-in engine, which takes of
        what is free."""
        key = SHARE_KEYS.get(self.engine)
        return 0.0 if key is None else float(self.config.get(key) or USUAL_SHARE)


@dataclass(frozen=True, slots=True)
class RewardRole:
    """What scores the responses of one domain.

    Attributes:
        kind: "math_rule", "code_sandbox", "general_rule", "crossthinkqa", "llm_judge", "multiple_choice",
            "general_val", "format", "length", "swift", "python" for a user's function at `function`, "module:name",
            "environment", whose own rewards are the score, or "reward_model", whose score is that of `model` alone;
            UNSCORED of a distillation without rewards.
        tag_included: tags of the rows of this domain.
        workers: processes.
        arguments: the keys of the role that were written and belong to the kind: code_url, use_local, judge_*,
            format_pattern, reward_type, response_length_penalty_coef, ..., and for llm_judge `generating`; of one with
            an environment `environment`: its name, arguments and max_turns.
        judge: the model that judges, on devices of its own (judge_model_type: inference); `RLSettings.reward_model` is
            the one that several domains share (cluster).
        model: a reward model, whose score is added to what the kind says, times score_weight.
        truncated_score: in place of the model's score of a response that was cut.
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
    """All of one run, valid.

    Attributes:
        algorithm: resolved: pg_clip_low and pg_clip_high are those that count, enable_reference whether one is run (of
            adapters it is the model below them), enable_old_logprobs_recompute whether the pass is made.
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
    def samples_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.num_return_sequences_in_group

    @property
    def sleep_level(self) -> int:
        """What the rollout engines free; weights only where every step brings all of them anew."""
        brings_all = self.actor_train.model_update_frequency == 1 and self.actor_infer.adapter is None
        return self.actor_infer.sleep_level if brings_all else 1

    @property
    def sampling_temperature(self) -> float:
        """What logits are divided by for log-probabilities: the temperature of sampling. Where the likeliest token is
        always taken there is none, and they are those of the model itself."""
        generating = self.actor_infer.generating_args
        return generating.temperature if generating.do_sample and generating.temperature > 0 else 1.0


def keys_of(group: type[Group]) -> dict[str, SettingInfo]:
    """Describe the keys of a group that have a value of their own, by name."""
    nested = (*mappings_of(group), *lists_of(group))
    return {info.name: info for info in describe(group.__name__, group) if info.name not in nested}


def mappings_of(group: type[Group]) -> dict[str, type[Group]]:
    """Return the groups that stand below keys of a group."""
    found: dict[str, Any] = {name: field.annotation for name, field in group.model_fields.items()}
    return {name: kind for name, kind in found.items() if _is_group(kind)}


def lists_of(group: type[Group]) -> dict[str, type[Group]]:
    """Return the groups that stand in lists below keys of a group."""
    found = {name: get_args(field.annotation) for name, field in group.model_fields.items()}
    return {name: kinds[0] for name, kinds in found.items() if kinds and _is_group(kinds[0])}


@cache
def rl_pages() -> dict[str, dict[str, SettingInfo]]:
    """Describe every key by its heading and where it stands: "ROLE.generating_args.top_p"."""
    return {
        heading: dict(found for above, group in groups.items() for found in _keys(above, group))
        for heading, groups in _GROUPS.items()
    }


@cache
def rl_keys() -> dict[str, SettingInfo]:
    """Describe every key by where it stands."""
    return {dotted: info for page in rl_pages().values() for dotted, info in page.items()}


def find_key(key: str) -> tuple[str, SettingInfo] | None:
    """Return a key by its name, or by its end with a role in front: top_p, "actor_infer.generating_args.top_p"."""
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
    for name, inner in (mappings_of(group) | lists_of(group)).items():
        yield from _keys(f"{above}.{name}" if above else name, inner)


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Group)
