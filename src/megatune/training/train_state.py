"""The training state of a run, and checks of whether a run may resume from a checkpoint with changed settings. Imports
no torch, for the checks before a start."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megatune.config.model import new_tokens
from megatune.config.setting import Mark
from megatune.config.settings import Settings, marked
from megatune.config.values import shown
from megatune.data.cache.key import local_parts
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.manifest import TRAINING_FOLDER
from megatune.training.storage.store import checkpoint_step, list_checkpoints

STATE_NAME = "state.json"


@dataclass(slots=True)
class TrainState:
    """The progress of a run.

    Attributes:
        step: optimizer steps done.
        rows_digest: digest of everything that determines the rows (data/cache/key.py).
        rows_parts: description -> digest of each input of the rows; {} if unknown.
        global_batch_size: rows per step; with `seed` it determines the rows of each step.
        best_loss, best_step: the lowest evaluation loss so far, and its step.
        stream: the position in streamed data (data/streaming/blocks.py); None without streaming.
        base: digest of the adapters' base model (training/resume.py); "" without adapters.
        reference: digest of the reference model (training/reference.py); "" without one.
        objective: the state of the objective (`TrainingObjective.state_dict`).
        updates: optimizer updates, if a step may have several.
        bad_steps: the number of skipped steps (training/bad_steps.py).
        rope_scaling: the setting as YAML; "" if config.json is not changed.
        new_tokens: tokens added to the model, as YAML; "" for none.
        recent_losses, recent_grad_norms: of the last good steps.
    """

    step: int = 0
    rows_digest: str = ""
    global_batch_size: int = 0
    seed: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    stream: dict[str, Any] | None = None
    base: str = ""
    reference: str = ""
    objective: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    bad_steps: int = 0
    rope_scaling: str = ""
    new_tokens: str = ""
    recent_losses: list[float] = field(default_factory=list)
    recent_grad_norms: list[float] = field(default_factory=list)
    rows_parts: dict[str, str] = field(default_factory=dict)


def read_state(checkpoint: Path) -> TrainState | None:
    """Read the training state of a checkpoint; None if it has only a model."""
    path = checkpoint / TRAINING_FOLDER / STATE_NAME
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if "reward_sum" in content:  # until November 2026: the state of BCO, for every loss
        content["objective"] = {name: content[name] for name in ("reward_sum", "reward_pairs")}
    return TrainState(**{each.name: content[each.name] for each in fields(TrainState) if each.name in content})


# A key of `rows_parts`: the content of the rows, which may differ between versions of megatune for the same files.
ROWS = "the prepared rows"


def changed_batch(checkpoint: Path, state: TrainState, global_batch_size: int, seed: int) -> Iterator[Finding]:
    """Yield changes of the row order that are known before any data is read."""
    size = "rows per step (batch size × accumulation × data-parallel size)"
    for what, before, after in ((size, state.global_batch_size, global_batch_size), ("seed", state.seed, seed)):
        if before != after:
            changed = f"{what} was {before}, and is {after} in this run"
            why = "it would be unknown which rows are already trained"
            fix = f"set it to {before} again, or start again from the model with overwrite_output_dir: true"
            yield Finding(changed, str(checkpoint), why, fix)


def changed_data(checkpoint: Path, state: TrainState, parts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield changes of the rows that are known before they are prepared.

    Args:
        parts: some of the inputs of this run's rows (`data.cache.key.local_parts`).
    """
    before = {part: digest for part, digest in state.rows_parts.items() if part in parts}
    after = {part: parts[part] for part in before}
    if before != after:
        yield _other_rows(checkpoint, _changed_parts(before, after))


def _other_rows(checkpoint: Path, why: str) -> Finding:
    what = "the training rows differ from those that the run began with"
    fix = "put it back, or start again from the model with overwrite_output_dir: true"
    return Finding(what, str(checkpoint), why, fix)


def changed_since(checkpoint: Path, state: TrainState, expected: TrainState) -> Iterator[Finding]:
    """Yield changes of rows, batch, base or reference since a checkpoint, after which a run cannot continue from it.

    Args:
        expected: the initial state of this run.
    """
    yield from changed_batch(checkpoint, state, expected.global_batch_size, expected.seed)
    found = {parts[ROWS] for parts in (state.rows_parts, expected.rows_parts) if ROWS in parts}
    if state.rows_digest != expected.rows_digest or len(found) > 1:
        yield _other_rows(checkpoint, _changed_parts(state.rows_parts, expected.rows_parts))
    if not _is_same(state.base, expected.base):
        what = "the adapters were trained with another base"
        why = "the model's weights, or those of an adapter merged into them, have changed, or are quantized differently"
        if _is_same(*(each.base.partition("-")[0] for each in (state, expected))):
            why = "adapters merged into it have other scaling factors (lora_alpha, use_rslora) or are in another order"
        fix = "name the base that the run began with, or start a new run from the adapters: adapter_name_or_path"
        yield Finding(what, str(checkpoint), why, fix)
    elif not _is_same(state.reference, expected.reference):
        what = "answers were compared with another reference"
        why = "ref_model, or the model that the run started from, or an adapter merged into it, has changed since then"
        fix = "name the earlier reference, or start again from the model with overwrite_output_dir: true"
        yield Finding(what, str(checkpoint), why, fix)


def _is_same(before: str, now: str) -> bool:
    """Compare digests of `training.resume.digest_base`. Until November 2026 they had no part for merged adapters."""
    return before in (now, now.partition("-")[0])


def _changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the inputs of the rows that have changed."""
    if not before or not after:
        return "a file of the data sets, the tokenizer, the template or another data setting was changed"
    changed = [part for part in after if part in before and before[part] != after[part]]
    gone, new = ([part for part in one if part not in other] for one, other in ((before, after), (after, before)))
    lists = (("changed", changed), ("gone", gone), ("new", new))
    return "; ".join(f"{said}: {', '.join(parts)}" for said, parts in lists if parts) or "their order"


def changes_of(settings: Settings) -> tuple[str, str]:
    """Return `TrainState.rope_scaling` and `TrainState.new_tokens`.

    Raises:
        MegatuneError: see `new_tokens`.
    """
    scaling, tokens = settings.model.rope_scaling, new_tokens(settings)
    added = [] if tokens is None else [*tokens.plain, *tokens.special]
    return "" if scaling is None else shown(scaling), shown(added) if added else ""


_CHANGES = (
    ("rope_scaling was", "null", "weights and rotary embeddings were trained together"),
    ("tokens that are added were", "none", "the checkpoint has rows for the tokens that it was trained with"),
)


def _changed_model(checkpoint: Path, state: TrainState, settings: Settings) -> Iterator[Finding]:
    """Yield changes of the model's settings."""
    before, after = (state.rope_scaling, state.new_tokens), changes_of(settings)
    for (what, none, why), was, is_now in zip(_CHANGES, before, after, strict=True):
        if was != is_now:
            fix = f"go back to {was or none}, or start again from the model with overwrite_output_dir: true"
            verb = "are" if what.endswith("were") else "is"
            yield Finding(f"{what} {was or none}, and {verb} {is_now or none} in this run", str(checkpoint), why, fix)


_BATCH_SETTINGS = ("batch.per_device_train_batch_size", "batch.gradient_accumulation_steps", "run.seed")


def checkpoints_to_try(settings: Settings) -> list[Path]:
    """Return the checkpoints that the run may resume from, in order of preference, before they are verified."""
    asked, output_dir = settings.run.resume_from_checkpoint, settings.run.output_dir
    if isinstance(asked, str):
        return [Path(asked)]
    if asked is False or settings.run.overwrite_output_dir or output_dir is None:
        return []
    return list_checkpoints(Path(output_dir))[::-1]


def checkpoint_to_try(settings: Settings) -> Path | None:
    """Return the first of `checkpoints_to_try`; None for none."""
    return next(iter(checkpoints_to_try(settings)), None)


def check_rerun(settings: Settings, world_size: int | None, invalid: Collection[str] = ()) -> None:
    """Check by small files that a run can continue from its checkpoint, and does not mix with another run.

    Args:
        world_size: processes of the whole run; None if unknown.
        invalid: "group.name" of invalid settings.

    Raises:
        MegatuneError: SETTINGS, if the rows or their order have changed; CANNOT_WRITE, see `later_checkpoints`.
    """
    if settings.run.output_dir is None:  # reported elsewhere
        return
    resumed = checkpoint_to_try(settings)
    state = _readable_state(resumed) if resumed is not None else None
    if resumed is not None and state is None:
        return  # ranks verify it, and report the damage or use an older one
    later_checkpoints(settings, resumed, state.step if state is not None else 0)
    if state is None or resumed is None:
        return
    findings: list[Finding] = []
    parallel, batch = settings.parallel, settings.batch
    if world_size is not None and not {*_BATCH_SETTINGS} & {*invalid}:
        replicas = world_size // parallel.model_parallel_size
        rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas
        findings += changed_batch(resumed, state, rows, settings.run.seed)
    if not any(path.startswith("model.") for path in invalid):
        findings += _changed_model(resumed, state, settings)
    if not any(path.startswith("data.") for path in invalid):
        with contextlib.suppress(MegatuneError):  # problems of the data itself are reported elsewhere
            findings += changed_data(resumed, state, local_parts(settings))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def later_checkpoints(settings: Settings, resumed: Path | None, step: int) -> list[Path]:
    """Return an earlier run's checkpoints after the step at which this run begins, which overwrite_output_dir deletes:
    the next resume would use them.

    Raises:
        MegatuneError: CANNOT_WRITE, if there are some, without overwrite_output_dir.
    """
    assert settings.run.output_dir is not None
    output_dir, asked = Path(settings.run.output_dir), settings.run.resume_from_checkpoint
    beyond = [path for path in list_checkpoints(output_dir) if (checkpoint_step(path) or 0) > step]
    if not beyond or (resumed is not None and not isinstance(asked, str)):
        return []  # an automatic resume skipped these as damaged; the run replaces them when it reaches their steps
    if not settings.run.overwrite_output_dir:
        what = f"{output_dir} holds {', '.join(path.name for path in beyond[-3:])} of an earlier run"
        why = f"this run begins at step {step}, and the next resume could not distinguish them from its own"
        fix = "overwrite_output_dir: true deletes them; another output_dir keeps them"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.CANNOT_WRITE)
    return beyond


def rerun_lines(settings: Settings, run_yaml: str) -> list[str]:
    """Return a line on the checkpoint and one for each setting that has changed since; [] for a new or unchanged run.

    Args:
        run_yaml: the text of this run's OUTPUT/run.yaml, while the file still is the earlier run's.
    """
    begins = checkpoint_to_try(settings)
    if begins is None or not (begins.parent / "run.yaml").is_file():
        return []
    then, now = _values((begins.parent / "run.yaml").read_text(errors="replace")), _values(run_yaml)
    ignored = {path.partition(".")[2] for path in marked(Mark.START)}
    changed = [key for key in now if key in then and key not in ignored and then[key] != now[key]]
    if not changed:
        return []
    fresh = "overwrite_output_dir: true starts from the model; another output_dir keeps both"
    return [
        f"resume     from {begins}, with changed settings from there on ({fresh})",
        *(f"changed    {key}: {shown(then[key])} in the run before, {shown(now[key])} now" for key in changed),
    ]


def _readable_state(checkpoint: Path) -> TrainState | None:
    with contextlib.suppress(OSError, ValueError, TypeError):  # damaged: reported when its digests are compared
        return read_state(checkpoint)
    return None


def _values(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # not written by megatune
    return content if isinstance(content, dict) else {}
