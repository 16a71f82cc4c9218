"""What a run that goes on from an earlier one is told before it starts: from where, and with which other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatune.config.settings import Settings
from megatune.config.values import shown
from megatune.training.storage.store import list_checkpoints

# They say where to begin, not how to train.
_OF_THE_START = {"resume_from_checkpoint", "overwrite_output_dir"}


def rerun_lines(settings: Settings, run_yaml: str) -> list[str]:
    """Return a line on the checkpoint and one for each setting that differs from those it was trained with.

    Args:
        run_yaml: the text of this run's OUTPUT/run.yaml, which the earlier one's still is in the place of.

    Returns:
        Nothing where the run starts anew, or goes on as it was.
    """
    begins = _begins_at(settings)
    if begins is None:
        return []
    then, now = _values((begins.parent / "run.yaml").read_text(errors="replace")), _values(run_yaml)
    changed = [key for key in now if key in then and key not in _OF_THE_START and then[key] != now[key]]
    if not changed:
        return []
    anew = "overwrite_output_dir: true starts anew; another output_dir keeps both"
    return [
        f"resume     goes on from {begins}, with other settings from there on ({anew})",
        *(f"changed    {key}: {shown(then[key])} in the run before, {shown(now[key])} now" for key in changed),
    ]


def _begins_at(settings: Settings) -> Path | None:
    """Return the checkpoint that the run will try first; None where there is none, or nothing is noted beside it."""
    assert settings.run.output_dir is not None
    asked = settings.run.resume_from_checkpoint
    if isinstance(asked, str):
        begins = Path(asked)
    elif (
        asked is False
        or settings.run.overwrite_output_dir
        or not (found := list_checkpoints(Path(settings.run.output_dir)))
    ):
        return None
    else:
        begins = found[-1]
    return begins if (begins.parent / "run.yaml").is_file() else None


def _values(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # somebody else's run.yaml
    return content if isinstance(content, dict) else {}
