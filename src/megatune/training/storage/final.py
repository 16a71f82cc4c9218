"""The final Hugging Face model in output_dir itself."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatune.training.storage.files import sync_file, sync_folder, writing
from megatune.training.storage.manifest import TRAINING_FOLDER, read_manifest

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_CONFIG = "config.json"


def finalize_model(checkpoint: Path, output_dir: Path) -> list[Path]:
    """Put the model of a committed checkpoint into `output_dir`: its Hugging Face files, not its training state.

    Weights are hard links where the file system allows, so they take no room; small files are copies, so that editing
    one leaves the checkpoint as it is. Half of a model never loads: `config.json`, without which Transformers refuses,
    is removed first and written last. Weights of an earlier model are removed: they could be loaded instead of these.

    Returns:
        The files of the model in `output_dir`.

    Raises:
        MegatuneError: CANNOT_WRITE; INPUT where the checkpoint has no sound manifest.
    """
    manifest = read_manifest(checkpoint)
    names = [file.name for file in manifest.files if not file.name.startswith(TRAINING_FOLDER)]
    names.sort(key=lambda name: (name == _CONFIG, name))
    bytes_needed = sum(file.size for file in manifest.files if file.name in names)
    with writing(output_dir, bytes_needed):
        (output_dir / _CONFIG).unlink(missing_ok=True)
        sync_folder(output_dir)
        for path in output_dir.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
        for name in names:
            _place(checkpoint / name, output_dir / name)
        sync_folder(output_dir)
    return [output_dir / name for name in names]


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    if not (source.suffix == ".safetensors" and _link(source, partial)):
        shutil.copyfile(source, partial)
        sync_file(partial)
    # Without this a rename onto another link to the same file would do nothing, and leave both names.
    target.unlink(missing_ok=True)
    os.replace(partial, target)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        return False
    return True
