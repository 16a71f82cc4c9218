"""Stages 2 to 6: train the small model, kill and resume it, load it in Transformers, and compare it with Transformers;
and comparisons of two runs by their logged numbers and tensors."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.config.load import Loaded, dump
from megatune.config.settings import Settings, with_settings
from megatune.errors import ExitCode, Finding
from megatune.rehearse.outcome import Outcome, failed, passed, skipped
from megatune.rehearse.ranks import RunResult, run_local
from megatune.rehearse.settings import describe_layout, other_layout
from megatune.training.callbacks.metrics import METRICS_NAME, read_json_lines

# Relative tolerance of a step's loss in two layouts, which sum in another order and update weights with these sums.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
_COUNTED = ("num_tokens", "num_input_tokens", "epoch")


TRAIN, RESUME, OTHER = "2 train, evaluate, save", "3 kill, resume", "4 resume in another layout"
FINAL, PROOF = "5 final model in Transformers", "6 against Transformers"
LIMIT = 600.0  # seconds of one start of ranks
_TARGET = "megatune.training.run:train"
WHOLE, _KILLED, _OTHER = "whole", "killed", "other"


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of the stages.

    Attributes:
        settings: settings of the small run; output_dir is that of the uninterrupted run.
        world_size: number of processes.
        architecture: architecture of the small model, for the training stage.
        folder: has a folder for each run.
    """

    settings: Settings
    world_size: int
    architecture: Architecture
    model_dir: Path
    folder: Path

    def output(self, name: str) -> Path:
        """Return the output_dir of a run."""
        return self.folder / name

    @property
    def steps(self) -> int:
        """Number of steps of a run."""
        return self.settings.optimizer.max_steps

    @property
    def resumed(self) -> int:
        """Step from which runs are resumed."""
        return int(self.settings.checkpoint.save_steps)

    @property
    def saved(self) -> Path:
        """Checkpoint of that step."""
        return self.output(WHOLE) / f"checkpoint-{self.resumed}"


def train(context: Context) -> Outcome:
    """Train all steps without interruption, and check that all numbers are finite and all files written."""
    output = context.output(WHOLE)
    if wrong := _not_done(_start(context, context.settings, WHOLE)):
        return failed(TRAIN, *wrong)
    if numbers := not_finite(output):
        what, why = f"not finite: {', '.join(numbers)}", "weights are random, so settings or data are the cause"
        return failed(TRAIN, [Finding(what, "", why, "lower learning_rate; check the rows")], ExitCode.NOT_FINITE)
    if not context.saved.is_dir():
        return failed(TRAIN, [Finding(f"there is no {context.saved.name}")], ExitCode.CANNOT_WRITE)
    losses = [record["loss"] for record in trained_steps(output).values()]
    if not losses:
        what, why = f"all {context.steps} steps were skipped", "gradients overflowed in every step"
        return failed(TRAIN, [Finding(what, "", why, "write bf16: true, or lower learning_rate")], ExitCode.NOT_FINITE)
    found = f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if num_skipped := context.steps - len(losses):
        found += f", after {num_skipped} skipped steps while the loss scale decreased"
    if evaluated := evaluations_of(output):
        last = evaluated[max(evaluated)]
        value = "" if last.get("eval_loss") is None else f", the last loss {last['eval_loss']:.4f}"
        found += f"; {len(evaluated)} evaluations{value}"
    else:
        found += "; the file has no evaluation"
    return passed(TRAIN, f"{found}; checkpoints at steps {context.resumed} and {context.steps}")


def resume(context: Context) -> Outcome:
    """Kill a rank after a save, resume, and compare the result with the uninterrupted run."""
    if (why := _cannot_resume(context)) is not None:
        return skipped(RESUME, why)
    output, whole = context.output(_KILLED), context.output(WHOLE)
    settings = with_settings(context.settings, {"run.output_dir": str(output)})
    newest = output / context.saved.name
    ended = _start(context, settings, _KILLED, kill_when=newest.is_dir)
    if not ended.killed:
        early = [Finding("the run ended before a rank could be killed")], ExitCode.INTERNAL
        return failed(RESUME, *(_not_done(ended) or early))
    if ended.code != ExitCode.PROCESS_DIED:
        what = f"a rank was killed, and the run ended with exit code {int(ended.code)}"
        return failed(RESUME, [Finding(what), *ended.findings], ended.code or ExitCode.INTERNAL)
    if wrong := _not_done(_start(context, settings, f"{_KILLED}-resumed")):
        return failed(RESUME, *wrong)
    differences = different_steps(whole, output, ("loss", "grad_norm"))
    number = 0
    for place in (".", f"checkpoint-{context.steps}", f"checkpoint-{context.steps}/training"):
        count, different = different_tensors(whole / place, output / place)
        number += count
        differences += [f"{name} in {place}" for name in different]
    if differences:
        what = f"the resumed run differs from the uninterrupted one: {differences[0]}"
        why = f"{len(differences)} numbers differ, but in the same layout all must be bitwise equal"
        return failed(RESUME, [Finding(what, "", why, "report this with the folder of --keep")], ExitCode.INTERNAL)
    found = f"rank {context.world_size - 1} killed after step {context.resumed}; resumed: losses, gradient norms and "
    found += f"{number} tensors of weights and training state are bitwise equal to those of an uninterrupted run"
    return passed(RESUME, found)


def resume_elsewhere(context: Context) -> Outcome:
    """Resume in another layout, and check that it trains the same rows, with losses within a tolerance."""
    if (why := _cannot_resume(context)) is not None:
        return skipped(OTHER, why)
    if (other := other_layout(context.settings, context.world_size, context.architecture)) is None:
        return skipped(OTHER, "no other layout of a few processes trains the same rows per step")
    settings, world = other
    output, whole = context.output(_OTHER), context.output(WHOLE)
    shutil.rmtree(output, ignore_errors=True)
    own = {"run.output_dir": str(output), "run.resume_from_checkpoint": str(context.saved)}
    words = describe_layout(settings.parallel, world)
    if wrong := _not_done(_start(context, with_settings(settings, own), _OTHER, world)):
        return failed(OTHER, *wrong)
    resumed = steps_of(output)
    if rows := different_rows(whole, output, first=context.resumed + 1):
        return failed(OTHER, [Finding(f"in {words} different rows were trained: {rows[0]}")], ExitCode.INTERNAL)
    dtype = settings.precision.params_dtype
    error, tolerance = largest_difference(whole, output), TOLERANCES[dtype]
    found = f"{words}: the same rows in {len(resumed)} steps, losses within {error:.1e} ({dtype}: {tolerance:.0e})"
    if not error <= tolerance:
        why = f"losses of a step differ by {error:.1e}, more than {tolerance:.0e}"
        return failed(OTHER, [Finding(f"in {words} the losses differ", "", why)], ExitCode.DIFFERENT)
    return passed(OTHER, found)


def load_final(context: Context) -> Outcome:
    """Load the final model in Transformers, and with adapters also merge them."""
    output = context.output(WHOLE)
    if not output.is_dir() or not any(output.glob("*.safetensors")):
        return skipped(FINAL, "stage 2 wrote no final model")
    from megatune.rehearse.against_transformers import load_in_transformers, merged_lines

    adapter = context.settings.finetuning.finetuning_type == "lora"
    found, problems = load_in_transformers(output, context.model_dir if adapter else None)
    if adapter and not problems:
        more, problems = merged_lines(context.settings, context.model_dir, output)
        found += more
    return failed(FINAL, problems, ExitCode.DIFFERENT) if problems else passed(FINAL, found)


def compare(context: Context) -> Outcome:
    """Compare logits, loss and gradients in the layout with Transformers."""
    from megatune.rehearse.against_transformers import compare_with_transformers

    return compare_with_transformers(context, PROOF, LIMIT)


Stage = Callable[[Context], Outcome]
STAGES: dict[str, Stage] = {
    TRAIN: train,
    RESUME: resume,
    OTHER: resume_elsewhere,
    FINAL: load_final,
    PROOF: compare,
}


def _cannot_resume(context: Context) -> str | None:
    if context.settings.checkpoint.save_only_model:
        return "save_only_model: true writes no training state, so a run cannot resume"
    if not context.saved.is_dir():
        return f"stage 2 wrote no checkpoint of step {context.resumed}"
    return None


def _start(
    context: Context,
    settings: Settings,
    name: str,
    world_size: int | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> RunResult:
    """Train like `megatune train`."""
    payload = {
        "settings": settings,
        "run_yaml": dump(settings, {}),
        "case": None,
        "asked": Loaded(settings, []),
        "plan": [],
        "began": time.monotonic(),
    }
    run_dir = context.folder / "launch" / name
    return run_local(_TARGET, payload, world_size or context.world_size, run_dir, limit=LIMIT, kill_when=kill_when)


def _not_done(ended: RunResult) -> tuple[list[Finding], ExitCode] | None:
    """Return the findings and exit code of a run that failed; None if it did not."""
    if ended.code == ExitCode.DONE:
        return None
    # A fix may name files that are deleted with the rehearsal.
    folder, kept = str(ended.log.parents[2]), "; --keep DIR keeps these files"
    found = [
        replace(each, fix=each.fix.replace(folder, "DIR") + kept) if folder in each.fix else each
        for each in ended.findings
    ]
    return found or [Finding(f"ended with exit code {int(ended.code)}", fix="--keep DIR keeps its logs")], ended.code


def steps_of(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the logged steps of a run, by step."""
    records = read_json_lines(output_dir / METRICS_NAME)
    return {record["step"]: record for record in records if "grad_norm" in record}


def evaluations_of(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the evaluations of a run, by step."""
    records = read_json_lines(output_dir / METRICS_NAME)
    return {record["step"]: record for record in records if "eval_seconds" in record}


def different_steps(one: Path, other: Path, names: tuple[str, ...], *, first: int = 1) -> list[str]:
    """Return descriptions of logged numbers of two runs that are not bitwise equal."""
    sides = [{step: each for step, each in steps_of(run).items() if step >= first} for run in (one, other)]
    found = [] if sides[0].keys() == sides[1].keys() else [f"steps {sorted(sides[0])} and {sorted(sides[1])}"]
    for step in sorted(sides[0].keys() & sides[1].keys()):
        for name in names:
            values = [side[step].get(name) for side in sides]
            if values[0] != values[1]:
                found.append(f"{name} of step {step}: {values[0]} and {values[1]}")
    return found


def different_rows(one: Path, other: Path, *, first: int) -> list[str]:
    """Return differences in the numbers of trained tokens from step `first`: the runs trained different rows."""
    return different_steps(one, other, _COUNTED, first=first)


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest relative difference of losses of a step; infinite if one is not finite."""
    first, second = steps_of(one), steps_of(other)
    differences = [0.0]
    for step in first.keys() & second.keys():
        before, now = (side[step].get("loss") for side in (first, second))
        if before is None or now is None:  # not finite
            return math.inf
        differences.append(abs(before - now) / max(abs(before), 1e-6))
    return max(differences)


def trained_steps(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the steps of a run that were not skipped; fp16 skips steps until the loss scale fits."""
    return {step: record for step, record in steps_of(output_dir).items() if not record.get("num_skipped")}


def not_finite(output_dir: Path) -> list[str]:
    """Return the names of numbers of trained steps that are not finite, which are logged as null."""
    return [
        f"{name} of step {step}"
        for step, record in trained_steps(output_dir).items()
        for name in ("loss", "grad_norm")
        if record.get(name) is None
    ]


def different_tensors(one: Path, other: Path) -> tuple[int, list[str]]:
    """Compare the safetensors files of two folders.

    Returns:
        The number of tensors, and the names of those that are not bitwise equal.
    """
    import torch

    first, second = _tensors(one), _tensors(other)
    different = [*(first.keys() ^ second.keys())]
    different += [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    return len(first), sorted(different)


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            # Files of several ranks may have the same names, such as states of random generators.
            found.update({f"{path.name}: {name}": file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found
