"""Plans a new run from a user's answers, and creates the text of its settings file. Findings are grouped by answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from megatune.config.flags import Arguments
from megatune.config.load import load
from megatune.config.options import ParsedArguments
from megatune.config.rules import DATA_RULES
from megatune.config.setting import Count
from megatune.config.settings import Settings
from megatune.config.values import counted, shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.devices import count_gpus
from megatune.plan.answer import Answer, answer
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import Estimate
from megatune.plan.options import PlanOptions
from megatune.plan.pages.words import describe_layout, describe_machine, duration, fullest, seconds
from megatune.plan.read_question import QuestionReader
from megatune.plan.rl.answer import plan_rl
from megatune.plan.rl.question import RLQuestionReader
from megatune.training.new_run.files import MAX_ROWS, DataFacts, Goal, check_new, look_at, rl_file, training_file
from megatune.training.planning import data_rows, this_machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A user's answers about a new run.

    Attributes:
        model: a folder, or an id on a hub.
        data: a file, or another value of `dataset`.
        goal: None to choose by the data, and between full training if it fits, and LoRA.
        gpus, gpu: number and kind of the GPUs, as for `megatune plan`; None for this machine.
        output: the settings file to write; None for a new name in the working folder.
        runs: the parent of the run's output folder.
    """

    model: str
    data: str
    goal: Goal | None = None
    gpus: Count | None = None
    gpu: str | None = None
    output: str | None = None
    runs: str = "out"


class WrongAnswersError(MegatuneError):
    """Findings by attribute of `Answers`."""

    def __init__(self, by_answer: Mapping[str, Sequence[Finding]], exit_code: ExitCode) -> None:
        self.by_answer = by_answer
        super().__init__([finding for findings in by_answer.values() for finding in findings], exit_code)


@dataclass
class Checks:
    """Collects findings on answers, to report them together."""

    wrong: dict[str, list[Finding]] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.SETTINGS  # that of the first problem

    def of(self, name: str, find: Callable[[], T]) -> T | None:
        """Call a function and return its result; record the findings that it raises, and return None."""
        try:
            return find()
        except MegatuneError as error:
            self.exit_code = self.exit_code if self.wrong else error.exit_code
            own = error.by_answer if isinstance(error, WrongAnswersError) else {name: error.findings}
            for answer, findings in own.items():
                self.wrong.setdefault(answer, []).extend(findings)
            return None

    def stop(self) -> None:
        """Raise all recorded findings, if any."""
        if self.wrong:
            raise WrongAnswersError(self.wrong, self.exit_code)


_MAX_LENGTH = 8192  # maximum cutoff_len
_RL_MAX_LENGTH = 1024  # tokens of a prompt and its response
_MAX_BATCH, _MIN_STEPS = 64, 50  # rows of a step; fewer if the run would have fewer steps than this
# By stage: learning rates of full training and of adapters; epochs.
_RATES = {"sft": (1e-5, 1e-4), "pt": (1e-5, 1e-4), "dpo": (5e-7, 5e-6), "rl": (1e-6, 1e-5)}
_EPOCHS = {"sft": 3.0, "pt": 1.0, "dpo": 1.0}
_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "dpo": "DPO", "rl": "reinforcement learning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A planned run.

    Attributes:
        file, text: the settings file.
        verb: the verb of megatune that runs the file.
        here: whether it is planned for this machine.
        lines: a summary: trained weights, devices, layout, memory, time, cost.
    """

    goal: Goal
    file: Path
    text: str
    verb: str
    here: bool
    lines: tuple[str, ...]

    def settings(self) -> Settings:
        """Return the settings of a run of `megatune train` that the rows depend on.

        Raises:
            MegatuneError: SETTINGS.
        """
        with TemporaryDirectory() as folder:
            file = Path(folder) / self.file.name
            file.write_text(self.text, encoding="utf-8")
            return load(file).require_valid(rules=DATA_RULES)


def draft(answers: Answers) -> NewRun:
    """Inspect the data, search a layout, and return the run.

    Raises:
        WrongAnswersError: SETTINGS, INPUT or DATA, with all findings; OUT_OF_MEMORY, if no layout fits.
    """
    checks = Checks()
    facts = checks.of("data", lambda: _look_at(answers, checks))
    # Without data, which determines the stage, the other answers are checked separately.
    stage = facts.stage if facts else "sft"
    model = checks.of("model", lambda: find_model(_named("model", answers.model), stage=stage))
    gpu = answers.gpu
    if gpu is not None and (facts is None or model is None):
        checks.of("gpu", lambda: find_machine(gpu))
    if answers.output is not None:
        checks.of("output", lambda: check_new(Path(str(answers.output))))
    checks.stop()
    assert facts is not None
    assert model is not None
    drafting = _Drafting(answers, facts, model)
    found = checks.of("goal", drafting.best)
    checks.stop()
    assert found is not None
    return found


def _look_at(answers: Answers, checks: Checks) -> DataFacts | None:
    """Find the stage that the data fits; if it only does not fit the goal, report that as a finding on the goal."""
    try:
        return look_at(_named("data", answers.data), answers.goal)
    except MegatuneError:
        if answers.goal is None:
            raise
        facts = look_at(answers.data, None)  # raises problems of the data for any goal
        checks.of("goal", lambda: look_at(answers.data, answers.goal))
        return facts


def _named(what: str, answer: str) -> str:
    if not answer:
        raise MegatuneError(Finding(f"which {what}?", fix=f"name the {what}"), ExitCode.SETTINGS)
    return answer


def _cost(case: Case, seconds: float) -> list[str]:
    hours = seconds * case.world_size / 3600
    return [] if case.machine.device.on_cpu else [f"cost     {hours:,.2g} GPU hours"]


@dataclass(frozen=True)
class _Drafting:
    """The steps of a draft that need all answers."""

    answers: Answers
    facts: DataFacts
    model: PlannedModel

    @property
    def is_rl(self) -> bool:
        return self.facts.goal == "rl"

    def best(self) -> NewRun:
        """Return the run for the goal; without one, full training if it fits with a margin, else LoRA.

        Raises:
            MegatuneError: findings on the machine or the goal.
        """
        goal = self.answers.goal or self.facts.goal
        found = None if goal == "lora" else self.plan("full")
        if found is None or (goal != "full" and (found.best is None or found.best.is_tight)):
            return self.run(goal or "lora", "lora", self.plan("lora"))
        return self.run(goal or "full", "full", found)

    def plan(self, trained: str) -> Answer:
        """Search a layout for training all weights ("full") or adapters ("lora")."""
        options = PlanOptions(gpu=self.answers.gpu, gpus=self.answers.gpus, global_batch=self._global_batch)
        words = [f"{key}={shown(value, quoted=True)}" for key, value in self._decided(trained).items()]
        given = ParsedArguments("megatune new", options, [], Arguments(self.answers.model, words, []), [], [], [])
        try:
            return answer(QuestionReader(given, count_gpus, this_machine, rows_of=data_rows).question())
        except MegatuneError as error:  # model and data are already checked
            is_machine = any("--gpu" in finding.fix for finding in error.findings)
            raise WrongAnswersError({"gpu" if is_machine else "goal": error.findings}, error.exit_code) from error

    def run(self, goal: Goal, trained: str, found: Answer) -> NewRun:
        """Return the run with the best layout."""
        if (best := found.best) is None:
            raise self._too_large(found)
        file = self._file(goal)
        values = self._decided(trained)
        output_dir = str(Path(self.answers.runs) / file.stem)
        what = _WORDS[goal] + " with LoRA" * (goal in ("dpo", "rl") and trained == "lora")
        verb = "rl" if self.is_rl else "train"
        if self.is_rl:
            text = rl_file(self.answers.model, self.answers.data, output_dir, values, best)
        else:
            text = training_file(self.answers.model, output_dir, values, best)
        head = f"# {what} of {self.answers.model} on {self.answers.data}, written by `megatune new`; to run it:\n"
        head += f"#   megatune {verb} {file}\n"
        lines = (f"trained  {what}, learning rate {values['learning_rate']:g}", *self._summary(found, best, text))
        here = self.answers.gpu is None
        return NewRun(goal=goal, file=file, text=head + text, verb=verb, here=here, lines=lines)

    def _decided(self, trained: str) -> dict[str, Any]:
        """Return the settings that are decided before the search of a layout, by keys of a settings file."""
        stage = "rl" if self.is_rl else self.facts.stage
        values: dict[str, Any] = {"stage": self.facts.stage, "finetuning_type": trained}
        values |= {"lora_rank": 16} if trained == "lora" else {}
        values |= {} if self.is_rl else self._data
        values |= {"learning_rate": _RATES[stage][trained == "lora"]}
        return values | {"cutoff_len": self._cutoff_len} | ({} if self.is_rl else {"num_train_epochs": _EPOCHS[stage]})

    @property
    def _data(self) -> dict[str, Any]:
        columns = {"columns": dict(self.facts.columns)} if self.facts.columns else {}
        return {"dataset": [self.answers.data], **columns}

    @property
    def _global_batch(self) -> int:
        """Return the rows of a step: a multiple of the devices; for RL, so that two steps are groups of eight."""
        world = self.answers.gpus or (count_gpus() if self.answers.gpu is None else 0) or 1
        rows = _MAX_BATCH
        if self.facts.rows and not self.is_rl:
            rows = max(1, min(rows, int(self.facts.rows * _EPOCHS[self.facts.stage]) // _MIN_STEPS))
            rows = 1 << (rows.bit_length() - 1)
        multiple = 4 * world if self.is_rl else world
        return -(-rows // multiple) * multiple

    @cached_property
    def _cutoff_len(self) -> int:
        """Return cutoff_len: the length of the longest row, limited by _MAX_LENGTH and the model's positions."""
        most = min(_RL_MAX_LENGTH if self.is_rl else _MAX_LENGTH, self.model.architecture.max_position_embeddings)
        if self.is_rl:
            return most
        asked = {"model_name_or_path": self.answers.model, "stage": self.facts.stage, "cutoff_len": most, **self._data}
        settings = load(None, [f"{key}={shown(value, quoted=True)}" for key, value in asked.items()]).settings
        lengths = data_rows(settings, self.model).lengths
        if lengths is None:
            return min(2048, most)
        return min(most, -(-int(lengths.longest * 1.1 + 32) // 128) * 128)  # lengths of a sample are estimates

    def _file(self, goal: Goal) -> Path:
        """Return the file to write; if none is given, a new one."""
        if self.answers.output is not None:
            return Path(self.answers.output)
        name = f"{Path(self.answers.model).absolute().name}-{goal}"
        names = (Path(f"{name}{'' if number == 1 else f'-{number}'}.yaml") for number in count(1))
        return next(path for path in names if not path.exists())

    def _summary(self, found: Answer, best: Estimate, text: str) -> list[str]:
        """Describe the plan and the cost, given the file's text."""
        case = best.case
        lines = [
            f"devices  {describe_machine(case.machine, case.world_size)}",
            f"layout   {describe_layout(case)}, {counted(case.global_batch_size, 'row')} a step",
            f"memory   {fullest(best).removeprefix('memory: ')}",
        ]
        if self.is_rl:
            return lines + self._rl_time(text, best)
        lines.append(f"time     {seconds(best.time.total)} a step, ±{best.time.uncertainty:.0%}")
        if (whole := self._run_seconds(found, best)) is not None:
            lines[-1] += f"; {duration(whole[0])} for {whole[1]}"
            lines += _cost(best.case, whole[0])
        return lines

    def _rl_time(self, text: str, best: Estimate) -> list[str]:
        """Return the time and cost of reinforcement learning, whose steps sample and train."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(text, encoding="utf-8")
            options = PlanOptions(gpu=self.answers.gpu)
            given = ParsedArguments("megatune new", options, [str(file)], Arguments(None, [], []), [], [], [])
            question = RLQuestionReader(given, count_gpus, this_machine).question(str(file))
        planned, lengths, steps = plan_rl(question), question.lengths, question.settings.run.max_steps
        whole = steps * planned.seconds.total
        mean = f"with responses of {lengths.mean_response:,.0f} tokens in the mean"
        line = (
            f"time     {seconds(planned.seconds.total)} a step, {mean}; {duration(whole)} for {counted(steps, 'step')}"
        )
        return [line, *_cost(best.case, whole)]

    def _run_seconds(self, found: Answer, best: Estimate) -> tuple[float, str] | None:
        """Return the duration of the run, and its steps or tokens; None if the number of rows is unknown."""
        if self.facts.stage == "pt" or not 0 < self.facts.rows < MAX_ROWS:  # texts are packed into rows
            return found.question.run_seconds(best)
        epochs = _EPOCHS[self.facts.stage]
        steps = int(epochs * -(-self.facts.rows // best.case.global_batch_size))
        passes = f"{epochs:g} epoch{'s' * (epochs != 1)} of {counted(self.facts.rows, 'row')}"
        return steps * best.time.total, f"{counted(steps, 'step')}, {passes}"

    def _too_large(self, found: Answer) -> WrongAnswersError:
        case, enough = found.question.case, found.on_more_devices
        what = f"{self.answers.model} does not fit {describe_machine(case.machine, case.world_size)}"
        fix = "name a smaller model, or other machines: --gpus N --gpu KIND"
        if enough is not None:
            fix = f"--gpus {enough.case.world_size} --gpu {enough.case.machine.device.name}"
        why = f"none of {found.result.num_considered} layouts does"
        return WrongAnswersError({"gpu": [Finding(what, "", why, fix)]}, ExitCode.OUT_OF_MEMORY)
