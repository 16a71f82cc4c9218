"""What is planned of a run of reinforcement learning: its settings, the models of its roles, and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.config.rl.settings import InferRole, ModelRole, RLSettings
from megatune.plan.case import PlannedModel
from megatune.plan.machine import Machine
from megatune.plan.rl.lengths import Lengths

ACTOR, ROLLOUT, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"


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
