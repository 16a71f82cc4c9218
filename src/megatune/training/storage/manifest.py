"""The manifest of a checkpoint: sizes and digests of its files, and their verification.

Digests detect damage (safetensors and torch_dist load a flipped bit without an error), but they are not signatures.
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
from megatune.hub.digests import FileDigest
from megatune.training.storage.files import write_atomically

FORMAT_VERSION = 1
MANIFEST_NAME = "training/manifest.json"
TRAINING_FOLDER = "training/"
_READ_BY_NAME = (".safetensors", ".index.json", ".distcp", ".metadata", "config.json")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: optimizer steps done.
        files: all files of the checkpoint except the manifest itself.
        metadata: from the training loop (layout, consumed rows, versions).
    """

    step: int
    files: tuple[FileDigest, ...]
    metadata: Mapping[str, Any]

    @property
    def resumable(self) -> bool:
        """Whether the checkpoint has training state."""
        return any(file.name.startswith(TRAINING_FOLDER) for file in self.files)


def digest_files(root: Path, paths: Iterable[Path]) -> list[FileDigest]:
    """Digest files under `root` in parallel threads, in the order of their names, and flush them to the disk.

    On a shared file system, only the machine that wrote a file can flush it.
    """
    files = sorted(set(paths))
    with ThreadPoolExecutor(max(1, min(len(files), os.cpu_count() or 1, 8))) as threads:
        digests = threads.map(lambda path: digest_file(path, sync=True), files)
        names = (path.relative_to(root).as_posix() for path in files)
        return [FileDigest(name, *found) for name, found in zip(names, digests, strict=True)]


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder with all its files."""
    content = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "metadata": dict(manifest.metadata),
        "files": [asdict(file) for file in manifest.files],
    }
    content = json.loads(json.dumps(content))  # as a reader gets it: tuples are lists, all keys are strings
    content["xxh3_128"] = _digest_of_json(content)
    path = checkpoint / MANIFEST_NAME
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest and verify its digest, but not the files.

    Raises:
        MegatuneError: INPUT, if it is missing, damaged or of an unsupported format version.
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
    """Read a file of a checkpoint and return its problem, "" if it matches the manifest.

    `on_read` is called with the number of bytes of each chunk.
    """

    def digest() -> bool:
        return digest_file(checkpoint / file.name, on_read=on_read)[1] == file.xxh3_128

    return problem_with(checkpoint, file, digest)


def problems_of(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Read all files of a checkpoint, and return their problems."""
    return [problem for file in manifest.files if (problem := problem_of(checkpoint, file))]


def problem_with(checkpoint: Path, file: FileDigest, matches: Callable[[], bool]) -> str:
    """Return the problem of a file's size, or of its content, which `matches` reads; "" for none."""
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
    """Return problems of files that would be read but are not in the manifest, as when two folders were merged."""
    known = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    return [
        f"{name} does not belong to this checkpoint: remove it"
        for name in sorted(found - known)
        if name.endswith(_READ_BY_NAME)
    ]


def digest_file(path: Path, *, sync: bool = False, on_read: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Return size and digest of a file. Reading and hashing release the GIL."""
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
