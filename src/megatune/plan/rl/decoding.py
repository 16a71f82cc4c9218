"""Seconds in which engines sample the responses of a step.

A decoding step reads the weights that its sequences meet and their keys and values, computes two FLOP a weight and
sequence, adds up over the engine's devices twice a layer, and costs the host what scheduling and sampling take. All of
that follows from the model and the device; what the host takes is a figure of each engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatune.architecture import Architecture
from megatune.config.rl.settings import InferRole
from megatune.plan.case import PlannedModel
from megatune.plan.flops import num_matmul_parameters, num_parameters
from megatune.plan.machine import Machine
from megatune.plan.rl.engine import (
    ITEMSIZE,
    TORCH_NAMES,
    EngineMemory,
    cache_shards,
    key_value_bytes,
)
from megatune.plan.rl.question import Lengths
from megatune.plan.time.rates import Rates

# Of the memory's bandwidth, by products of a few rows and attention of one query; those of experts reach the share of
# it that grouped products do of others (`Efficiency.grouped`).
_READING = 0.7
# Of the peak, by the products of a prefill; they are not as large as those of training.
_PREFILL = 0.5


@dataclass(frozen=True, slots=True)
class EngineHost:
    """What an engine's host takes for a decoding step, and for each sequence in it, in seconds.

    Attributes:
        launches: operators of a layer that are launched one by one; 0 where the step is a captured graph.
    """

    step: float
    sequence: float
    launches: int = 0


# Assumed, of the engines' own profiles: scheduling, sampling and detokenizing. Built in is Transformers' forward pass.
HOSTS = {
    "vllm": EngineHost(step=2.5e-3, sequence=12e-6),
    "sglang": EngineHost(step=2.0e-3, sequence=10e-6),
    "builtin": EngineHost(step=1.5e-3, sequence=20e-6, launches=20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Seconds of the rollouts of a step, and how they come about.

    Attributes:
        prefill: of prompts, once a group where the engine finds them in its cache.
        decode: until the last response has ended.
        full: of `decode`, while as many sequences are sampled as fit; after that fewer and fewer are.
        at_once: sequences that an engine samples while all places are taken.
        busy_step, last_step: of one token of each sequence, with all of them and with the last one.
    """

    prefill: float
    decode: float
    full: float
    at_once: float
    busy_step: float
    last_step: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def rollout_time(
    role: InferRole,
    model: PlannedModel,
    machine: Machine,
    lengths: Lengths,
    memory: EngineMemory,
    *,
    prompts: int,
    group: int,
    ahead: float = 0.0,
) -> Rollout:
    """Return the seconds of one engine with an even share of the step's samples.

    Samples that wait for a place are sampled while all places are taken; then the places empty. Where rollouts run
    ahead places are never empty, but a response of the longest length may not take longer than it may be old.

    Args:
        prompts: of a step.
        group: responses of each.
        ahead: steps that samples may be old, async_generation_ratio.
    """
    engine = _Engine(role, model.architecture, machine)
    samples = prompts * group / role.num_engines
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
    calibration = machine.calibration
    prefill = engine.prefill(samples / (group if cached else 1) * lengths.mean_prompt)
    return Rollout(
        prefill=calibration.compute * prefill,
        decode=calibration.compute * (full + tail),
        full=calibration.compute * full,
        at_once=at_once,
        busy_step=busy,
        last_step=engine.step(1.0, lengths.longest),
    )


class _Engine:
    """One engine's devices, and what they read and compute for a token."""

    def __init__(self, role: InferRole, architecture: Architecture, machine: Machine) -> None:
        self.architecture, self.devices, self.host = architecture, role.devices_per_engine, HOSTS[role.engine]
        self.size = ITEMSIZE[role.dtype]
        self.rates = Rates.of(machine, TORCH_NAMES[role.dtype])
        self.crosses = self.devices > machine.gpus_per_node
        self.link = machine.network if self.crosses else machine.link
        self.on_cpu = machine.device.generation == "cpu"
        self.active = num_matmul_parameters(architecture)
        self.experts, self.others = _split(architecture)
        cached = key_value_bytes(architecture, self.size)
        self.of_token = cached / cache_shards(architecture, self.devices)

    def step(self, sequences: float, context: float) -> float:
        """Return seconds of one token of each sequence, with so many tokens before it."""
        experts = self.experts * self._met(sequences) / self.rates.efficiency.grouped
        read = (self.others + experts) * self.size / self.devices
        moved = (read + sequences * context * self.of_token) / (self.rates.bandwidth * _READING)
        computed = 2 * self.active * sequences / self.devices / self.rates.dense
        on_device = max(moved, computed) + self._exchange(sequences)
        launched = self.host.launches * self.architecture.num_layers * self.rates.efficiency.launch
        return max(on_device, launched) + self.host.step + self.host.sequence * sequences

    def prefill(self, tokens: float) -> float:
        """Return seconds of the prompts of an engine."""
        return 2 * self.active * tokens / self.devices / (self.rates.peak * _PREFILL)

    def _met(self, sequences: float) -> float:
        """Return the share of the experts that any of the sequences goes to, if each chooses evenly."""
        moe = self.architecture.moe
        return 1 - (1 - moe.router_topk / moe.num_experts) ** sequences if moe is not None else 0.0

    def _exchange(self, sequences: float) -> float:
        """Return seconds of two all-reduces a layer."""
        if self.devices == 1:
            return 0.0
        message = sequences * self.architecture.hidden_size * self.size
        once = 2 * message / (self.link.bandwidth * self.rates.efficiency.link) + 2 * self.link.latency
        return 2 * self.architecture.num_layers * once


def _split(architecture: Architecture) -> tuple[int, int]:
    """Return parameters of routed experts, and of all other matrices that a token meets."""
    whole, moe = num_parameters(architecture), architecture.moe
    table = 0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size
    if moe is None:
        return 0, whole - table  # of the word embedding a few rows are read
    experts = sum(moe.layers) * moe.num_experts * 3 * architecture.hidden_size * moe.moe_ffn_hidden_size
    return experts, whole - table - experts
