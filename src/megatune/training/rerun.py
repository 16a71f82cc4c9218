"""A run that continues from an earlier one: from where, whether it may, and with which other settings; without torch,
for start-up checks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from megatune.config.setting import Mark
from megatune.config.settings import Settings, marked
from megatune.config.values import shown
from megatune.data.cache.key import local_parts
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.store import checkpoint_step, list_checkpoints
from megatune.training.train_state import TrainState, changed_batch, changed_data, read_state

_OF_THE_BATCH = ("batch.per_device_train_batch_size", "batch.gradient_accumulation_steps", "run.seed")


def checkpoint_to_try(settings: Settings) -> Path | None:
    """Return the checkpoint that the run will try first, before any of its files is verified; None for none."""
    asked, output_dir = settings.run.resume_from_checkpoint, settings.run.output_dir
    if isinstance(asked, str):
        return Path(asked)
    if asked is False or settings.run.overwrite_output_dir or output_dir is None:
        return None
    return next(reversed(list_checkpoints(Path(output_dir))), None)


def check_rerun(settings: Settings, world_size: int | None, invalid: Collection[str] = ()) -> None:
    """Refuse what a run cannot continue from and what it would mix up, as far as small files show it.

    Args:
        world_size: processes of the whole run; None where that is not known.
        invalid: "group.name" of settings that were refused.

    Raises:
        MegatuneError: SETTINGS, where rows would be others or come in another order; CANNOT_WRITE, see
            `later_checkpoints`.
    """
    if settings.run.output_dir is None:  # refused elsewhere
        return
    resumed = checkpoint_to_try(settings)
    state = _readable_state(resumed) if resumed is not None else None
    if resumed is not None and state is None:
        return  # ranks verify it, and name what is damaged or take an older one
    later_checkpoints(settings, resumed, state.step if state is not None else 0)
    if state is None or resumed is None:
        return
    findings: list[Finding] = []
    parallel, batch = settings.parallel, settings.batch
    if world_size is not None and not {*_OF_THE_BATCH} & {*invalid}:
        replicas = world_size // parallel.model_parallel_size
        rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas
        findings += changed_batch(resumed, state, rows, settings.run.seed)
    if not any(path.startswith("data.") for path in invalid):
        with contextlib.suppress(MegatuneError):  # what is wrong with the data itself is found elsewhere
            findings += changed_data(resumed, state, local_parts(settings))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def later_checkpoints(settings: Settings, resumed: Path | None, step: int) -> list[Path]:
    """Return an earlier run's checkpoints beyond the step that this run begins at, which the user said to delete: the
    next resume would take them for this run's.

    Raises:
        MegatuneError: CANNOT_WRITE, when there are some and the user did not.
    """
    assert settings.run.output_dir is not None
    output_dir, asked = Path(settings.run.output_dir), settings.run.resume_from_checkpoint
    beyond = [path for path in list_checkpoints(output_dir) if (checkpoint_step(path) or 0) > step]
    if not beyond or (resumed is not None and not isinstance(asked, str)):
        return []  # an automatic resume skipped these as damaged; the run replaces them when it comes to their steps
    if not settings.run.overwrite_output_dir:
        what = f"{output_dir} holds {', '.join(path.name for path in beyond[-3:])} of an earlier run"
        why = f"this run begins at step {step}, and the next resume could not distinguish them from its own"
        fix = "overwrite_output_dir: true deletes them; another output_dir keeps them"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.CANNOT_WRITE)
    return beyond


def rerun_lines(settings: Settings, run_yaml: str) -> list[str]:
    """Return a line on the checkpoint and one for each setting that differs from those it was trained with.

    Args:
        run_yaml: the text of this run's OUTPUT/run.yaml, while the file still has the earlier one's.

    Returns:
        Nothing where the run starts from its model, or continues unchanged.
    """
    begins = checkpoint_to_try(settings)
    if begins is None or not (begins.parent / "run.yaml").is_file():
        return []
    then, now = _values((begins.parent / "run.yaml").read_text(errors="replace")), _values(run_yaml)
    of_the_start = {path.partition(".")[2] for path in marked(Mark.START)}
    changed = [key for key in now if key in then and key not in of_the_start and then[key] != now[key]]
    if not changed:
        return []
    fresh = "overwrite_output_dir: true starts from the model; another output_dir keeps both"
    return [
        f"resume     from {begins}, with changed settings from there on ({fresh})",
        *(f"changed    {key}: {shown(then[key])} in the run before, {shown(now[key])} now" for key in changed),
    ]


def _readable_state(checkpoint: Path) -> TrainState | None:
    with contextlib.suppress(OSError, ValueError, TypeError):  # damaged: said where its digests are compared
        return read_state(checkpoint)
    return None


def _values(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # somebody else's run.yaml
    return content if isinstance(content, dict) else {}
