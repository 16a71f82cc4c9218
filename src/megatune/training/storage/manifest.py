"""The manifest of a checkpoint: every file's size and digest, and whether they still hold.

Digests find damage (a flipped bit loads from safetensors and torch_dist without a word); they do not prove who wrote
a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.files import write_atomically

FORMAT_VERSION = 1
MANIFEST_NAME = "training/manifest.json"
TRAINING_FOLDER = "training/"
_READ_BY_NAME = (".safetensors", ".index.json", ".distcp", ".metadata", "config.json")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file of a checkpoint: its path inside (with forward slashes), its bytes, its digest (32 hexadecimal digits)."""

    name: str
    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a committed checkpoint says about itself.

    Attributes:
        step: optimizer steps done.
        files: every file of the checkpoint but the manifest itself.
        metadata: what the training loop wrote along (layout, consumed samples, versions).
    """

    step: int
    files: tuple[FileDigest, ...]
    metadata: Mapping[str, Any]

    @property
    def resumable(self) -> bool:
        """It holds training state, not the model only."""
        return any(file.name.startswith(TRAINING_FOLDER) for file in self.files)


def digest_files(root: Path, paths: Iterable[Path]) -> list[FileDigest]:
    """Digest files under `root` in parallel threads, in the order of their names, and force them to the disk.

    Only the machine that wrote a file can do the latter, on a shared file system.
    """
    files = sorted(set(paths))
    with ThreadPoolExecutor(max(1, min(len(files), os.cpu_count() or 1, 8))) as threads:
        digests = threads.map(lambda path: digest_file(path, sync=True), files)
        names = (path.relative_to(root).as_posix() for path in files)
        return [FileDigest(name, *found) for name, found in zip(names, digests, strict=True)]


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder whose files are all in place."""
    content = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "metadata": dict(manifest.metadata),
        "files": [asdict(file) for file in manifest.files],
    }
    content = json.loads(json.dumps(content))  # what a reader will get: tuples are lists, all keys are strings
    content["xxh3_128"] = _digest_of_json(content)
    path = checkpoint / MANIFEST_NAME
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest and check it against its own digest (the files are not looked at).

    Raises:
        MegatuneError: INPUT, where it is absent, damaged or of a format that this version does not read.
    """
    try:
        content = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
        version, digest = content["format_version"], content.pop("xxh3_128", None)
    except FileNotFoundError:
        raise _refused(checkpoint, f"{MANIFEST_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(checkpoint, f"{MANIFEST_NAME} cannot be read: {error}") from error
    if version != FORMAT_VERSION:
        what = f"{MANIFEST_NAME} has format version {version}; this megatune reads version {FORMAT_VERSION}"
        raise _refused(checkpoint, what, fix="use the version of megatune that wrote it")
    if digest != _digest_of_json(content):
        raise _refused(checkpoint, f"{MANIFEST_NAME} is damaged: its digest does not match")
    files = tuple(FileDigest(**file) for file in content["files"])
    outside = [file.name for file in files if (path := PurePosixPath(file.name)).is_absolute() or ".." in path.parts]
    if outside:
        raise _refused(checkpoint, f"{MANIFEST_NAME} names files outside the checkpoint: {', '.join(outside)}")
    return Manifest(content["step"], files, content["metadata"])


def problem_of(checkpoint: Path, file: FileDigest, on_read: Callable[[int], None] | None = None) -> str:
    """Read a file of a checkpoint and say what is wrong with it, "" where it is as the manifest has it.

    `on_read` is called with the bytes of every piece that was read.
    """

    def digest() -> bool:
        return digest_file(checkpoint / file.name, on_read=on_read)[1] == file.xxh3_128

    return problem_with(checkpoint, file, digest)


def problem_with(checkpoint: Path, file: FileDigest, matches: Callable[[], bool]) -> str:
    """Say what is wrong with a file: with its size, or with its content, which `matches` reads."""
    try:
        size = (checkpoint / file.name).stat().st_size
        if size != file.size:
            return f"{file.name} has {size} of {file.size} bytes"
        return "" if matches() else f"{file.name} is damaged: its digest does not match"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def added_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Say which files of a checkpoint would be read and are not in its manifest, as where two folders were merged: an
    index beside weights in one file leads to others."""
    known = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    return [
        f"{name} does not belong to this checkpoint: remove it"
        for name in sorted(found - known)
        if name.endswith(_READ_BY_NAME)
    ]


def digest_file(path: Path, *, sync: bool = False, on_read: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Return bytes and digest of a file; reading and hashing both release the interpreter lock."""
    state = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
            if on_read is not None:
                on_read(count)
        if sync:
            os.fsync(file.fileno())
    return size, state.hexdigest()


def _digest_of_json(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _refused(checkpoint: Path, what: str, fix: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where=str(checkpoint), fix=fix), ExitCode.INPUT)
