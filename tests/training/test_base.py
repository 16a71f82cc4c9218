"""The digest of an adapter's base, which is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatune.training import base


def test_a_file_is_read_again_only_where_it_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one" * 1000)
    first = base._kept_digest(path)
    read = base.digest_file
    monkeypatch.setattr(base, "digest_file", None)
    assert base._kept_digest(path) == first
    monkeypatch.setattr(base, "digest_file", read)
    before = path.stat()
    path.write_bytes(b"two" * 1000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    assert base._kept_digest(path) != first
    monkeypatch.setenv("MEGATUNE_CACHE", "/proc/none")
    assert base._kept_digest(path) == read(path)
