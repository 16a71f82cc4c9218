"""What a checkpoint's files say they hold: NAME.safetensors.index.json, and the header of a safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from megatune.errors import ExitCode, Finding, MegatuneError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_MOST_HEADER = 100_000_000  # bytes; the safetensors library's own limit


def read_weight_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by names relative to the index's folder, which they do not leave.

    Raises:
        MegatuneError: the file is no index, or names files elsewhere (exit code 66).
    """
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_index(index, str(error)) from None
    if not isinstance(file_of, dict):
        raise _no_index(index, "weight_map is not an object")
    for tensor, file in file_of.items():
        if not isinstance(file, str) or not file or "\0" in file:
            raise _no_index(index, f"weight_map: {tensor} is in {file!r}, which is not the name of a file")
        path = PurePosixPath(file.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            what, why = f"weight_map: {tensor} is in {file}, outside of the checkpoint", "a checkpoint is one folder"
            raise MegatuneError(Finding(what, str(index), why, "download the checkpoint again"), ExitCode.INPUT)
    return file_of


def tensor_names(folder: Path, name: str = "model.safetensors") -> Collection[str]:
    """Return the names of a checkpoint's tensors, by its index, or by the header of its one file.

    Raises:
        MegatuneError: as `read_weight_index`.
    """
    if (index := folder / f"{name}.index.json").is_file():
        return read_weight_index(index).keys()
    try:
        with open(folder / name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MOST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        header = {}  # what reads the tensors says what is wrong with it
    return [key for key in header if key != "__metadata__"] if isinstance(header, dict) else []


def check_layers(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse a config.json with more layers than the weights have (exit code 66)."""
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    numbers = {int(match[1]) for name in tensor_names(folder) if (match := _LAYER.search(name))}
    if isinstance(layers, int) and numbers and layers > max(numbers) + 1:
        what, why = (
            f"config.json has {layers} layers, and the weights {max(numbers) + 1}",
            "one of them belongs to another model",
        )
        fix = "use the config.json and the weights of one checkpoint"
        raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)


def no_weights(folder: Path, name: str = "model.safetensors") -> Finding:
    """Return what to say of a folder without this file, whose weights may be a pickle."""
    why, fix = "", "give a folder that holds the weights as safetensors"
    pickles = [path.name for pattern in ("*.bin", "*.pt*") for path in sorted(folder.glob(pattern))]
    if pickles:
        why = f"{pickles[0]} is a pickle, which can run code when it is loaded"
        fix = "save the model as safetensors with Transformers: model.save_pretrained(OUT)"
    return Finding(f"there is no {name}", str(folder), why, fix)


def _no_index(index: Path, why: str) -> MegatuneError:
    return MegatuneError(Finding(f"is not an index of weights: {why}", str(index)), ExitCode.INPUT)
