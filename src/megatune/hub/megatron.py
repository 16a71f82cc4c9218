"""Folders in Megatron-Core's torch_dist format: location of the weights, and the model that they belong to."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.references import ref

TRACKER, METADATA, ARGS = "latest_checkpointed_iteration.txt", ".metadata", "args.json"
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def is_torch_dist(folder: str | Path) -> bool:
    """Return whether a folder has weights in this format, and no safetensors."""
    return _has(folder, TRACKER, METADATA) and not _has(folder, *_WEIGHTS)


def is_hugging_face(folder: str | Path) -> bool:
    """Return whether a folder has safetensors, and no weights in this format."""
    return _has(folder, *_WEIGHTS) and not _has(folder, TRACKER, METADATA)


def _has(folder: str | Path, *names: str) -> bool:
    # For names that no file system supports, os.path returns False, but Path raises.
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def iteration_name(iteration: int) -> str:
    """Return Megatron's name of the folder of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_folder(folder: str | Path) -> Path:
    """Return the folder with .metadata: that of the iteration that the tracker names, or the folder itself.

    Raises:
        MegatuneError: INPUT, if there is none.
    """
    path = Path(folder)
    if (path / METADATA).is_file():
        return path
    try:
        said = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        fix = f"give the folder with {TRACKER}, or the iter_N folder in it"
        raise _refused(path, "is not a Megatron-Core checkpoint in torch_dist format", "", fix) from None
    if not re.fullmatch(r"\d{1,18}|release", said):
        raise _refused(path / TRACKER, f"says {said[:40]!r}", "expected a number, or release", "name an iter_N folder")
    found = path / (said if said == "release" else iteration_name(int(said)))
    if (found / METADATA).is_file():
        return found
    why = f"{TRACKER} names it"
    if (found / "common.pt").is_file() and not any(found.glob("*.distcp")):
        why = "it has common.pt only, as Megatron-SWIFT writes it with no_save_optim: its weights are safetensors"
    elif any(found.glob("mp_rank_*")):
        why = "it is in Megatron's older format, ckpt_format torch, with pickles"
    raise _refused(found, f"has no {METADATA}", why, "give a checkpoint with ckpt_format torch_dist")


def described_by(folder: str | Path) -> str | None:
    """Return the model with the config.json and tokenizer of the weights: a folder, or an id on a hub; None if unknown.

    Files next to the weights take precedence over the model that Megatron-SWIFT's args.json names.
    """
    path = Path(folder)
    places = [path, path.parent] if (path / METADATA).is_file() else [path]
    for place in places:
        if (place / _CONFIG).is_file():
            return str(place)
    for place in places:
        try:
            said = json.loads((place / ARGS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        names = [said[key] for key in ("model_dir", "model") if isinstance(said, dict) and said.get(key)]
        here = [name for name in names if isinstance(name, str) and (Path(name) / _CONFIG).is_file()]
        if here:
            return here[0]
        return next((name for name in reversed(names) if isinstance(name, str)), None)
    return None


def no_config(folder: str | Path, described: str | None) -> MegatuneError:
    """Return the error if nothing describes the model, or if the model that does, `described`, is not available."""
    why = f"neither a config.json nor an {ARGS} is next to the weights"
    if described is not None:
        why = f"its {ARGS} names {described!r}, which does not exist here"
    both = f"{ref('model_name_or_path')} and {ref('mcore_model')}"
    fix = f"also name the Hugging Face model that it was made from: set both {both}"
    return _refused(Path(folder), "does not state its model", why, fix)


def _refused(path: Path, what: str, why: str = "", fix: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, str(path), why, fix), ExitCode.INPUT)
