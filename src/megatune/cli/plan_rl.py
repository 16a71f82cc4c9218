"""`megatune plan` of a file of reinforcement learning: flags, settings, models and machines as a question, answered."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.rl.settings import ModelRole, RLSettings
    from megatune.plan.case import PlannedModel
    from megatune.plan.machine import Machine
    from megatune.plan.rl.lengths import Lengths
    from megatune.plan.rl.question import RLQuestion

T = TypeVar("T")

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
# Rules about what an update of rows from a data set needs; a role's rows are rollouts.
_LEFT_OUT = {"data.dataset", "data.cutoff_len", "run.output_dir", "run.stage", "model.model_name_or_path",
             "run.num_processes"}  # fmt: skip
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


class _Reader:
    """Reads everything, and reports all that is wrong at once."""

    def __init__(self, options: argparse.Namespace, file: str, words: list[str]) -> None:
        self.options, self.file = options, file
        self.findings: list[Finding] = []
        self.missing: list[Finding] = []
        self.notes: list[str] = []
        self.overrides = [word for word in words if "=" in word and not word.startswith("--")]
        for word in words:
            if word != file and word not in self.overrides:
                fix = "write overrides as key=value, actor_train.training_args.learning_rate=1e-6"
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

        read = read_roll(self.file, self.overrides)
        self.findings += read.findings
        if (settings := read.settings) is None:
            raise MegatuneError(self.findings, ExitCode.SETTINGS)
        models, lengths = self._models(settings), self._lengths(settings)
        world = 1 + max(max(role.devices) for role in _model_roles(settings))
        world = max(world, 1 + max(settings.actor_infer.devices))
        machine = self._found(lambda: self._machine(settings, world))
        if models is not None:
            self._check_layouts(settings, models)
        if self.findings:
            raise MegatuneError([*self.findings, *self.missing], ExitCode.SETTINGS)
        if self.missing or models is None or machine is None:
            raise MegatuneError(self.missing, ExitCode.INPUT)
        return RLQuestion(settings=settings, models=models, machine=machine, lengths=lengths,
                          notes=(*read.lines, *self.notes), file=self.file)  # fmt: skip

    def _found(self, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except MegatuneError as error:
            (self.findings if error.exit_code == ExitCode.SETTINGS else self.missing).extend(error.findings)
            return None

    def _models(self, settings: RLSettings) -> Mapping[str, PlannedModel] | None:
        """Return the models by role; one that judges and is not known here is left out, with a note."""
        from megatune.plan.catalogue import find_model

        known: dict[tuple[str | None, str | None], PlannedModel] = {}
        models: dict[str, PlannedModel] = {}

        def find(name: str | None, stage: str | None = None) -> PlannedModel:
            if (name, stage) not in known:
                known[name, stage] = find_model(name or "", stage=stage)
            return known[name, stage]

        missing: dict[Finding, None] = {}
        for role in _model_roles(settings):
            try:
                name = role.settings.model.model_name_or_path
                models[role.name] = find(name, "rm" if role.name == "critic" else None)
            except MegatuneError as error:
                missing |= dict.fromkeys(error.findings)
        try:
            models["actor_infer"] = find(settings.actor_infer.model_name_or_path)
        except MegatuneError as error:
            missing |= dict.fromkeys(error.findings)
        judges = (settings.reward_model, *(reward.judge for reward in settings.rewards.values()))
        for judge in (judge for judge in judges if judge is not None):
            try:
                models[judge.name] = find(judge.model_name_or_path)
            except MegatuneError:
                name = judge.model_name_or_path
                self.notes.append(f"{judge.name}: {name} is not known here: its devices are not planned")
        self.missing += missing
        return None if missing else models

    def _lengths(self, settings: RLSettings) -> Lengths:
        from megatune.plan.rl.lengths import Lengths

        rollout = settings.rollout
        prompt = self._tokens("prompt_tokens", rollout.prompt_length, _MEAN_PROMPT)
        response = self._tokens("response_tokens", rollout.response_length, _MEAN_RESPONSE)
        return Lengths(rollout.prompt_length, rollout.response_length, prompt, response)

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

    def _machine(self, settings: RLSettings, world: int) -> Machine:
        from megatune.plan.calibration import calibration_for
        from megatune.plan.catalogue import find_machine, machine_assumptions

        options = self.options
        if options.gpu is None:
            return self._this_machine(world)
        per_node = int(options.gpus_per_node) if options.gpus_per_node else settings.run.num_gpus_per_node
        machine = find_machine(options.gpu, gpus_per_node=per_node, link=options.link, network=options.network,
                               devices_file=options.devices)  # fmt: skip
        self.notes += machine_assumptions(
            machine,
            gpus_per_node=per_node,
            link=options.link if world > 1 else machine.link.name,
            network=options.network if world > per_node else machine.network.name,
        )
        return replace(machine, calibration=calibration_for(machine.device.name, options.calibration))

    def _this_machine(self, world: int) -> Machine:
        from megatune.cli.this_machine import this_machine
        from megatune.launch.devices import count_gpus

        num_gpus = count_gpus()
        machine, unknown = this_machine(min(world, num_gpus) if num_gpus else world, num_gpus, self.options.calibration)
        if machine is None:
            fix = "--gpu KIND, one of the catalogue or of --devices FILE"
            raise MegatuneError(Finding(unknown, fix=fix), ExitCode.INPUT)
        return machine

    def _check_layouts(self, settings: RLSettings, models: Mapping[str, PlannedModel]) -> None:
        """Check each role's layout against its model."""
        from megatune.config.rules import check
        from megatune.plan.rl.passes import layout_of

        for role in _model_roles(settings):
            laid_out = role.settings.model_copy(update={"parallel": layout_of(role)})
            for each in check(laid_out, models[role.name].architecture, len(role.devices), invalid=_LEFT_OUT):
                self.findings.append(replace(each, what=f"{role.name}: {each.what}", where=each.where or self.file))


def _model_roles(settings: RLSettings) -> list[ModelRole]:
    roles = (settings.actor_train, settings.reference, settings.critic, *settings.teachers.values())
    return [role for role in roles if role is not None]
