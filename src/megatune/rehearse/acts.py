"""Acts 2 to 6: the small model trained, killed and resumed, loaded by Transformers, and compared with it; and whether
two runs are the same, in logged numbers and in every tensor that they wrote."""

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
from megatune.rehearse.outcome import Outcome, failed, left, passed
from megatune.rehearse.ranks import Ended, run_alone
from megatune.rehearse.settings import describe_layout, other_layout
from megatune.training.callbacks.metrics import METRICS_NAME, read_json_lines

# Of the losses of a step in two layouts: sums in another order, after steps of weights that they moved.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
_COUNTED = ("num_tokens", "num_input_tokens", "epoch")


TRAIN, RESUME, OTHER = "2 train, evaluate, save", "3 kill, resume", "4 resume in another layout"
FINAL, PROOF = "5 final model in Transformers", "6 against Transformers"
LIMIT = 600.0  # seconds of one start of ranks
_TARGET = "megatune.training.run:train"
WHOLE, _KILLED, _OTHER = "whole", "killed", "other"


@dataclass(frozen=True, slots=True)
class Scene:
    """What the acts play with.

    Attributes:
        settings: of the small run; output_dir is that of the run that nobody kills.
        world_size: processes.
        architecture: of the small model, as the stage trains it.
        folder: with a folder for each run.
    """

    settings: Settings
    world_size: int
    architecture: Architecture
    model_dir: Path
    folder: Path

    def output(self, name: str) -> Path:
        """Return the output_dir of one of the runs."""
        return self.folder / name

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return self.settings.optimizer.max_steps

    @property
    def resumed(self) -> int:
        """The step that runs are resumed from."""
        return int(self.settings.checkpoint.save_steps)

    @property
    def saved(self) -> Path:
        """The checkpoint of that step."""
        return self.output(WHOLE) / f"checkpoint-{self.resumed}"


def train(scene: Scene) -> Outcome:
    """Train all steps in one go: every number is finite, and everything is written."""
    output = scene.output(WHOLE)
    if wrong := _not_done(_start(scene, scene.settings, WHOLE)):
        return failed(TRAIN, *wrong)
    if numbers := not_finite(output):
        what, why = f"not finite: {', '.join(numbers)}", "weights are random, so the settings or the data make it so"
        return failed(TRAIN, [Finding(what, "", why, "lower learning_rate; look at the rows")], ExitCode.NOT_FINITE)
    if not scene.saved.is_dir():
        return failed(TRAIN, [Finding(f"there is no {scene.saved.name}")], ExitCode.CANNOT_WRITE)
    losses = [record["loss"] for record in trained_steps(output).values()]
    if not losses:
        what, why = f"all {scene.steps} steps were skipped", "gradients overflowed in each"
        return failed(TRAIN, [Finding(what, "", why, "write bf16: true, or lower learning_rate")], ExitCode.NOT_FINITE)
    found = f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if skipped := scene.steps - len(losses):
        found += f", after {skipped} that were skipped while the loss scale fell"
    if evaluated := evaluations_of(output):
        last = evaluated[max(evaluated)]
        value = "" if last.get("eval_loss") is None else f", the last loss {last['eval_loss']:.4f}"
        found += f"; {len(evaluated)} evaluations{value}"
    else:
        found += "; the file evaluates nothing"
    return passed(TRAIN, f"{found}; checkpoints at steps {scene.resumed} and {scene.steps}")


def resume(scene: Scene) -> Outcome:
    """Kill a rank after a save, resume, and compare the end with that of the run that nobody killed."""
    if (why := _cannot_resume(scene)) is not None:
        return left(RESUME, why)
    output, whole = scene.output(_KILLED), scene.output(WHOLE)
    settings = with_settings(scene.settings, {"run.output_dir": str(output)})
    newest = output / scene.saved.name
    ended = _start(scene, settings, _KILLED, strike=newest.is_dir)
    if not ended.struck:
        early = [Finding("the run ended before a rank could be killed")], ExitCode.INTERNAL
        return failed(RESUME, *(_not_done(ended) or early))
    if ended.code != ExitCode.PROCESS_DIED:
        what = f"a rank was killed, and the run ended with exit code {int(ended.code)}"
        return failed(RESUME, [Finding(what), *ended.findings], ended.code or ExitCode.INTERNAL)
    if wrong := _not_done(_start(scene, settings, f"{_KILLED}-resumed")):
        return failed(RESUME, *wrong)
    apart = different_steps(whole, output, ("loss", "grad_norm"))
    number = 0
    for place in (".", f"checkpoint-{scene.steps}", f"checkpoint-{scene.steps}/training"):
        count, different = different_tensors(whole / place, output / place)
        number += count
        apart += [f"{name} in {place}" for name in different]
    if apart:
        what = f"the resumed run differs from the one that nobody killed: {apart[0]}"
        why = f"{len(apart)} numbers differ, but in the same layout all must be equal bit for bit"
        return failed(RESUME, [Finding(what, "", why, "report this with the folder of --keep")], ExitCode.INTERNAL)
    found = (
        f"rank {scene.world_size - 1} killed after step {scene.resumed}; resumed: losses, gradient norms and {number} "
    )
    found += "tensors of weights and training state are equal bit for bit to those of a run that nobody killed"
    return passed(RESUME, found)


def resume_elsewhere(scene: Scene) -> Outcome:
    """Resume in another layout: the same rows, and losses within a tolerance."""
    if (why := _cannot_resume(scene)) is not None:
        return left(OTHER, why)
    if (other := other_layout(scene.settings, scene.world_size, scene.architecture)) is None:
        return left(OTHER, "no other layout of a few processes trains the same rows a step")
    settings, world = other
    output, whole = scene.output(_OTHER), scene.output(WHOLE)
    shutil.rmtree(output, ignore_errors=True)
    own = {"run.output_dir": str(output), "run.resume_from_checkpoint": str(scene.saved)}
    words = describe_layout(settings.parallel, world)
    if wrong := _not_done(_start(scene, with_settings(settings, own), _OTHER, world)):
        return failed(OTHER, *wrong)
    resumed = steps_of(output)
    if rows := different_rows(whole, output, first=scene.resumed + 1):
        return failed(OTHER, [Finding(f"in {words} other rows were trained: {rows[0]}")], ExitCode.INTERNAL)
    dtype = settings.precision.params_dtype
    apart, tolerance = largest_difference(whole, output), TOLERANCES[dtype]
    found = f"{words}: the same rows in {len(resumed)} steps, losses within {apart:.1e} ({dtype}: {tolerance:.0e})"
    if not apart <= tolerance:
        why = f"losses of a step differ by {apart:.1e}, more than {tolerance:.0e}"
        return failed(OTHER, [Finding(f"in {words} other losses were computed", "", why)], ExitCode.DIFFERENT)
    return passed(OTHER, found)


def load_final(scene: Scene) -> Outcome:
    """Load what the run leaves behind as its users will."""
    output = scene.output(WHOLE)
    if not output.is_dir() or not any(output.glob("*.safetensors")):
        return left(FINAL, "stage 2 left no final model")
    from megatune.rehearse.against_transformers import load_in_transformers, merged_lines

    adapter = scene.settings.finetuning.finetuning_type == "lora"
    found, problems = load_in_transformers(output, scene.model_dir if adapter else None)
    if adapter and not problems:
        more, problems = merged_lines(scene.settings, scene.model_dir, output)
        found += more
    return failed(FINAL, problems, ExitCode.DIFFERENT) if problems else passed(FINAL, found)


def prove(scene: Scene) -> Outcome:
    """Compare logits, loss and gradients with Transformers, in the layout."""
    from megatune.rehearse.against_transformers import compare_with_transformers

    return compare_with_transformers(scene, PROOF, LIMIT)


Act = Callable[[Scene], Outcome]
ACTS: dict[str, Act] = {
    TRAIN: train,
    RESUME: resume,
    OTHER: resume_elsewhere,
    FINAL: load_final,
    PROOF: prove,
}


def _cannot_resume(scene: Scene) -> str | None:
    if scene.settings.checkpoint.save_only_model:
        return "save_only_model: true writes no training state, so a run that dies begins again"
    if not scene.saved.is_dir():
        return f"stage 2 left no checkpoint of step {scene.resumed}"
    return None


def _start(
    scene: Scene,
    settings: Settings,
    name: str,
    world_size: int | None = None,
    strike: Callable[[], bool] | None = None,
) -> Ended:
    """Train as `megatune train` does."""
    payload = {
        "settings": settings,
        "run_yaml": dump(settings, {}),
        "case": None,
        "asked": Loaded(settings, []),
        "plan": [],
        "began": time.monotonic(),
    }
    run_dir = scene.folder / "launch" / name
    return run_alone(_TARGET, payload, world_size or scene.world_size, run_dir, limit=LIMIT, strike=strike)


def _not_done(ended: Ended) -> tuple[list[Finding], ExitCode] | None:
    """Return what is wrong with a run that did not end as it should; None where it did."""
    if ended.code == ExitCode.DONE:
        return None
    # What a run advises names files that may go with the rehearsal.
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
    """Say where logged numbers of two runs are not equal bit for bit."""
    sides = [{step: each for step, each in steps_of(run).items() if step >= first} for run in (one, other)]
    found = [] if sides[0].keys() == sides[1].keys() else [f"steps {sorted(sides[0])} and {sorted(sides[1])}"]
    for step in sorted(sides[0].keys() & sides[1].keys()):
        for name in names:
            values = [side[step].get(name) for side in sides]
            if values[0] != values[1]:
                found.append(f"{name} of step {step}: {values[0]} and {values[1]}")
    return found


def different_rows(one: Path, other: Path, *, first: int) -> list[str]:
    """Say at which steps, from the first one on, two runs did not train as many tokens: their rows would be others."""
    return different_steps(one, other, _COUNTED, first=first)


def largest_difference(one: Path, other: Path) -> float:
    """Return by how much the losses of a step differ at most, relative to them; infinite where one is not a number."""
    first, second = steps_of(one), steps_of(other)
    apart = [0.0]
    for step in first.keys() & second.keys():
        before, now = (side[step].get("loss") for side in (first, second))
        if before is None or now is None:  # logged so where it is not a number
            return math.inf
        apart.append(abs(before - now) / max(abs(before), 1e-6))
    return max(apart)


def trained_steps(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the steps of a run that were not skipped, as those of fp16 are until the loss scale fits."""
    return {step: record for step, record in steps_of(output_dir).items() if not record.get("num_skipped")}


def not_finite(output_dir: Path) -> list[str]:
    """Name numbers of trained steps that are none: they are logged as null."""
    return [
        f"{name} of step {step}"
        for step, record in trained_steps(output_dir).items()
        for name in ("loss", "grad_norm")
        if record.get(name) is None
    ]


def different_tensors(one: Path, other: Path) -> tuple[int, list[str]]:
    """Compare the safetensors files of two folders.

    Returns:
        How many tensors there are, and the names of those that are not equal bit for bit.
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
            # One name may be in the files of several ranks, as states of random generators are.
            found.update({f"{path.name}: {name}": file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found
