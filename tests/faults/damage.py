"""Random damage to the files of a folder: bytes, whole files, names, and what JSON in them says."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import JSON
from hypothesis import strategies as st

BYTES = ("a bit flipped", "cut short", "bytes appended", "bytes overwritten", "a stretch of zeros")
FILES = (
    *("deleted", "emptied", "renamed", "a folder in its place", "exchanged with another"),
    *("another run's", "a link to nothing"),
)
TEXTS = ("JSON edited", "a header edited")


@dataclass(frozen=True)
class Damage:
    """What is done to one file, chosen by shares of what is there."""

    kind: str
    file: float
    place: float
    amount: int
    value: Any

    def do(self, folder: Path, other: Path) -> tuple[Path, bool]:
        """Damage a file of a folder whose files may be links to others.

        Args:
            other: a folder of the same kind, of another run.

        Returns:
            The file, and whether anything is other than it was.
        """
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if self.kind == "JSON edited":
            files = [path for path in files if path.suffix == ".json"]
        elif self.kind == "a header edited":
            files = [path for path in files if path.suffix == ".safetensors"]
        if not files:
            return folder, False
        path = files[int(self.file * len(files))]
        before = path.read_bytes()
        if self.kind in BYTES:
            self._replace(path, self._bytes(before))
        elif self.kind == "JSON edited":
            self._replace(path, json.dumps(edited(json.loads(before), self.place, self.value)).encode())
        elif self.kind == "a header edited":
            self._replace(path, self._header(before))
        else:
            self._file(path, files, other / path.relative_to(folder))
        return path, not path.is_file() or path.read_bytes() != before

    def _replace(self, path: Path, content: bytes) -> None:
        path.unlink()  # another name of the same file must not change along
        path.write_bytes(content)

    def _bytes(self, content: bytes) -> bytes:
        at = int(self.place * len(content))
        match self.kind:
            case "a bit flipped":
                changed = bytearray(content)
                if changed:
                    changed[at] ^= 1 << self.amount % 8
                return bytes(changed)
            case "cut short":
                return content[:at]
            case "bytes appended":
                return content + bytes([self.amount % 256]) * (1 + self.amount % 100)
            case "a stretch of zeros":
                return content[:at] + bytes(len(content[at : at + self.amount])) + content[at + self.amount :]
        return content[:at] + bytes([self.amount % 256]) + content[at + 1 :]

    def _header(self, content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.dumps(edited(json.loads(content[8 : 8 + size]), self.place, self.value)).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + size :]

    def _file(self, path: Path, files: list[Path], theirs: Path) -> None:
        match self.kind:
            case "deleted":
                path.unlink()
            case "emptied":
                self._replace(path, b"")
            case "renamed":
                path.rename(path.with_name(f"{path.name}.bak"))
            case "a folder in its place":
                path.unlink()
                path.mkdir()
            case "a link to nothing":
                path.unlink()
                path.symlink_to("nowhere")
            case "exchanged with another":
                second = files[int(self.place * len(files))]
                first, other = path.read_bytes(), second.read_bytes()
                self._replace(path, other)
                self._replace(second, first)
            case "another run's":
                if theirs.is_file():
                    self._replace(path, theirs.read_bytes())


def edited(content: Any, place: float, value: Any) -> Any:
    """Return JSON with one of its values, or of its keys, changed or left out."""
    content = copy.deepcopy(content)
    inside: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, each in pairs:
            inside.append((node, key))
            walk(each)

    walk(content)
    if not inside:
        return value
    node, key = inside[int(place * len(inside))]
    if value == "deleted":
        del node[key]
    elif isinstance(value, list) and value[:1] == ["named"] and isinstance(node, dict):
        node[str(value[1:])] = node.pop(key)
    elif isinstance(value, list) and value[:1] == ["times"] and isinstance(node[key], int | float):
        node[key] *= value[1]
    else:
        node[key] = value
    return content


_SHARE = st.floats(0, 1, exclude_max=True)
_TIMES = st.sampled_from([-1, 0, 2, 3, 0.5, 10**9, 10**30]).map(lambda factor: ["times", factor])
_NEAR = st.sampled_from([True, "F16", "I64", "F8_E4M3", "../x.safetensors", "/etc/passwd", "model.safetensors"])
_VALUES = st.one_of(st.just("deleted"), _TIMES, st.just(["named", "x"]), JSON, st.integers(0, 100), _NEAR)
DAMAGES: st.SearchStrategy[Damage] = st.builds(
    Damage, st.sampled_from((*BYTES, *FILES, *TEXTS, *TEXTS)), _SHARE, _SHARE, st.integers(0, 5000), _VALUES
)


def copied(folder: Path, target: Path, copy_file: Callable[..., Any] = os.link) -> Path:
    """Copy a folder, its files as links."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, copy_function=copy_file)
    return target
