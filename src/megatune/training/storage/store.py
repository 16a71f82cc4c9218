"""The checkpoint folders of an output_dir: creates, commits, finds, rotates and cleans them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatune.hub.digests import FileDigest
from megatune.training.storage.files import sync, writing
from megatune.training.storage.manifest import (
    MANIFEST_NAME,
    TRAINING_FOLDER,
    Manifest,
    digest_files,
    read_manifest,
    write_manifest,
)

_logger = logging.getLogger(__name__)
_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_ITERATION = re.compile(r"iter_\d{7,}")  # of the same model in Megatron-Core's format
# Transformers and peft load nothing without these.
_CONFIGS = ("config.json", "adapter_config.json")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Hidden names of folders that are being written, replaced by a commit, or deleted.
_HIDDEN = re.compile(r"\.(checkpoint-\d+)\.(partial|replaced|deleted)")


class CheckpointStore:
    """Writes checkpoints into `output_dir`. One rank calls `begin` and `commit`; every rank may call the other methods.

    The order of calls, with barriers in between:

        one rank     begin(step)
        every rank   writes its files under partial(step), with their digests (`bridge.file_stream`, `digest_files`)
        one rank     commit(step, all digests gathered, metadata)

    Every method raises MegatuneError (CANNOT_WRITE) if a write fails.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = Path(output_dir)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the committed checkpoint of `step`."""
        return self.output_dir / f"checkpoint-{step}"

    def partial(self, step: int) -> Path:
        """Return the folder into which the checkpoint of `step` is written."""
        return self.output_dir / f".checkpoint-{step}.partial"

    def begin(self, step: int) -> Path:
        """Create an empty folder to write the checkpoint of `step` into, replacing that of an interrupted save."""
        partial = self.partial(step)
        with writing(partial):
            _remove(partial)
            partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, digests: Iterable[FileDigest] = (), metadata: Mapping[str, Any] | None = None) -> Path:
        """Commit the checkpoint of `step` and return its folder. An older one of the same step is replaced.

        Args:
            digests: of the files of all ranks. Files without a digest are digested here.
            metadata: JSON values for the manifest.

        Raises:
            ValueError: two digests of a file differ, or a file with a digest is missing or has another size.
        """
        partial, final = self.partial(step), self.checkpoint(step)
        with writing(partial):
            files = _all_digests(partial, digests)
            write_manifest(partial, Manifest(step, files, metadata or {}))
            for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
                sync(folder)
            replaced = _hidden(final, "replaced")
            if final.exists():
                _remove(replaced)
                os.rename(final, replaced)
            os.rename(partial, final)
            sync(self.output_dir)
            _remove(replaced)
        return final


def _all_digests(partial: Path, digests: Iterable[FileDigest]) -> tuple[FileDigest, ...]:
    """Return one digest for each file under `partial`, sorted by name."""
    by_name: dict[str, FileDigest] = {}
    for file in digests:
        if by_name.setdefault(file.name, file) != file:
            raise ValueError(f"two digests of {file.name}: {by_name[file.name]} and {file}")
    present = {path.relative_to(partial).as_posix(): path for path in partial.rglob("*") if path.is_file()}
    for name, file in by_name.items():
        if name not in present or present[name].stat().st_size != file.size:
            raise ValueError(f"{name} was digested with {file.size} bytes and is missing or has changed since")
    rest = [path for name, path in present.items() if name not in by_name and name != MANIFEST_NAME]
    by_name |= {file.name: file for file in digest_files(partial, rest)}
    return tuple(by_name[name] for name in sorted(by_name))


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint's name, None for other names."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoint-N folders of `output_dir` in order of steps; [] if it does not exist."""
    if not output_dir.is_dir():
        return []
    steps = ((checkpoint_step(path), path) for path in output_dir.iterdir() if path.is_dir())
    return [path for _, path in sorted((step, path) for step, path in steps if step is not None)]


def rotate(output_dir: Path, save_total_limit: int | None, keep: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`, but not the newest. Call it after a commit.

    Args:
        save_total_limit: the number of checkpoints to keep; None for all.
        keep: counted, but never deleted: the one just committed and the best one.
    """
    if save_total_limit is None:
        return
    checkpoints = list_checkpoints(output_dir)
    excess = max(0, len(checkpoints) - max(1, save_total_limit))
    kept = {path.resolve() for path in keep}
    remove_checkpoints([path for path in checkpoints[:-1] if path.resolve() not in kept][:excess])


def remove_checkpoints(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints. An interruption leaves no incomplete checkpoint under its name."""
    for path in checkpoints:
        with writing(path):
            _remove(path)


def clean_partials(output_dir: Path) -> None:
    """Remove unfinished checkpoints of killed runs. Call it at the start, while holding the OutputLock.

    A checkpoint that an interrupted commit was about to replace is restored.
    """
    for path in sorted(output_dir.iterdir()):
        if match := _HIDDEN.fullmatch(path.name):
            name, state = match.groups()
            with writing(path):
                if state == "replaced" and not (output_dir / name).exists():
                    os.rename(path, output_dir / name)
                else:
                    _remove(path)


def _hidden(path: Path, state: str) -> Path:
    """Return .checkpoint-N.STATE for checkpoint-N, or for a hidden name of it."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(f".{match[1] if match else path.name}.{state}")


def _remove(path: Path) -> None:
    """Rename a folder to a hidden name and delete it, so that an interruption leaves no partial checkpoint.

    Files that cannot be deleted (still open on NFS) are left under the hidden name for `clean_partials`.
    """
    if not path.exists():
        return
    deleted = _hidden(path, "deleted")
    if path != deleted:
        if deleted.exists():
            shutil.rmtree(deleted)
        os.rename(path, deleted)
    try:
        shutil.rmtree(deleted)
    except OSError as error:
        _logger.warning("cannot delete %s: %s", deleted, error)


def finalize_model(checkpoint: Path, output_dir: Path) -> None:
    """Put the model of a committed checkpoint, without its training state, into `output_dir`.

    Weights are hard links if the file system supports them; small files are copies, so that editing one does not change
    the checkpoint. A partial model never loads, since `config.json` (or `adapter_config.json`) is removed first and
    written last. Weights of an earlier model are removed.

    Raises:
        MegatuneError: CANNOT_WRITE; INPUT, if the checkpoint has no valid manifest.
    """
    manifest = read_manifest(checkpoint)
    names = [file.name for file in manifest.files if not file.name.startswith(TRAINING_FOLDER)]
    names.sort(key=lambda name: (name in _CONFIGS, name))
    iterations = {name.partition("/")[0] for name in names if _ITERATION.match(name)}
    bytes_needed = sum(file.size for file in manifest.files if file.name in names)
    with writing(output_dir, bytes_needed):
        for name in _CONFIGS:
            (output_dir / name).unlink(missing_ok=True)
        sync(output_dir)
        for path in output_dir.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
            elif iterations and _ITERATION.fullmatch(path.name) and path.name not in iterations:
                shutil.rmtree(path)
        for name in names:
            _link_or_copy(checkpoint / name, output_dir / name)
        sync(output_dir)


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    if source.suffix in (".safetensors", ".distcp"):
        with contextlib.suppress(OSError):  # another file system, or one without hard links
            os.link(source, partial)
    if not partial.exists():
        shutil.copyfile(source, partial)
        sync(partial)
    # Renaming onto another link to the same file would do nothing, and leave both names.
    target.unlink(missing_ok=True)
    os.replace(partial, target)
