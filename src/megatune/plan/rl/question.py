"""Reads the question of `megatune plan` for a file of reinforcement learning: settings, the models of the roles,
machines, and the lengths of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatune.architecture import Architecture
from megatune.config.dialects.roll import read_roll
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.config.settings import Settings
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import PlannedModel
from megatune.plan.catalogue import find_model
from megatune.plan.machine import Machine
from megatune.plan.read_question import PlanReader
from megatune.plan.rows import cut_scale

_POINTS = 64  # of the numerical integral
ACTOR, ROLLOUT, REFERENCE, CRITIC, TEACHER = "actor_train", "actor_infer", "reference", "critic", "teacher"
# Options that have no effect on a file of reinforcement learning, and why.
_NOT_HERE = {
    "gpus": "device_mapping says which devices there are",
    "seq": "prompt_length and response_length say how long samples are",
    "global_batch": "rollout_batch_size and num_return_sequences_in_group say how many samples a step has",
    "trainable": "lora_target of actor_train says what is trained",
    "document_length": "--prompt_tokens and --response_tokens say how long the mean sample is",
    "image_tokens": "prompts of text are planned",
    "dataset_tokens": "max_steps says how long a run is",
    "top": "the file's own layouts are planned, and no others are searched for",
    "output": "the file's own layouts are planned, and no others are searched for",
    "price": "one kind of GPU is planned",
    "figures": "a plan of reinforcement learning is text",
    "launch": "megatune rl starts its own processes, on Ray",
}
# The default mean of prompts and responses is the longest length divided by these.
_MEAN_PROMPT, _MEAN_RESPONSE = 4, 2


@dataclass(frozen=True)
class Lengths:
    """Lengths of the samples of a step, in tokens.

    Responses end with a constant probability at each token and are truncated at the longest length, which needs no
    parameter but the mean. If the mean is half of the longest, a fifth is truncated; if it is a quarter, 2 %.

    Attributes:
        prompt, response: the longest lengths.
        mean_prompt, mean_response: the mean lengths; the latter is below `response`.
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
        """h: the probability that a response ends at a token; its mean length is (1 - exp(-h · response)) / h."""
        return 1 / cut_scale(self.mean_response, self.response)

    @property
    def share_cut(self) -> float:
        """Share of truncated responses."""
        return math.exp(-self.hazard * self.response)

    def mean_longest(self, count: int) -> float:
        """Return the mean length of the longest of `count` samples with a mean prompt."""
        return self.mean_prompt + sum((1 - (1 - share) ** count) * width for _, share, width in self.steps())

    def steps(self) -> list[tuple[float, float, float]]:
        """Return (tokens, share still sampled, width) for intervals of a response up to the longest length."""
        step = self.response / _POINTS
        middles = ((point + 0.5) * step for point in range(_POINTS))
        return [(tokens, math.exp(-self.hazard * tokens), step) for tokens in middles]


def teacher_inside(settings: RLSettings) -> ModelRole | None:
    """Return the teacher in the processes of actor_train as a role with the same batches, or None."""
    actor = settings.actor_train
    if actor.teacher is None:
        return None
    return actor.model_copy(update={"name": TEACHER, "settings": actor.teacher, "training": False, "teacher": None})


def world_size(settings: RLSettings) -> int:
    """Return the number of devices: one more than the largest in a device_mapping."""
    return 1 + max(device for role in (*settings.models, *settings.samplers) for device in role.devices)


@dataclass(frozen=True, kw_only=True)
class RLQuestion:
    """A question to the planner.

    Attributes:
        models: by the role's name, without judges whose model is unknown.
        machine: its devices have the numbers of device_mapping, one machine after the other.
        notes: assumptions, in sentences.
        file: the settings file.
    """

    settings: RLSettings
    models: Mapping[str, PlannedModel]
    machine: Machine
    lengths: Lengths
    notes: tuple[str, ...] = ()
    file: str | None = None

    @property
    def steps_ahead(self) -> float:
        """Steps that rollouts run ahead of training on separate devices; 0 if devices are shared."""
        infer = self.settings.actor_infer.devices
        apart = all(set(role.devices).isdisjoint(infer) for role in self.settings.models)
        return self.settings.rollout.async_generation_ratio if apart else 0.0

    @property
    def world_size(self) -> int:
        """Devices of the run, see `world_size`."""
        return world_size(self.settings)


class RLQuestionReader(PlanReader):
    """Reads an `RLQuestion`."""

    def question(self, file: str) -> RLQuestion:
        """Read the file, its models and the machines, and check them together.

        Raises:
            MegatuneError: SETTINGS or INPUT, with everything that is wrong.
        """
        self._known: dict[tuple[str, str | None], PlannedModel | None] = {}
        overrides = [word for word in self.given.words if "=" in word]
        fix = "write overrides as key=value, such as rollout_batch_size=32"
        self.findings.extend(
            Finding(f"{word!r} has no effect on a file of reinforcement learning", fix=fix)
            for word in self.given.words
            if word != file and word not in overrides
        )
        self.refuse(_NOT_HERE, f" with {file}")
        read = read_roll(file, overrides, self._architecture)
        self.findings.extend(read.findings)
        if (settings := read.settings) is None:
            raise MegatuneError([*self.findings, *self.missing], ExitCode.SETTINGS)
        rollout, models = settings.rollout, self._models(settings)
        prompt = self._tokens("prompt_tokens", rollout.prompt_length, _MEAN_PROMPT)
        response = self._tokens("response_tokens", rollout.max_response_length, _MEAN_RESPONSE)
        lengths = Lengths(rollout.prompt_length, rollout.max_response_length, prompt, response)
        machine = self._machine(settings)
        self.stop()
        assert machine is not None
        notes = (*read.lines, *self.notes)
        return RLQuestion(settings=settings, models=models, machine=machine, lengths=lengths, notes=notes, file=file)

    def _model(self, name: str, stage: str | None = None) -> PlannedModel | None:
        if (name, stage) not in self._known:
            self._known[name, stage] = self.found(lambda: find_model(name, stage=stage))
        return self._known[name, stage]

    def _architecture(self, settings: Settings, stage: str) -> Architecture | None:
        """Return the architecture of a role's model, for the rules of its layout."""
        found = self._model(settings.model.model_name_or_path or "", stage)
        return found.architecture if found else None

    def _models(self, settings: RLSettings) -> dict[str, PlannedModel]:
        """Return the models by role; unknown models of judges are left out, with a note."""
        found = {
            role.name: self._model(role.settings.model.model_name_or_path or "", role.settings.run.stage)
            for role in (*settings.models, teacher_inside(settings))
            if role is not None
        }
        policy, *judges = settings.samplers
        found[policy.name] = self._model(policy.model_name_or_path)
        for judge in judges:
            try:
                found[judge.name] = find_model(judge.model_name_or_path, asks_hub=False)
            except MegatuneError:
                self.notes.append(f"{judge.name}: {judge.model_name_or_path} is unknown here, and not planned")
        return {name: model for name, model in found.items() if model is not None}

    def _tokens(self, name: str, longest: int, part: int) -> float:
        """Return the mean tokens of a prompt or response."""
        value: float | None = getattr(self.options, name)
        if value is None:
            self.notes.append(
                f"the mean {name.partition('_')[0]} has {counted(round(longest / part), 'token')} (--{name})"
            )
            return longest / part
        if value > longest:
            what, why = f"--{name} {value:g} is too large", f"the longest has {longest:,}"
            self.findings.append(Finding(what, "", why, f"--{name} {max(1, longest // part)}"))
            return longest / part
        return value

    def _machine(self, settings: RLSettings) -> Machine | None:
        """Return the machine of --gpu, or this one."""
        world = world_size(settings)
        if self.options.gpu is not None:
            return self.catalogued(world, self.options.gpus_per_node or settings.run.num_gpus_per_node)
        self.need_gpu()
        return self.this_machine(world, self.count_gpus())
