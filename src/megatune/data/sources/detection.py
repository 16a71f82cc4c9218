"""Resolve data sets, detect the format of those without an entry, and check that a stage supports the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import yaml

from megatune.config.groups.run import PAIR_STAGES
from megatune.data.formats import RowFormat, TextFormat, detect
from megatune.data.formats.columns import RESPONSE_NAMES, USUAL_NAMES, columns_by_own_name, own_names
from megatune.data.formats.swift import SwiftFormat
from megatune.data.readers import Position, RawRow, read_rows
from megatune.data.sources.registry import DATASET_INFO, DatasetReference
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean

# Readable rows that are used to detect the format of a data set without an entry.
ROWS_FOR_DETECTION = 100
_CHAT_PARTS: tuple[str, ...] = ("query", "response")
_PARTS = dict.fromkeys(PAIR_STAGES, ("query", "chosen", "rejected")) | dict.fromkeys(("pt", "cls"), ("text",))
_NO_TEXTS = frozenset(("id", "uuid", "source", "category", "lang", "language", "type", "label"))


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A position between two rows of a data set: the index of the file, and the position in that file."""

    file: int
    position: Position


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A resolved data set: the files, and the format of their rows.

    Attributes:
        files: read in this order; all of one type. Files from a hub are in the cache of its library.
        num_samples: rows to draw, None for all; if there are fewer rows, rows are repeated.
        fetched: the data set is from a hub, so its rows must not read other files of this machine.
    """

    name: str
    files: tuple[Path, ...]
    format: RowFormat
    num_samples: int | None = None
    fetched: bool = False

    def rows(self) -> Iterator[RawRow]:
        """Read every row of every file, in order."""
        for row, _ in self.rows_from():
            yield row

    def rows_from(self, position: SourcePosition | None = None) -> Iterator[tuple[RawRow, SourcePosition]]:
        """Read the rows after a position (None: all rows), each with the position after it."""
        first = position.file if position else 0
        for index in range(first, len(self.files)):
            after = position.position if position and index == first else None
            for row in read_rows(self.files[index], after):
                yield row, SourcePosition(index, row.next)


@dataclass(slots=True)
class FormatDetector:
    """Detects the format of data sets without an entry.

    Attributes:
        columns: own name -> standard name, or LLaMA-Factory's part of a row -> own name (see `columns_by_own_name`).
        swift_version: the version of ms-swift, if its rules read all rows.
        seen: the field names in the inspected rows of all data sets.
    """

    stage: str
    columns: Mapping[str, str]
    swift_version: int = 0
    seen: set[str] = field(default_factory=set)

    def source(
        self, text: str, reference: DatasetReference, files: tuple[Path, ...], *, fetched: bool = False
    ) -> DatasetSource:
        """Resolve a data set; its format is that of the first readable row with known fields."""
        readable = (row.fields for file in files for row in read_rows(file) if row.error is None)
        rows = list(islice(readable, ROWS_FOR_DETECTION))
        names = list(dict.fromkeys(name for row in rows for name in row))
        self.seen.update(names)
        # Without rows the format is irrelevant: the check of the rows reports the problem.
        form = self._format(text, rows, names) if rows else TextFormat()
        return DatasetSource(text, files, form, reference.num_samples, fetched)

    def _format(self, text: str, rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> RowFormat:
        if self.swift_version:
            return SwiftFormat(
                swift_version=self.swift_version, renames=tuple(self.columns.items()), fields=tuple(names)
            )
        if (columns := columns_by_own_name(self.columns, names)) is None:
            what = f"columns: {to_yaml(self.columns)} is ambiguous: rows have all of these fields"
            fix = f"describe the data set in {DATASET_INFO}, whose columns map a part of a row to the field"
            raise MegatuneError(Finding(what, f"dataset: {text}", fix=fix), ExitCode.SETTINGS)
        own = own_names(columns, names)
        capital = {name: name.lower() for name in names if name != name.lower() and name.lower() in USUAL_NAMES}
        for known in (own, own_names(capital, names) | own):
            if form := next((form for row in rows if (form := detect(row, known))), None):
                return self._for_stage(form, text)
        what = f"{text}: no known format has the fields {', '.join(rows[0]) or 'of a row without fields'}"
        fix = f"write columns: {to_yaml(suggest_columns(rows[0], self.stage))}, or describe it in {DATASET_INFO}"
        raise MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.DATA)

    def _for_stage(self, form: RowFormat, text: str) -> RowFormat:
        fix = f"name the two answers chosen and rejected, or describe them in {DATASET_INFO}"
        if self.stage == "kto":
            fix = f"rename the field that marks good answers to label, or describe it in {DATASET_INFO}"
        else:  # in other stages a label is not a kto_tag
            form = replace(form, columns=replace(form.columns, kto_tag=None))
        check_stage(form, self.stage, f"dataset: {text}", fix)
        return form

    def unknown_columns(self) -> list[Finding]:
        """Return findings for columns that no data set has, and for names that no form knows."""
        there, listed = {name.lower() for name in self.seen}, ", ".join(sorted(self.seen))
        usual = ", ".join(sorted(USUAL_NAMES))
        fix = f"move them to the entries of {DATASET_INFO}, which every data set here has"
        fix = f"one of {listed}" if listed else fix
        columns = columns_by_own_name(self.columns, self.seen) or {}
        missing = [name for name in columns if name.lower() not in there]
        unknown = [name for name in columns.values() if name not in USUAL_NAMES]
        findings = [Finding(f"columns: no data set has a field {name!r}", fix=fix) for name in missing]
        for name in unknown:
            fix = did_you_mean(name, USUAL_NAMES, f"one of {usual}", count=3)
            findings.append(Finding(f"columns: {name!r} is not a known part of a row", fix=fix))
        return findings


def suggest_columns(row: Mapping[str, object], stage: str) -> dict[str, str]:
    """Guess the `columns` setting for the fields of a row: messages, or its texts in their order."""
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return {name: "messages"}
    texts = [name for name, value in row.items() if isinstance(value, str) and name.lower() not in _NO_TEXTS]
    parts = _PARTS.get(stage, _CHAT_PARTS)
    answer = next((name for name in texts if name.lower() in RESPONSE_NAMES), None) if parts is _CHAT_PARTS else None
    if answer is not None:  # after the question, which is the first text
        texts = [*[name for name in texts if name != answer][:1], answer]
        parts = parts if len(texts) > 1 else ("response",)
    return dict(zip(texts or row or ("FIELD",), parts, strict=False))


def to_yaml(columns: Mapping[str, str]) -> str:
    """Return {Kunden Frage: query}, quoted where YAML requires it."""
    text = yaml.safe_dump(dict(columns), default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)
    return text.strip()


def check_stage(form: RowFormat, stage: str, where: str, fix: str) -> None:
    if form.ranking and stage not in PAIR_STAGES:
        what = f"its rows are preference pairs, which stage {stage} does not train"
        raise MegatuneError(Finding(what, where, fix="write stage: dpo, or rm"), ExitCode.SETTINGS)
    if not form.ranking and stage in PAIR_STAGES:
        what = f"its rows are not preference pairs, which stage {stage} requires"
        raise MegatuneError(Finding(what, where, fix=f"{fix}; otherwise write stage: sft"), ExitCode.SETTINGS)
    if form.columns.kto_tag is not None and stage == "sft":
        what = "its rows are desirable and undesirable answers, and stage sft would train on all of them"
        raise MegatuneError(Finding(what, where, fix="write stage: kto, or remove kto_tag"), ExitCode.SETTINGS)
    if form.columns.kto_tag is None and stage == "kto":
        what = "its rows do not state whether an answer is desirable, which stage kto needs"
        raise MegatuneError(Finding(what, where, fix=fix), ExitCode.SETTINGS)
