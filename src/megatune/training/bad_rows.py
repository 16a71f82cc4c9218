"""Rows that are left out: those that could not be read, and samples with pictures that a rank could not decode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatune.data.bad_rows import BAD_ROWS_FILE, MOST_NAMED
from megatune.data.batches import Batch, Unreadable
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.callbacks.base import Callback
from megatune.training.storage.files import writing


def without_unreadable(
    batches: Sequence[Batch], place: RankCoordinates, *, refuse: bool
) -> tuple[list[Batch], list[Unreadable]]:
    """Return micro-batches without the labels of samples that have an unreadable picture, and these pictures.

    Each picture is decoded by one of the ranks that have its micro-batch, so the others have to learn of it. A
    sample's file is named once: both answers of a pair have the pictures of its prompt.
    Collective: a sum over all ranks, and more only where a picture is unreadable.

    Args:
        batches: this data-parallel rank's micro-batches of a step.
        refuse: end the run instead.

    Raises:
        MegatuneError: DATA, on every rank, naming the files.
    """
    if not groups.total(sum(len(batch.unreadable) for batch in batches)):
        return list(batches), []
    mine = [
        (place.dp_rank, number, each._replace(document=each.document - each.document % batch.documents_per_sample))
        for number, batch in enumerate(batches)
        for each in batch.unreadable
    ]
    found = list(dict.fromkeys(each for of_rank in groups.gather(mine) for each in of_rank))
    if refuse:
        findings = [Finding(each.reason, each.where, each.detail) for _, _, each in found[:MOST_NAMED]]
        fix = "repair the files, or write on_bad_row: skip, which leaves their rows out of the loss"
        findings.append(Finding(f"{len(found)} images or videos of a step cannot be decoded", fix=fix))
        raise MegatuneError(findings, ExitCode.DATA)
    documents = [
        [each.document for dp_rank, batch, each in found if (dp_rank, batch) == (place.dp_rank, number)]
        for number in range(len(batches))
    ]
    kept = [batch.without(lost) if lost else batch for batch, lost in zip(batches, documents, strict=True)]
    return kept, [each for _, _, each in found]


class Quarantine(Callback):
    """bad_rows.jsonl of a run, with each row and picture once, however often it is read.

    Args:
        keep: what an earlier process of the run wrote.
    """

    def __init__(self, output_dir: Path, *, keep: bool) -> None:
        self.path = output_dir / BAD_ROWS_FILE
        self._kept: set[tuple[str, str]] = set()
        with writing(output_dir):
            if not keep:
                self.path.unlink(missing_ok=True)
            elif self.path.exists():
                whole, _, _ = self.path.read_bytes().rpartition(b"\n")
                self._kept = {_identity(line) for line in whole.splitlines()}
                self.path.write_bytes(whole + b"\n" if whole else b"")

    def copy(self, folder: Path) -> bool:
        """Copy what is new of the bad rows of a folder of token rows; return whether there are any."""
        bad_rows = folder / BAD_ROWS_FILE
        if not bad_rows.exists():
            return False
        with open(bad_rows, "rb") as rows:
            self._add(rows)
        return True

    def on_unreadable(self, pictures: Sequence[Unreadable]) -> None:
        entries = ({name: getattr(each, name) for name in ("where", "code", "reason", "detail")} for each in pictures)
        lines = (f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries)
        self._add(line.encode("utf-8", "backslashreplace") for line in lines)

    def _add(self, lines: Iterable[bytes]) -> None:
        with writing(self.path.parent), open(self.path, "ab") as file:
            for line in lines:
                identity = _identity(line)
                if identity not in self._kept:
                    self._kept.add(identity)
                    file.write(line)


def _identity(line: bytes) -> tuple[str, str]:
    row = json.loads(line)
    return row["where"], row["code"]
