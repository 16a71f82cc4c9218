"""What is planned of a run of reinforcement learning: its settings, the models of its roles, and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.plan.case import PlannedModel
from megatune.plan.machine import Machine
from megatune.plan.rl.lengths import Lengths

ACTOR, ROLLOUT, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"


@dataclass(frozen=True, kw_only=True)
class RLQuestion:
    """What is to be planned.

    Attributes:
        models: by the role's name: of ModelRoles, "actor_infer", and of judges as far as their models are known.
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
    def world_size(self) -> int:
        """Devices of the run: up to the largest that a role is mapped to."""
        mapped = [*self.settings.actor_infer.devices, *(one for role in self.model_roles for one in role.devices)]
        mapped += [one for reward in self.settings.rewards.values() for one in reward.devices]
        if self.settings.reward_model is not None:
            mapped += self.settings.reward_model.devices
        return max(mapped) + 1
