"""Reads the question of `megatune plan` on a file of reinforcement learning: options, settings, models and machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.reader import PlanReader

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.rl.settings import RLSettings
    from megatune.config.settings import Settings
    from megatune.plan.case import PlannedModel
    from megatune.plan.machine import Machine
    from megatune.plan.rl.question import Lengths, RLQuestion

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
# Of what is longest, taken for the mean where no flag says it.
_MEAN_PROMPT, _MEAN_RESPONSE = 4, 2


class RLQuestionReader(PlanReader):
    """Reads everything, and reports all that is wrong at once."""

    def question(self, file: str) -> RLQuestion:
        """Return the question.

        Raises:
            MegatuneError: SETTINGS or INPUT, with everything that is wrong.
        """
        from megatune.config.dialects.roll import read_roll
        from megatune.plan.rl.question import RLQuestion

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
        models, lengths = self._models(settings), self._lengths(settings)
        machine = self._machine(settings)
        self.stop()
        assert machine is not None
        return RLQuestion(
            settings=settings,
            models=models,
            machine=machine,
            lengths=lengths,
            notes=(*read.lines, *self.notes),
            file=file,
        )

    def _model(self, name: str, stage: str | None = None) -> PlannedModel | None:
        from megatune.plan.catalogue import find_model

        if (name, stage) not in self._known:
            self._known[name, stage] = self.found(lambda: find_model(name, stage=stage))
        return self._known[name, stage]

    def _architecture(self, settings: Settings) -> Architecture | None:
        """Return the numbers of a role's model, for the rules of its layout."""
        found = self._model(settings.model.model_name_or_path or "", settings.run.stage)
        return found.architecture if found else None

    def _models(self, settings: RLSettings) -> dict[str, PlannedModel]:
        """Return the models by role; one that judges and is not known here is left out, with a note."""
        from megatune.plan.catalogue import find_model

        roles = (settings.actor_train, settings.reference, settings.critic, *settings.teachers.values())
        found = {
            role.name: self._model(role.settings.model.model_name_or_path or "", role.settings.run.stage)
            for role in roles
            if role is not None
        }
        found[settings.actor_infer.name] = self._model(settings.actor_infer.model_name_or_path)
        for judge in (settings.reward_model, *(reward.judge for reward in settings.rewards.values())):
            if judge is not None:
                try:
                    found[judge.name] = find_model(judge.model_name_or_path, asks_hub=False)
                except MegatuneError:
                    self.notes.append(f"{judge.name}: {judge.model_name_or_path} is not known here, and not planned")
        return {name: model for name, model in found.items() if model is not None}

    def _lengths(self, settings: RLSettings) -> Lengths:
        from megatune.plan.rl.question import Lengths

        rollout = settings.rollout
        prompt = self._tokens("prompt_tokens", rollout.prompt_length, _MEAN_PROMPT)
        response = self._tokens("response_tokens", rollout.max_response_length, _MEAN_RESPONSE)
        return Lengths(rollout.prompt_length, rollout.max_response_length, prompt, response)

    def _tokens(self, name: str, longest: int, part: int) -> float:
        """Return tokens of the mean prompt or response."""
        value: float | None = getattr(self.options, name)
        if value is None:
            self.notes.append(f"the mean {name.partition('_')[0]} has {longest / part:,.0f} tokens (--{name})")
            return longest / part
        if value > longest:
            what, why = f"--{name} {value:g} is too many", f"the longest has {longest:,}"
            self.findings.append(Finding(what, "", why, f"--{name} {max(1, longest // part)}"))
            return longest / part
        return value

    def _machine(self, settings: RLSettings) -> Machine | None:
        """Return the machines: of the catalogue, or this one."""
        world = 1 + max(_devices(settings))
        if self.options.gpu is not None:
            return self.catalogued(world, self.options.gpus_per_node or settings.run.num_gpus_per_node)
        self.need_gpu()
        return self.this_machine(world, self.count_gpus())


def _devices(settings: RLSettings) -> Iterator[int]:
    """Yield the devices that roles are mapped to."""
    judges = (settings.reward_model, *(reward.judge for reward in settings.rewards.values()))
    trained = (settings.actor_train, settings.reference, settings.critic, *settings.teachers.values())
    for role in (*trained, settings.actor_infer, *judges):
        yield from role.devices if role is not None else ()
