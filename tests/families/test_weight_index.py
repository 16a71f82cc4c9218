"""An index of weights names files of its own folder, or is refused with the tensor, and never with a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.families.weight_index import read_weight_index


def _index(folder: Path, content: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_files_of_the_folder_are_named(tmp_path: Path) -> None:
    file_of = {"a": "model-1.safetensors", "b": "part/model-2.safetensors"}
    assert read_weight_index(_index(tmp_path, {"weight_map": file_of})) == file_of


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b", "..\\b", "/"])
def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path: Path, file: str) -> None:
    with pytest.raises(MegatuneError, match="outside of the checkpoint") as caught:
        read_weight_index(_index(tmp_path, {"weight_map": {"lm_head.weight": file}}))
    assert caught.value.exit_code == ExitCode.INPUT
    assert "lm_head.weight" in caught.value.findings[0].what


@pytest.mark.parametrize(
    "content",
    [[1, 2], None, 7, {"weight_map": [1]}, {"weight_map": None}, {"weight_map": {"a": 1}}, {"weight_map": {"a": None}},
     {"weight_map": {"a": ["b"]}}, {"weight_map": {"a": ""}}, {"weight_map": {"a": "b\0"}}, {}, "{", "[" * 100_000],
)  # fmt: skip
def test_what_is_no_index_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(MegatuneError, match="is not an index of weights") as caught:
        read_weight_index(_index(tmp_path, content))
    assert caught.value.exit_code == ExitCode.INPUT
