"""What each role holds of its devices in each phase of a step: active, or asleep while other roles use the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.plan.memory.estimate import StageMemory, stage_memory
from megatune.plan.rl.engine import EngineMemory, engine_memory
from megatune.plan.rl.passes import forward_case, forward_memory, training_case
from megatune.plan.rl.question import ACTOR, CRITIC, REFERENCE, ROLLOUT, RLQuestion

SYNC, SAMPLE, REFERENCE_PASS, OLD_PASS, VALUES, TRAIN_CRITIC, TRAIN = PHASES = (
    "sync", "rollout", "reference", "old log-probs", "values", "train critic", "train",
)  # fmt: skip
# In which phases a role is active; it sleeps in the others.
_ALL = {ACTOR: (SYNC, OLD_PASS, TRAIN), ROLLOUT: (SYNC, SAMPLE), REFERENCE: (REFERENCE_PASS,),
        CRITIC: (VALUES, TRAIN_CRITIC)}  # fmt: skip
# Whole tensors of a bucket of the weight update: gathered, and as they are handed over.
_BUCKETS = 2


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one role on one of its devices.

    Attributes:
        parts: by phase, each part by its name.
        offloaded: bytes that it has in main memory while it sleeps.
    """

    role: str
    parts: Mapping[str, Mapping[str, int]]
    offloaded: int = 0

    def total(self, phase: str) -> int:
        return sum(self.parts[phase].values())


@dataclass(frozen=True, slots=True)
class RoleShares:
    """A role's devices.

    Attributes:
        of_place: by pipeline stage; all devices of a stage hold as much. Others than trainers have one.
    """

    role: str
    devices: tuple[int, ...]
    of_place: tuple[Held, ...]

    def on(self, device: int) -> Held:
        """Return what is on one of `devices`: stages are whole runs of ranks."""
        return self.of_place[self.devices.index(device) * len(self.of_place) // len(self.devices)]


def phases(question: RLQuestion) -> tuple[str, ...]:
    """Return the phases that a step has, in their order."""
    settings, found = question.settings, [SYNC, SAMPLE]
    if settings.algorithm.enable_reference or settings.teachers:
        found.append(REFERENCE_PASS)
    if settings.algorithm.enable_old_logprobs_recompute:
        found.append(OLD_PASS)
    found += [VALUES, TRAIN_CRITIC] if settings.critic is not None else []
    return (*found, TRAIN)


def engine_of(question: RLQuestion, role: InferRole) -> EngineMemory:
    """Return the memory of an engine of a role; a built-in judge samples as many at once as it is told to."""
    settings = question.settings
    is_judge = role.name != ROLLOUT and role.engine == "builtin"
    return engine_memory(
        role,
        question.models[role.name],
        question.machine,
        question.lengths,
        samples=round(settings.samples_per_step * (1 + question.steps_ahead)),
        max_running=role.infer_batch_size if is_judge else settings.rollout.max_running_requests,
    )


def shares(question: RLQuestion) -> list[RoleShares]:
    """Return what every role holds."""
    roles = [_of_trainer(question, role) for role in question.model_roles]
    return [*roles, *(_of_engine(question, role) for role in question.infer_roles if role.name in question.models)]


def shared_devices(question: RLQuestion) -> frozenset[int]:
    """Return devices that models, rollouts and judges take turns on."""
    seen: set[int] = set()
    twice: set[int] = set()
    samplers = (role.devices for role in question.infer_roles)
    for devices in (*(role.devices for role in question.model_roles), *samplers):
        twice |= seen & set(devices)
        seen |= set(devices)
    return frozenset(twice)


def _of_trainer(question: RLQuestion, role: ModelRole) -> RoleShares:
    takes_turns = not shared_devices(question).isdisjoint(role.devices)
    on_cpu = question.machine.device.generation == "cpu"
    forward = forward_memory(forward_case(question, role, longest=True))
    training = stage_memory(training_case(question, role, longest=True)) if role.training else forward
    bucket = _BUCKETS * question.settings.run.model_update_buffer_size_mb * 2**20

    def held(passing: StageMemory, trained: StageMemory) -> Held:
        # Communicators and the device's context stay. Gradients are not kept, so that they need no room elsewhere.
        stays = {"framework": trained.framework + trained.communication}
        state = {name: size for name in _STATE if (size := getattr(trained, name))}
        moved = {name: size for name, size in state.items() if name != "gradients"}
        asleep = {**state, **stays} if not takes_turns else {**moved, **stays} if on_cpu else stays
        # For a pass without gradients the weights alone come back.
        light = {**asleep, "weights": trained.weights}
        working = {"activations": passing.activations + passing.logits_and_loss, **light}
        activations = trained.activations + trained.logits_and_loss + trained.expert_imbalance
        full = {**state, "activations": activations, **stays}
        if takes_turns and on_cpu:  # copies are made before what was copied is freed
            full["copies"] = max(0, sum(moved.values()) - activations)
        by_phase = {SYNC: {**light, "buckets": bucket}, REFERENCE_PASS: working, OLD_PASS: working, VALUES: working,
                    TRAIN_CRITIC: full, TRAIN: full}  # fmt: skip
        active = _active(question, role)
        parts = {phase: by_phase[phase] if phase in active else asleep for phase in phases(question)}
        return Held(role.name, parts, sum(moved.values()) if takes_turns else 0)

    return RoleShares(role.name, role.devices, tuple(map(held, forward, training)))


_STATE = ("weights", "gradients", "master_weights", "optimizer_state")


def _active(question: RLQuestion, role: ModelRole) -> tuple[str, ...]:
    """Return the phases in which a role computes. Without a reference of its own a LoRA run's actor switches off its
    adapters."""
    active = _ALL.get(role.name, (REFERENCE_PASS,))
    stands_in = role.name == ACTOR and question.settings.reference is None
    return (*active, REFERENCE_PASS) if stands_in else active


def _of_engine(question: RLQuestion, role: InferRole) -> RoleShares:
    """Return what an engine holds: it sleeps where its devices are shared, and that of the policy is updated."""
    memory, on_cpu = engine_of(question, role), question.machine.device.generation == "cpu"
    sleeps = not shared_devices(question).isdisjoint(role.devices)
    weights, framework = {"weights": memory.weights}, {"framework": memory.framework}
    working = {**weights, "KV cache": max(0, memory.cache), "activations": memory.workspace, **framework}
    bucket = {"buckets": question.settings.run.model_update_buffer_size_mb * 2**20}
    # Level 1 moves weights to main memory, which is a CPU's own; the built-in engine leaves them where they are.
    keeps = role.name != ROLLOUT or question.settings.sleep_level == 1
    stays = keeps and (on_cpu or role.engine == "builtin")
    asleep = working if not sleeps else {**weights, **framework} if stays else framework
    offloaded = memory.weights if sleeps and keeps and not stays else 0
    # Where devices are shared the cache wakes once the weights are there, and the trainer has left.
    updated = {**weights, **framework} if sleeps else working
    by_phase = {SYNC: {**updated, **bucket}, SAMPLE: working} if role.name == ROLLOUT else {SAMPLE: working}
    parts = {phase: by_phase.get(phase, asleep) for phase in phases(question)}
    return RoleShares(role.name, role.devices, (Held(role.name, parts, offloaded),))
