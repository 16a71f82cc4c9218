"""The plan of a run: bytes of every device in every phase, and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatune.plan.rl.engine import EngineMemory
from megatune.plan.rl.held import Held, RoleShares, engine_of, phases, shares
from megatune.plan.rl.question import RLQuestion
from megatune.plan.rl.seconds import StepSeconds, step_seconds


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that hold the same.

    Attributes:
        devices: their numbers.
        held: what each role on them holds.
    """

    devices: tuple[int, ...]
    held: tuple[Held, ...]

    def total(self, phase: str) -> int:
        """Return bytes of a device in a phase."""
        return sum(each.total(phase) for each in self.held)

    def fullest(self, among: tuple[str, ...]) -> str:
        """Return the phase in which a device holds most."""
        return max(among, key=self.total)


@dataclass(frozen=True)
class RLAnswer:
    """What was found.

    Attributes:
        roles: what each of them holds.
        engine: of the rollouts.
    """

    question: RLQuestion
    roles: tuple[RoleShares, ...]
    engine: EngineMemory
    seconds: StepSeconds

    @cached_property
    def phases(self) -> tuple[str, ...]:
        return phases(self.question)

    @cached_property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Devices by what they hold, the first first."""
        by_content: dict[tuple[int, ...], list[int]] = {}
        content: dict[tuple[int, ...], tuple[Held, ...]] = {}
        for device in range(self.question.world_size):
            held = tuple(role.on(device) for role in self.roles if device in role.devices)
            key = tuple(map(id, held))
            by_content.setdefault(key, []).append(device)
            content[key] = held
        return tuple(DeviceGroup(tuple(devices), content[key]) for key, devices in by_content.items() if content[key])

    @cached_property
    def fullest(self) -> tuple[DeviceGroup, str]:
        """The devices that hold most, and the phase in which they do."""
        group = max(self.groups, key=lambda each: each.total(each.fullest(self.phases)))
        return group, group.fullest(self.phases)

    @property
    def fits(self) -> bool:
        """Whether every device holds what is on it, and the engines have room to sample the longest response."""
        group, phase = self.fullest
        return group.total(phase) <= self.question.machine.device.memory and self.has_cache

    @property
    def has_cache(self) -> bool:
        """Whether an engine's cache holds the longest sample."""
        return self.engine.cached_tokens >= self.question.lengths.longest

    @property
    def host_bytes(self) -> int:
        """Bytes that sleeping roles have in the main memory of the fullest machine."""
        per_node = self.question.machine.gpus_per_node
        by_node: dict[int, int] = {}
        for role in self.roles:
            for device in role.devices:
                node = device // per_node
                by_node[node] = by_node.get(node, 0) + role.on(device).offloaded
        return max(by_node.values())


def plan_rl(question: RLQuestion) -> RLAnswer:
    """Plan a run whose settings are valid.

    Raises:
        MegatuneError: INPUT, where nothing is known of the device's generation, or of its speed in a role's dtype.
    """
    held = shares(question)
    engine = engine_of(question, question.settings.actor_infer)
    return RLAnswer(question, tuple(held), engine, step_seconds(question, held))
