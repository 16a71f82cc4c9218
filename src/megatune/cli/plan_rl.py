"""`megatune plan` of a file of reinforcement learning: flags, settings, models and machines as a question, answered."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatune.cli.collected import Collected
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.rl.settings import RLSettings
    from megatune.config.settings import Settings
    from megatune.plan.case import PlannedModel
    from megatune.plan.machine import Machine
    from megatune.plan.rl.lengths import Lengths
    from megatune.plan.rl.question import RLQuestion

# Flags that a file of reinforcement learning has no use for, and why.
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
    "figures": "a plan of reinforcement learning is text",
    "launch": "megatune rl starts its own processes, on Ray",
}
# Of what is longest, taken for the mean where no flag says it.
_MEAN_PROMPT, _MEAN_RESPONSE = 4, 2


def run(file: str, words: list[str], add_options: Callable[[argparse.ArgumentParser], None]) -> int:
    """Plan the file and print.

    Raises:
        MegatuneError: SETTINGS or INPUT, with everything that is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser)
    options, rest = parser.parse_known_args(words)
    found = _Reader(options, file, rest).question()

    from megatune.plan.rl.answer import plan_rl

    answer = plan_rl(found)
    if options.json:
        from megatune.plan.rl.document import document

        print(json.dumps(document(answer), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from megatune.plan.rl.pages import show

        show(answer)
    return ExitCode.DONE if answer.fits else ExitCode.OUT_OF_MEMORY


class _Reader(Collected):
    """Reads everything, and reports all that is wrong at once."""

    def __init__(self, options: argparse.Namespace, file: str, words: list[str]) -> None:
        super().__init__()
        self.options, self.file = options, file
        self.notes: list[str] = []
        self.overrides = [word for word in words if "=" in word and not word.startswith("-")]
        self._known: dict[tuple[str, str | None], PlannedModel | None] = {}
        others = [word for word in words if word != file and word not in self.overrides]
        for word in [word for word in others if word.startswith("-")] or others:  # not the values of unknown flags
            fix = "write overrides as key=value, such as rollout_batch_size=32"
            self.findings.append(Finding(f"{word!r} says nothing to a file of reinforcement learning", fix=fix))
        for name, why in _NOT_HERE.items():
            if getattr(options, name) is not None:
                self.findings.append(Finding(f"--{name} with {file}", "", why, f"leave --{name} out"))

    def question(self) -> RLQuestion:
        """Return the question.

        Raises:
            MegatuneError: see `run`.
        """
        from megatune.config.dialects.roll import read_roll
        from megatune.plan.rl.question import RLQuestion

        read = read_roll(self.file, self.overrides, self._architecture)
        self.findings += read.findings
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
            file=self.file,
        )

    def _model(self, name: str, stage: str | None = None) -> PlannedModel | None:
        from megatune.plan.catalogue import find_model

        if (name, stage) not in self._known:
            self._known[name, stage] = self.found(lambda: find_model(name, stage=stage))
        return self._known[name, stage]

    def _architecture(self, settings: Settings) -> tuple[Architecture | None, Mapping[str, Any]]:
        """Return the numbers of a role's model, for the rules of its layout."""
        found = self._model(settings.model.model_name_or_path or "", settings.run.stage)
        return (found.architecture if found else None), {}

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
        from megatune.plan.rl.lengths import Lengths

        rollout = settings.rollout
        prompt = self._tokens("prompt_tokens", rollout.prompt_length, _MEAN_PROMPT)
        response = self._tokens("response_tokens", rollout.max_response_length, _MEAN_RESPONSE)
        return Lengths(rollout.prompt_length, rollout.max_response_length, prompt, response)

    def _tokens(self, name: str, longest: int, part: int) -> float:
        """Return tokens of the mean prompt or response."""
        text = getattr(self.options, name)
        if text is None:
            self.notes.append(f"the mean {name.partition('_')[0]} has {longest / part:,.0f} tokens (--{name})")
            return longest / part
        try:
            value = float(text.replace("_", "").replace(",", ""))
        except ValueError:
            value = math.nan
        if not 1 <= value <= longest:
            what, why = f"--{name} {text} is no number of tokens", f"the longest has {longest:,}"
            self.findings.append(Finding(what, "", why, f"--{name} {max(1, longest // part)}"))
            return longest / part
        return value

    def _machine(self, settings: RLSettings) -> Machine | None:
        """Return the machines: of the catalogue, or this one."""
        options, world = self.options, 1 + max(_devices(settings))
        if options.gpu is not None:
            return self.found(lambda: self._catalogued(settings, world))
        from megatune.cli.this_machine import this_machine
        from megatune.launch.devices import count_gpus

        for name in ("gpus_per_node", "link", "network", "devices"):
            if getattr(options, name) is not None:
                self.findings.append(Finding(f"--{name} without --gpu", fix="--gpu KIND, such as --gpu h100-80g"))
        num_gpus = count_gpus()
        here = min(world, num_gpus) if num_gpus else world
        machine, unknown = self.found(lambda: this_machine(here, num_gpus, options.calibration)) or (None, "")
        if unknown:
            self.missing.append(Finding(unknown, fix="--gpu KIND, one of the catalogue or of --devices FILE"))
        return machine

    def _catalogued(self, settings: RLSettings, world: int) -> Machine:
        from megatune.plan.calibration import calibration_for
        from megatune.plan.catalogue import find_machine, machine_assumptions

        options, asked = self.options, self.options.gpus_per_node
        if asked is not None and not (asked.isdigit() and int(asked)):
            finding = Finding(f"--gpus_per_node {asked} is not a whole number of at least 1", fix="--gpus_per_node 8")
            raise MegatuneError(finding, ExitCode.SETTINGS)
        per_node = int(asked) if asked else settings.run.num_gpus_per_node
        machine = find_machine(
            options.gpu,
            gpus_per_node=per_node,
            link=options.link,
            network=options.network,
            devices_file=options.devices,
        )
        self.notes += machine_assumptions(
            machine,
            gpus_per_node=per_node,
            link=options.link if world > 1 else machine.link.name,
            network=options.network if world > per_node else machine.network.name,
        )
        return replace(machine, calibration=calibration_for(machine.device.name, options.calibration))


def _devices(settings: RLSettings) -> Iterator[int]:
    """Yield the devices that roles are mapped to."""
    judges = (settings.reward_model, *(reward.judge for reward in settings.rewards.values()))
    trained = (settings.actor_train, settings.reference, settings.critic, *settings.teachers.values())
    for role in (*trained, settings.actor_infer, *judges):
        yield from role.devices if role is not None else ()
