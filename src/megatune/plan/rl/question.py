"""What is planned of a run of reinforcement learning: settings, models of its roles, machines, lengths of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatune.config.rl.settings import InferRole, ModelRole, RLSettings
from megatune.plan.case import PlannedModel
from megatune.plan.machine import Machine

_POINTS = 64  # of a numeric integral
ACTOR, ROLLOUT, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"


@dataclass(frozen=True)
class Lengths:
    """Tokens of the samples of a step.

    Responses end with a constant chance at each token, and are cut at the longest: the only distribution with this mean
    and this bound that needs no third number. With a mean of half the longest a fifth is cut, of a quarter 2 %.

    Attributes:
        prompt, response: of the longest.
        mean_prompt, mean_response: of the mean one; the latter below `response`.
    """

    prompt: int
    response: int
    mean_prompt: float
    mean_response: float

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt + self.response

    @property
    def mean(self) -> float:
        """Tokens of the mean sample."""
        return self.mean_prompt + self.mean_response

    @cached_property
    def hazard(self) -> float:
        """h: the chance of a response to end at a token; its mean length is (1 - exp(-h · response)) / h."""
        if self.mean_response >= self.response * (1 - 1e-6):
            return 0.0
        low, high = 1e-12, 1 / self.mean_response
        for _ in range(60):
            middle = (low + high) / 2
            mean = -math.expm1(-middle * self.response) / middle
            low, high = (middle, high) if mean > self.mean_response else (low, middle)
        return (low + high) / 2

    def share_longer(self, tokens: float) -> float:
        """Return the share of responses that are not ended after so many tokens."""
        return math.exp(-self.hazard * tokens) if tokens < self.response else 0.0

    @property
    def share_cut(self) -> float:
        """Share of responses that end at the longest length."""
        return math.exp(-self.hazard * self.response)

    def mean_longest(self, count: int) -> float:
        """Return tokens of the longest of `count` samples, on average, each with a mean prompt."""
        step = self.response / _POINTS
        middles = ((point + 0.5) * step for point in range(_POINTS))
        return self.mean_prompt + sum(1 - (1 - self.share_longer(tokens)) ** count for tokens in middles) * step

    def steps(self) -> list[tuple[float, float, float]]:
        """Return (tokens, share still sampled, width) of stretches of a response, which add up to the longest."""
        step = self.response / _POINTS
        return [((point + 0.5) * step, self.share_longer((point + 0.5) * step), step) for point in range(_POINTS)]


@dataclass(frozen=True, kw_only=True)
class RLQuestion:
    """What is to be planned.

    Attributes:
        models: by the role's name: judges are missing where nothing is known of their model.
        machine: its devices are numbered as device_mapping does, one machine after the other.
        notes: what was assumed, in sentences.
        file: the settings file that was planned.
    """

    settings: RLSettings
    models: Mapping[str, PlannedModel]
    machine: Machine
    lengths: Lengths
    notes: tuple[str, ...] = ()
    file: str | None = None

    @property
    def model_roles(self) -> tuple[ModelRole, ...]:
        """Roles with a model of the engine, in the order in which a step needs them."""
        settings = self.settings
        roles = (settings.actor_train, settings.reference, *settings.teachers.values(), settings.critic)
        return tuple(role for role in roles if role is not None)

    @property
    def infer_roles(self) -> tuple[InferRole, ...]:
        """Roles that sample responses, the policy's first; the others are judges."""
        settings = self.settings
        judges = (settings.reward_model, *(reward.judge for reward in settings.rewards.values()))
        return (settings.actor_infer, *(judge for judge in judges if judge is not None))

    @property
    def steps_ahead(self) -> float:
        """Steps that rollouts run ahead of training, on devices of their own; 0 where they take turns."""
        infer = self.settings.actor_infer.devices
        apart = all(set(role.devices).isdisjoint(infer) for role in self.model_roles)
        return self.settings.rollout.async_generation_ratio if apart else 0.0

    @property
    def devices(self) -> dict[str, tuple[int, ...]]:
        """Devices by role."""
        of_models = {role.name: role.devices for role in self.model_roles}
        return of_models | {role.name: role.devices for role in self.infer_roles}

    @property
    def world_size(self) -> int:
        """Devices of the run: up to the largest that a role is mapped to."""
        return 1 + max(device for devices in self.devices.values() for device in devices)
