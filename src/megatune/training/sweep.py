"""Hyperparameter sweeps: runs one settings file with different values, each trial as `megatune train` in a separate
folder, and compares the results."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megatune.config.flags import is_key
from megatune.config.load import load
from megatune.config.values import parse, shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.figure import new_figure, write
from megatune.launch.devices import count_gpus
from megatune.pages import columns
from megatune.progress import say
from megatune.training.start import Launch, check_all
from megatune.training.storage.files import read_json_lines, writing

_RANGE = re.compile(r"([^,\[\]]+?)\.\.([^,\[\]]+?)(:log)?")
_TAKES = "KEY=VALUE,VALUE or, with --search tpe, KEY=LOW..HIGH or KEY=LOW..HIGH:log"


@dataclass(frozen=True, slots=True)
class Range:
    """A range from `low` to `high`: log-uniform if `log`, integers if `whole`."""

    low: float
    high: float
    log: bool
    whole: bool


Space = Mapping[str, tuple[str, ...] | Range]
Values = Mapping[str, str]  # of one trial, as typed on the command line


def read_space(texts: Iterable[str], findings: list[Finding], *, ranges: bool) -> Space:
    """Parse KEY=VALUES of each --set; add problems to `findings`.

    Args:
        ranges: whether ranges are supported, as in a search.
    """
    space: dict[str, tuple[str, ...] | Range] = {}
    for text in texts:
        key, _, written = text.partition("=")
        where, problem = f"--set {text}", ""
        values = tuple(shown(each.data) if each.text is None else each.text for each in parse(f"[{written}]").items)
        if not is_key(key):
            problem = f"{key!r} is not a setting"
        elif key in space:
            problem = f"{key} is varied twice"
        elif (found := _RANGE.fullmatch(written)) is not None:
            numbers = [_number(found[1]), _number(found[2])]
            if None in numbers or not (low := float(numbers[0] or 0)) < (high := float(numbers[1] or 0)):
                problem = f"{written} is not a range of numbers"
            elif found[3] and low <= 0:
                problem = "a range by logarithm begins above 0"
            elif not ranges:
                problem = "a grid takes values, and this is a range"
            else:
                space[key] = Range(low, high, bool(found[3]), all(isinstance(each, int) for each in numbers))
        elif not values or len(set(values)) < len(values):
            problem = "values are missing" if not values else "the same value is there twice"
        else:
            space[key] = values
        findings += [Finding(problem, where, fix=_TAKES)] if problem else []
    return space


def _number(text: str) -> float | None:
    data = parse(text).data
    try:
        return data if isinstance(data, int) else float(text)
    except ValueError:
        return None


def grid(space: Space) -> list[Values]:
    """Return all combinations of values, with the two ends of each range, to check them before a search."""
    ends = [_ends(each) if isinstance(each, Range) else each for each in space.values()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*ends)]


def _ends(span: Range) -> tuple[str, str]:
    low, high = (int(end) if span.whole else end for end in (span.low, span.high))
    return str(low), str(high)


def name_of(values: Values) -> str:
    """Return the name of a trial's folder, from its values."""
    return re.sub(r"[^\w.+-]+", "-", "_".join(f"{key}-{text}" for key, text in values.items()))


_TAIL = 10  # a trial's loss is the mean over the last 1 / _TAIL of its log


@dataclass
class Sweep:
    """A sweep.

    Attributes:
        source, overrides: the settings file, and the overrides of all trials.
        output: the parent of the trials' folders.
        trials: the number of trials of a search; 0 for a grid.
        parallel: the number of trials at a time, which divide the GPUs of this machine.
        metric: of metrics.jsonl; "" for eval_loss, or for loss without evaluation.
        maximize: whether a higher metric is better.
    """

    source: str
    overrides: Sequence[str]
    space: Space
    output: Path
    trials: int = 0
    parallel: int = 1
    metric: str = ""
    maximize: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _ended: dict[str, tuple[Values, float | None, int]] = field(default_factory=dict)  # metric and exit code
    _stop: int = 0  # the signal that asked for the end

    def check(self) -> None:
        """Check the settings of all trials; for a search, those at the ends of its ranges.

        Raises:
            MegatuneError: all findings, each with the first trial that has it.
        """
        found: dict[Finding, Finding] = {}
        code, names = ExitCode.SETTINGS, set[str]()
        for values in grid(self.space):
            if (name := name_of(values)) in names:
                why, fix = "their values differ only in signs", "write other values, or sweep them one by one"
                collision = Finding(f"two trials have the folder {name}", "--set", why, fix)
                found[collision] = collision
            names.add(name)
            try:
                check_all(Launch.of(load(self.source, self.words(values))))
            except MegatuneError as error:
                code = error.exit_code
                for each in error.findings:
                    where = f"{each.where} (trial {name_of(values)})".strip()
                    found.setdefault(replace(each, where=""), replace(each, where=where))
        if found:
            raise MegatuneError(found.values(), code)

    def run(self) -> int:
        """Run all unfinished trials; return the exit code of the first one that failed, if any."""
        with writing(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        pending = self._searched() if self.trials else iter(grid(self.space))
        try:
            with ThreadPoolExecutor(self.parallel) as pool:
                for done in [pool.submit(self._work, slot, pending) for slot in range(self.parallel)]:
                    done.result()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stop:
            return int(ExitCode.STOPPED if self._stop == signal.SIGTERM else ExitCode.INTERRUPTED)
        return next((code for _, _, code in self._ended.values() if code), int(ExitCode.DONE))

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Ask the running trials to save and stop. Ctrl-C reaches them by itself."""
        self._stop = number
        for process in [*self._running] if number == signal.SIGTERM else []:
            process.send_signal(number)

    def _work(self, slot: int, pending: Iterator[Values]) -> None:
        while True:
            with self._lock:
                values = None if self._stop else next(pending, None)
            if values is None:
                return
            name = name_of(values)
            value = self._finished(name)
            code = 0 if value is not None else self._train(name, values, slot)
            words = "finished before" if value is not None else "finished" if code == 0 else f"exit code {code}"
            value = self._finished(name) if code == 0 else None
            with self._lock:
                self._ended[name] = (values, value, code)
                say(f"{name}: {words}{'' if value is None else f', {value:.6g}'}")

    def words(self, values: Values) -> list[str]:
        """Return the overrides of a trial."""
        # A stopped trial resumes, even if the file sets overwrite_output_dir.
        more = ("overwrite_output_dir=false", f"output_dir={json.dumps(str(self.output / name_of(values)))}")
        return [*self.overrides, *(f"{key}={text}" for key, text in values.items()), *more]

    def command(self, values: Values) -> list[str]:
        """Return the command of a trial."""
        return [sys.executable, "-m", "megatune", "train", self.source, *self.words(values)]

    def _train(self, name: str, values: Values, slot: int) -> int:
        environment = dict(os.environ)
        if num_gpus := count_gpus():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
            each = num_gpus // self.parallel
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[slot * each : (slot + 1) * each])
        with (self.output / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(values), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        self._running.add(process)
        if self._stop:  # requested while the process was starting
            process.terminate()
        code = process.wait()
        self._running.discard(process)
        return code if code >= 0 else ExitCode.PROCESS_DIED

    def _finished(self, name: str) -> float | None:
        """Return the metric of a finished trial, else None."""
        folder = self.output / name
        try:
            report = json.loads((folder / "launch" / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return self._value(folder) if report.get("outcome") == "done" else None

    def _value(self, folder: Path) -> float:
        """Return the last value of the metric, or the mean of the last tenth of the loss; NaN if none was logged."""
        records = read_json_lines(folder / "metrics.jsonl")
        names = (self.metric,) if self.metric else ("eval_loss", "loss")
        for name in names:
            if found := [float(each[name]) for each in records if each.get(name) is not None]:
                last = found[-max(1, len(found) // _TAIL) :] if name == "loss" else found[-1:]
                return sum(last) / len(last)
        return float("nan")

    def _searched(self) -> Iterator[Values]:
        """Yield the values that Optuna's sampler proposes, the same ones after a resume."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0, constant_liar=self.parallel > 1),
            direction="maximize" if self.maximize else "minimize",
        )
        asked: dict[str, Any] = {}
        for _ in range(self.trials):
            for name in [name for name in asked if name in self._ended]:
                value, failed = self._ended[name][1], optuna.trial.TrialState.FAIL
                is_number = value is not None and value == value
                study.tell(asked.pop(name), value if is_number else None, state=None if is_number else failed)
            trial = study.ask()
            values = {key: _suggested(trial, key, each) for key, each in self.space.items()}
            asked[name_of(values)] = trial
            yield values

    def table(self) -> list[str]:
        """Return a table of the ended trials, the best first; write it and a plot to the output folder.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        number = {name: each[1] if each[1] is not None else math.nan for name, each in self._ended.items()}
        sign = -1 if self.maximize else 1
        rows = sorted(self._ended.items(), key=lambda row: (math.isnan(number[row[0]]), sign * number[row[0]]))
        if not rows:
            return []
        head = [*self.space, self.metric or "loss", "folder"]
        cells = [
            [*values.values(), self._result(value, code), str(self.output / name)]
            for name, (values, value, code) in rows
        ]
        with writing(self.output):
            self._draw(rows)
            document = [
                {"values": dict(values), "exit_code": code, "folder": str(self.output / name)}
                | {"value": None if math.isnan(number[name]) else value}
                for name, (values, value, code) in rows
            ]
            (self.output / "sweep.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return [*columns([head, *cells], left=range(len(head))), f"plot: {self.output / 'sweep.png'}"]

    def _result(self, value: float | None, code: int) -> str:
        if value is None:
            return f"exit code {code}"
        return f"no {self.metric or 'loss'} was logged" if math.isnan(value) else f"{value:.6g}"

    def _draw(self, rows: Sequence[tuple[str, tuple[Values, float | None, int]]]) -> None:
        """Plot the losses of the trials, and the metric over each setting."""
        figure = new_figure(8, 3 + 3 * len(self.space))
        axes = figure.subplots(1 + len(self.space), 1, squeeze=False)[:, 0]
        for name, (values, value, _) in rows:
            records = [each for each in read_json_lines(self.output / name / "metrics.jsonl") if each.get("loss")]
            axes[0].plot([each["step"] for each in records], [each["loss"] for each in records], label=name)
            for axis, text in zip(axes[1:], values.values(), strict=True):
                axis.plot([text], [value], "o", color="tab:blue")
        axes[0].set(xlabel="step", ylabel="loss")
        axes[0].legend(fontsize="x-small")
        for axis, key in zip(axes[1:], self.space, strict=True):
            axis.set(xlabel=key, ylabel=self.metric or "loss")
        write(figure, self.output / "sweep.png")


def _suggested(trial: Any, key: str, span: tuple[str, ...] | Range) -> str:
    if not isinstance(span, Range):
        return str(trial.suggest_categorical(key, span))
    if span.whole:
        return str(trial.suggest_int(key, int(span.low), int(span.high), log=span.log))
    return f"{trial.suggest_float(key, span.low, span.high, log=span.log):.4g}"
