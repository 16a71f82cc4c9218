"""Read the contents of a checkpoint's files: NAME.safetensors.index.json, and the header of a safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError, with_article

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_MOST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors file: its dtype in the format's notation, its shape, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_weight_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, relative to the index's folder, and never outside of it.

    Raises:
        MegatuneError: the file is not a valid index, or names files elsewhere (exit code 66).
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


def read_whole_index(index: Path) -> dict[str, str]:
    """Return the same as `read_weight_index`, after checking that all of the files exist.

    Raises:
        MegatuneError: see `read_weight_index`; or files are missing (exit code 66).
    """
    file_of = read_weight_index(index)
    files = set(file_of.values())
    if missing := sorted(file for file in files if not (index.parent / file).is_file()):
        what = f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:3])}"
        raise MegatuneError(Finding(what, str(index), fix="download the checkpoint again"), ExitCode.INPUT)
    return file_of


def tensor_names(folder: Path, name: str = "model.safetensors") -> Collection[str]:
    """Return the names of a checkpoint's tensors, from its index or the header of its single file.

    Raises:
        MegatuneError: see `read_weight_index`.
    """
    if (index := folder / f"{name}.index.json").is_file():
        return read_weight_index(index).keys()
    with suppress(MegatuneError):  # reading the tensors reports what is wrong with it
        return read_header(folder / name).keys()
    return []


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a safetensors file, by name.

    The format (github.com/huggingface/safetensors): the header's length as a little-endian u64, the header as JSON,
    then the tensors' bytes without gaps.

    Raises:
        MegatuneError: INPUT, if the file is not a safetensors file, or is truncated.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - length
            if size < 0 or length > _MOST_HEADER:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        found = {
            name: HeaderEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        end = 0
        for name, entry in sorted(found.items(), key=lambda item: item[1][2:]):
            if not all(type(number) is int and number >= 0 for number in (*entry.shape, *entry[2:])):
                raise ValueError(f"{name} has a shape or an offset that is not a whole number of at least 0")
            bits = _BITS.get(entry.dtype)
            if entry.start != end or (bits and prod(entry.shape) * bits != 8 * (entry.stop - end)):
                raise ValueError(f"the size of {name} does not match its shape, or its offset leaves a gap")
            end = entry.stop
        if end != size:
            raise ValueError(f"its tensors have {end} bytes, and the file has {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged_file(path, error) from None
    return {
        name: entry._replace(start=entry.start + 8 + length, stop=entry.stop + 8 + length)
        for name, entry in found.items()
    }


def damaged_file(path: Path, error: object) -> MegatuneError:
    """Return the error for a file that cannot be read as safetensors."""
    what, why = f"cannot be read as safetensors: {error}", "the file is damaged or truncated"
    return MegatuneError(Finding(what, str(path), why, "copy it again"), ExitCode.INPUT)


def check_layers(folder: Path, config: Mapping[str, object]) -> None:
    """Check that config.json has no more layers than the weights (exit code 66)."""
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    numbers = {int(match[1]) for name in tensor_names(folder) if (match := _LAYER.search(name))}
    if isinstance(layers, int) and numbers and layers > max(numbers) + 1:
        what, why = (
            f"config.json has {layers} layers, but the weights have {max(numbers) + 1}",
            "one of them belongs to another model",
        )
        fix = "use the config.json and the weights of one checkpoint"
        raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)


def key_findings(
    missing: Collection[str], unknown: Collection[str], where: str, model_type: str, word: str = "keys"
) -> Iterator[Finding]:
    """Yield findings for tensors that are missing in files, and for unknown ones."""
    if missing:
        why = f"config.json describes {with_article(model_type)} that has them"
        fix = "use the config.json and the weights of one checkpoint"
        yield Finding(f"{len(missing)} {word} are missing: {list_names(missing)}", where, why, fix)
    if unknown:
        why = f"{with_article(model_type)} does not have them, and no tensor is skipped silently"
        fix = "check that config.json names the right model_type, or remove them"
        yield Finding(f"{len(unknown)} {word} are unknown: {list_names(unknown)}", where, why, fix)


def list_names(names: Collection[str], most: int = 5) -> str:
    """List the first names, and the number of the others."""
    listed = ", ".join(f"{name:.120}" for name in sorted(names)[:most])
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")


def no_weights(folder: Path, name: str = "model.safetensors") -> Finding:
    """Return the finding for a folder without this file, whose weights may be a pickle."""
    why, fix = "", "give a folder that holds the weights as safetensors"
    pickles = [path.name for pattern in ("*.bin", "*.pt*") for path in sorted(folder.glob(pattern))]
    if pickles:
        why = f"{pickles[0]} is a pickle, which can run code when it is loaded"
        fix = "save the model as safetensors with Transformers: model.save_pretrained(OUT)"
    return Finding(f"there is no {name}", str(folder), why, fix)


def _no_index(index: Path, why: str) -> MegatuneError:
    return MegatuneError(Finding(f"is not an index of weights: {why}", str(index)), ExitCode.INPUT)
