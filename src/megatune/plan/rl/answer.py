"""Plans a run of reinforcement learning: bytes of every device in every phase, and seconds of each phase of a step.

A decoding step reads the weights that its sequences use and their KV cache, computes two FLOP per weight and sequence,
has two all-reduces per layer over the engine's devices, and takes the host some time for scheduling and sampling. All
of it follows from the model and the device, except for the host's time, which is a constant of each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatune.architecture import Architecture
from megatune.config.rl.settings import InferRole, ModelRole
from megatune.plan.flops import num_matmul_parameters, num_parameters
from megatune.plan.machine import Machine
from megatune.plan.rl.question import ROLLOUT, RLQuestion, teacher_inside
from megatune.plan.rl.roles import (
    ITEMSIZE,
    OLD_PASS,
    REFERENCE_PASS,
    SAMPLE,
    SCORES,
    SYNC,
    TRAIN_CRITIC,
    VALUES,
    EngineMemory,
    RoleDevices,
    RoleMemory,
    cache_shards,
    engine_of,
    forward_case,
    key_value_bytes,
    memory_of_roles,
    num_updates,
    phases,
    shared_devices,
    sync_bytes,
    training_case,
)
from megatune.plan.time import step_time
from megatune.plan.time.efficiency import Rates

OFFLOAD = "offload"
# Two of three published runs of benchmarks/planner/published_rl.py are between 1 / 1.4 and 1.4 times the plan.
UNCERTAINTY = 0.4
# Bytes/s between a device and the main memory of its machine, in one direction.
HOST_BANDWIDTH = 12e9
# Bytes/s of weights that are gathered tensor by tensor and sent to engines on GPUs: verl publishes 8.25 GB/s from 32
# GPUs to 30 receivers, slime 8.6 GB/s for colocated engines, both for Qwen3-30B-A3B.
SYNC_BANDWIDTH = 8.5e9
# Bytes/s of weights between processes on a CPU, through shared memory; measured with one thread.
MAPPED_BANDWIDTH = 0.8e9
# Seconds of each bucket, and of an update's start and end, for calls of all actors; measured with a few MB.
_BUCKET_SECONDS = 0.05
# Share of a network's bandwidth that gloo reaches over TCP; an assumption.
_TCP_SHARE = 0.3
# Share of the memory bandwidth in products of a few rows and attention of one query; products of experts are slower by
# `Efficiency.grouped`.
_READING = 0.7
# Share of the peak in the products of a prefill, which are smaller than those of training.
_PREFILL = 0.5
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Seconds of an engine's host for a decoding step and for each sequence in it (scheduling, sampling, detokenizing), and
# launches per layer, 0 with CUDA graphs. Assumed from profiles of the engines; the built-in one is Transformers'
# forward pass.
_HOSTS = {"vllm": (2.5e-3, 12e-6, 0), "sglang": (2.0e-3, 10e-6, 0), "builtin": (1.5e-3, 20e-6, 20)}


@dataclass(frozen=True)
class DeviceGroup:
    """Devices with the same content: their numbers, and the memory of each role on them."""

    devices: tuple[int, ...]
    held: tuple[RoleMemory, ...]

    def total(self, phase: str) -> int:
        """Return the bytes of a device in a phase."""
        return sum(each.total(phase) for each in self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Seconds of the rollouts of a step.

    Attributes:
        prefill: of prompts; once per group if the engine has a prefix cache.
        decode: until the last response has ended.
        full: the part of `decode` in which all slots are used; after that the slots empty.
        at_once: sequences that an engine samples while all slots are used.
        busy_step, last_step: for one token of each sequence, with all slots used and with the last sequence.
    """

    prefill: float
    decode: float
    full: float
    at_once: float
    busy_step: float
    last_step: float


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step.

    Attributes:
        phases: by name, in their order.
        rollout: details of the phase "rollout".
        overlaps: whether rollouts run concurrently with the other phases (async_generation_ratio on separate devices).
    """

    phases: Mapping[str, float]
    rollout: Rollout
    overlaps: bool

    @property
    def rollout_side(self) -> float:
        """Seconds in which the devices of the rollouts are busy."""
        return self.phases[SAMPLE] + self.phases[SYNC]

    @property
    def trainer_side(self) -> float:
        """Seconds in which the other devices are busy."""
        return sum(self.phases.values()) - self.phases[SAMPLE]

    @property
    def total(self) -> float:
        """Seconds of a step, in the steady state if rollouts run concurrently."""
        return max(self.rollout_side, self.trainer_side) if self.overlaps else sum(self.phases.values())


@dataclass(frozen=True)
class RLAnswer:
    """The answer of the planner: the memory of each role, that of a rollout engine, and the seconds of a step."""

    question: RLQuestion
    roles: tuple[RoleDevices, ...]
    engine: EngineMemory
    seconds: StepSeconds

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases that a step has, in their order."""
        return phases(self.question)

    @cached_property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Groups of devices with the same content, by their first device."""
        groups: dict[tuple[int, ...], DeviceGroup] = {}
        for device in range(self.question.world_size):
            held = tuple(role.on(device) for role in self.roles if device in role.devices)
            key = tuple(map(id, held))
            groups[key] = DeviceGroup((*(groups[key].devices if key in groups else ()), device), held)
        return tuple(group for group in groups.values() if group.held)

    @cached_property
    def fullest(self) -> tuple[DeviceGroup, str]:
        """The group of devices with the most memory, and the phase in which it is used."""
        pairs = ((group, phase) for group in self.groups for phase in self.phases)
        return max(pairs, key=lambda pair: pair[0].total(pair[1]))

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory, and the KV cache of an engine holds the longest sample."""
        group, phase = self.fullest
        return group.total(phase) <= self.question.machine.device.memory and self.has_cache

    @property
    def has_cache(self) -> bool:
        """Whether the KV cache of an engine holds the longest sample."""
        return self.engine.cached_tokens >= self.question.lengths.longest

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded roles in the main memory of the fullest machine."""
        by_node: dict[int, int] = {}
        for role in self.roles:
            for device in role.devices:
                node = device // self.question.machine.gpus_per_node
                by_node[node] = by_node.get(node, 0) + role.on(device).offloaded
        return max(by_node.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole run, including prompts."""
        return self.question.settings.samples_per_step * self.question.lengths.mean / self.seconds.total


def plan_rl(question: RLQuestion) -> RLAnswer:
    """Plan a run whose settings are valid.

    Raises:
        MegatuneError: INPUT if the device's generation, or its speed in a role's dtype, is unknown.
    """
    held, engine = memory_of_roles(question), engine_of(question, question.settings.actor_infer)
    rollout = _rollout(question, engine)
    found = {phase: _seconds(question, phase, rollout) for phase in phases(question)}
    if shared_devices(question):
        found[OFFLOAD] = _offload_seconds(question, held)
    return RLAnswer(question, tuple(held), engine, StepSeconds(found, rollout, question.steps_ahead > 0))


def _seconds(question: RLQuestion, phase: str, rollout: Rollout) -> float:
    settings = question.settings
    actor, critic = settings.actor_train, settings.critic
    sampled = settings.algorithm.opd_lmbda  # share of steps with rollouts; the others send no weights either
    if phase == SYNC:
        return sampled * _sync_seconds(question) / max(1, actor.model_update_frequency)
    if phase == SAMPLE:
        return sampled * (rollout.prefill + rollout.decode)
    if phase == SCORES:
        return sum(_forward(question, scorer) for scorer in settings.scorers.values())
    if phase == REFERENCE_PASS:
        own = _forward(question, settings.reference or actor) if settings.algorithm.enable_reference else 0.0
        return own + sum(_forward(question, teacher) for teacher in settings.teachers.values())
    if critic is not None and phase in (VALUES, TRAIN_CRITIC):
        return _forward(question, critic) if phase == VALUES else _training(question, critic)
    return _forward(question, actor) if phase == OLD_PASS else _training(question, actor)


def _forward(question: RLQuestion, role: ModelRole) -> float:
    """Return the seconds of a pass without gradients over the samples of a step."""
    return step_time(forward_case(question, role, longest=False)).forward


def _training(question: RLQuestion, role: ModelRole) -> float:
    found, teacher = step_time(training_case(question, role, longest=False)).total, teacher_inside(question.settings)
    if role.teacher is not None and teacher is not None:  # a forward pass over the tokens of an update
        found += step_time(training_case(question, teacher, longest=False)).forward
    return num_updates(question, role) * found


def _sync_seconds(question: RLQuestion) -> float:
    """Return the seconds of a weight update: buckets at the rate of the slowest link (`rl.transport`).

    On GPUs ranks gather whole tensors, which engines on the same GPUs read; to other engines one rank broadcasts them.
    """
    machine, settings = question.machine, question.settings
    used = {*settings.actor_train.devices, *settings.actor_infer.devices}
    rates = [MAPPED_BANDWIDTH if machine.device.on_cpu else SYNC_BANDWIDTH]
    if len({device // machine.gpus_per_node for device in used}) > 1:
        rates.append(machine.network.bandwidth * (_TCP_SHARE if machine.device.on_cpu else 1.0))
    buckets = sync_bytes(question) / (question.settings.run.model_update_buffer_size_mb * 2**20)
    return sync_bytes(question) / min(rates) + _BUCKET_SECONDS * (1 + buckets)


def _offload_seconds(question: RLQuestion, held: list[RoleDevices]) -> float:
    """Return the seconds to offload and reload the time-sharing roles of the busiest device."""
    of_device = (
        sum(role.on(device).offloaded for role in held if device in role.devices) for device in shared_devices(question)
    )
    device = question.machine.device
    return 2 * max(of_device) / (device.bandwidth if device.on_cpu else HOST_BANDWIDTH)


def _rollout(question: RLQuestion, memory: EngineMemory) -> Rollout:
    """Return the seconds of one engine with an even share of the step's samples.

    While samples wait, all slots are used; then the slots empty. If rollouts run ahead, slots are never empty, but the
    longest response must not take longer than the allowed staleness.
    """
    role, lengths, ahead = question.settings.actor_infer, question.lengths, question.steps_ahead
    engine = _Engine(role, question.models[ROLLOUT].architecture, question.machine)
    samples = question.settings.samples_per_step / role.num_engines
    at_once = min(samples * (1 + ahead), memory.sequences)
    age = lengths.mean_prompt + lengths.mean_response / 2
    busy = engine.step(at_once, age)
    if ahead:
        full, tail = samples * lengths.mean_response / at_once * busy, 0.0
        full = max(full, lengths.response * busy / (1 + ahead))
    else:
        waiting = samples > at_once
        full = (samples - at_once) * lengths.mean_response / at_once * busy
        tail = sum(
            width * engine.step(max(1.0, at_once * share), age if waiting else lengths.mean_prompt + tokens)
            for tokens, share, width in lengths.steps()
        )
    cached = role.engine != "builtin" and role.config.get("enable_prefix_caching", True)
    group = question.settings.rollout.num_return_sequences_in_group if cached else 1
    compute = question.machine.calibration.compute
    return Rollout(
        prefill=compute * engine.prefill(samples / group * lengths.mean_prompt),
        decode=compute * (full + tail),
        full=compute * full,
        at_once=at_once,
        busy_step=busy,
        last_step=engine.step(1.0, lengths.longest),
    )


class _Engine:
    """One engine's devices, and their memory traffic and computation for a token."""

    def __init__(self, role: InferRole, architecture: Architecture, machine: Machine) -> None:
        self.architecture, self.devices, self.host = architecture, role.devices_per_engine, _HOSTS[role.engine]
        self.size = ITEMSIZE[role.dtype]
        self.rates = Rates.of(machine, _TORCH_NAMES[role.dtype])
        self.link = machine.network if self.devices > machine.gpus_per_node else machine.link
        self.active = num_matmul_parameters(architecture)
        self.experts, self.others = _split(architecture)
        self.of_token = key_value_bytes(architecture, self.size) / cache_shards(architecture, self.devices)

    def step(self, sequences: float, context: float) -> float:
        """Return the seconds of one token for each sequence, with `context` tokens before it."""
        moe, used = self.architecture.moe, 0.0
        if moe is not None:  # the share of the experts that any of the sequences uses, with uniform routing
            used = 1 - (1 - moe.router_topk / moe.num_experts) ** sequences
        experts = self.experts * used / self.rates.efficiency.grouped
        read = (self.others + experts) * self.size / self.devices
        moved = (read + sequences * context * self.of_token) / (self.rates.bandwidth * _READING)
        computed = 2 * self.active * sequences / self.devices / self.rates.dense
        on_device = max(moved, computed) + self._exchange(sequences)
        of_step, of_sequence, launches = self.host
        launched = launches * self.architecture.num_layers * self.rates.efficiency.launch
        return max(on_device, launched) + of_step + of_sequence * sequences

    def prefill(self, tokens: float) -> float:
        """Return the seconds of the prompts of an engine."""
        return 2 * self.active * tokens / self.devices / (self.rates.peak * _PREFILL)

    def _exchange(self, sequences: float) -> float:
        """Return the seconds of two all-reduces per layer."""
        if self.devices == 1:
            return 0.0
        message = sequences * self.architecture.hidden_size * self.size
        once = 2 * message / (self.link.bandwidth * self.rates.efficiency.link) + 2 * self.link.latency
        return 2 * self.architecture.num_layers * once


def _split(architecture: Architecture) -> tuple[int, int]:
    """Return the number of parameters in routed experts, and in all other matrices that a token uses."""
    whole, moe = num_parameters(architecture), architecture.moe
    table = 0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size
    if moe is None:
        return 0, whole - table  # only few rows of the word embedding are read
    experts = sum(moe.layers) * moe.num_experts * 3 * architecture.hidden_size * moe.moe_ffn_hidden_size
    return experts, whole - table - experts
