"""Seconds of a step, phase by phase, and how long devices wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.config.rl.settings import ModelRole
from megatune.plan.flops import num_parameters
from megatune.plan.rl.decoding import Rollout, rollout_time
from megatune.plan.rl.engine import ITEMSIZE
from megatune.plan.rl.held import (
    OLD_PASS,
    REFERENCE_PASS,
    SAMPLE,
    SYNC,
    TRAIN_CRITIC,
    VALUES,
    RoleShares,
    engine_of,
    phases,
    shared_devices,
)
from megatune.plan.rl.passes import forward_case, forward_seconds, num_updates, training_case
from megatune.plan.rl.question import ROLLOUT, RLQuestion
from megatune.plan.time import step_time

OFFLOAD = "offload"
# Between a device and the main memory of its machine, one way.
HOST_BANDWIDTH = 12e9
# Of the object store, which one rank writes weights to; assumed. Two busy cores put and get 1 GB/s.
STORE_BANDWIDTH = 2e9
# Of each bucket, and of an update's beginning and end: calls of all actors. Measured: 0.05 s for a few MB.
_BUCKET_SECONDS = 0.05
# Of a network's bandwidth, by Ray's objects, which go over TCP; an assumption.
_TCP_SHARE = 0.3


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step.

    Attributes:
        phases: by name, in their order.
        rollout: how the seconds of "rollout" come about.
        overlaps: rollouts run beside everything else (async_generation_ratio on devices of their own).
        tokens: of the samples of a step.
        num_gpus: devices of the run.
        uncertainty: relative: 0.4 is from 1 / 1.4 of the total to 1.4 times it.
    """

    phases: Mapping[str, float]
    rollout: Rollout
    overlaps: bool
    tokens: float
    num_gpus: int
    uncertainty: float

    @property
    def rollout_side(self) -> float:
        """Seconds in which the devices of the rollouts work."""
        return self.phases[SAMPLE] + self.phases[SYNC]

    @property
    def trainer_side(self) -> float:
        """Seconds in which the others do."""
        return sum(self.phases.values()) - self.phases[SAMPLE]

    @property
    def total(self) -> float:
        """Seconds of a step, in the steady state where rollouts run beside training."""
        return max(self.rollout_side, self.trainer_side) if self.overlaps else sum(self.phases.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one device, prompts counted."""
        return self.tokens / self.total / self.num_gpus


# Two of three of the published runs of benchmarks/planner/published_rl.py lie within.
UNCERTAINTY = 0.4


def step_seconds(question: RLQuestion, held: list[RoleShares]) -> StepSeconds:
    """Return the seconds of a step."""
    settings, lengths = question.settings, question.lengths
    infer = settings.actor_infer
    rollout = rollout_time(
        infer,
        question.models[ROLLOUT],
        question.machine,
        lengths,
        engine_of(question, infer),
        prompts=settings.rollout.rollout_batch_size,
        group=settings.rollout.num_return_sequences_in_group,
        ahead=question.steps_ahead,
    )
    found = {phase: _seconds(question, phase, rollout) for phase in phases(question)}
    if shared_devices(question):
        found[OFFLOAD] = _moves(question, held)
    return StepSeconds(
        phases=found,
        rollout=rollout,
        overlaps=question.steps_ahead > 0,
        tokens=settings.samples_per_step * lengths.mean,
        num_gpus=question.world_size,
        uncertainty=UNCERTAINTY,
    )


def _seconds(question: RLQuestion, phase: str, rollout: Rollout) -> float:
    settings = question.settings
    actor, critic = settings.actor_train, settings.critic
    if phase == SYNC:
        return sync_seconds(question) / max(1, actor.model_update_frequency)
    if phase == SAMPLE:
        return rollout.total
    if phase == REFERENCE_PASS:
        own = _forward(question, settings.reference or actor) if settings.algorithm.enable_reference else 0.0
        return own + sum(_forward(question, teacher) for teacher in settings.teachers.values())
    if critic is not None and phase in (VALUES, TRAIN_CRITIC):
        return _forward(question, critic) if phase == VALUES else _training(question, critic)
    return _forward(question, actor) if phase == OLD_PASS else _training(question, actor)


def _forward(question: RLQuestion, role: ModelRole) -> float:
    return forward_seconds(forward_case(question, role, longest=False))


def _training(question: RLQuestion, role: ModelRole) -> float:
    return num_updates(question, role) * step_time(training_case(question, role, longest=False)).total


def sync_bytes(question: RLQuestion) -> int:
    """Return bytes of all weights, as an engine takes them; those of adapters are merged before."""
    precision = question.settings.actor_train.settings.precision.params_dtype
    size = ITEMSIZE["fp32" if precision == "float32" else "bf16"]
    return num_parameters(question.models[question.settings.actor_train.name].architecture) * size


def sync_seconds(question: RLQuestion) -> float:
    """Return seconds of a weight update: a stream of buckets, as fast as the slowest part of its way.

    From the trainer's devices to the object store, from machine to machine, and to every engine's devices.
    """
    machine, engines = question.machine, question.settings.actor_infer
    nodes = {device // machine.gpus_per_node for device in engines.devices}
    rates = [STORE_BANDWIDTH]
    if len(nodes) > 1:
        rates.append(machine.network.bandwidth * _TCP_SHARE)
    if machine.device.generation != "cpu":
        rates.append(HOST_BANDWIDTH)
    buckets = sync_bytes(question) / (question.settings.run.model_update_buffer_size_mb * 2**20)
    return sync_bytes(question) / min(rates) + _BUCKET_SECONDS * (1 + buckets)


def _moves(question: RLQuestion, held: list[RoleShares]) -> float:
    """Return seconds in which what takes turns on the busiest device leaves it, and comes back."""
    of_device = (
        sum(role.on(device).offloaded for role in held if device in role.devices)
        for device in sorted(shared_devices(question))
    )
    device = question.machine.device
    return 2 * max(of_device) / (device.bandwidth if device.generation == "cpu" else HOST_BANDWIDTH)
