"""How a data set is named: `[hf::|ms::]NAME_OR_PATH_OR_ID[:SUBSET/SUBSET|:all][#N]`, the syntax of SWIFT."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatune.data.readers import data_suffix
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.repository import Hub

_PREFIX = re.compile(r"(hf|ms)::(.*)", re.IGNORECASE | re.DOTALL)
# A number after "#" is never written with these; a path that has a "#" in it often continues so.
_PATH_CHARACTERS = re.compile(r"[/.\\]")


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """One item of `dataset`, parsed.

    Attributes:
        name: a name of dataset_info.json, a path or a hub's id.
        hub: where its prefix says so.
        subsets: () where none is named; ("all",) is every subset there is.
        num_samples: rows to draw.
    """

    name: str
    hub: Hub | None = None
    subsets: tuple[str, ...] = ()
    num_samples: int | None = None


def parse_reference(text: str, known: Callable[[str], bool]) -> DatasetReference:
    """Parse an item of `dataset`.

    Args:
        known: tells whether a text as a whole is a name of dataset_info.json or a path of something that exists. These
            win over the syntax, since "#" and ":" may be part of a file's name.

    Raises:
        MegatuneError: a number of rows that is none, or an empty name or subset (exit code 64).
    """
    hub: Hub | None = None
    name = text
    if prefixed := _PREFIX.fullmatch(text):
        hub, name = ("hf" if prefixed[1].lower() == "hf" else "ms"), prefixed[2]
    if hub is None and known(name):
        return DatasetReference(name)
    body, mark, number = name.rpartition("#")
    num_samples = None
    if mark and not _PATH_CHARACTERS.search(number):
        name, num_samples = body, _number(number, text)
        if hub is None and known(name):
            return DatasetReference(name, num_samples=num_samples)
    subsets: tuple[str, ...] = ()
    if ":" in name and (hub or data_suffix(Path(name)) is None):
        name, subset = _cut_subset(name, known)
        subsets = tuple(subset.split("/"))
        if not all(subsets):
            raise _refused(text, "a subset's name is empty")
    if not name:
        raise _refused(text, "the name is empty")
    return DatasetReference(name, hub, subsets, num_samples)


def _cut_subset(name: str, known: Callable[[str], bool]) -> tuple[str, str]:
    """Split at the first colon, which a hub's id cannot have; at the last where a folder has colons in its name."""
    folder, _, last = name.rpartition(":")
    if known(folder):
        return folder, last
    head, _, subset = name.partition(":")
    return head, subset


def _number(number: str, text: str) -> int:
    if re.fullmatch(r"[0-9]+", number) and int(number) > 0:
        return int(number)
    raise _refused(text, f"expected a whole number above 0 after #, got {number!r}")


def _refused(text: str, what: str) -> MegatuneError:
    fix = "write NAME#500 for 500 rows, and OWNER/NAME:SUBSET for one subset"
    return MegatuneError(Finding(f"{text!r}: {what}", "dataset", fix=fix), ExitCode.SETTINGS)
