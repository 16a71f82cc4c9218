"""Where a stream of rows stands: written beside every block and into every checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megatune.data.readers import Position
from megatune.data.report import DatasetReport
from megatune.data.sources import SourcePosition


@dataclass(frozen=True, slots=True)
class SetState:
    """Where one data set stands.

    Attributes:
        position: behind the last sample taken; None at the data set's start.
        rows: of its files, before that place.
        usable: samples taken since the present pass over the data set began.
        passes: whole ones in this epoch.
        ended: the present pass has no sample left.
    """

    position: SourcePosition | None = None
    rows: int = 0
    usable: int = 0
    passes: int = 0
    ended: bool = False

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SetState:
        """What `asdict` made."""
        position = raw["position"]
        if position is not None:
            position = SourcePosition(**{**position, "position": Position(**position["position"])})
        return cls(**{**raw, "position": position})


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where the stream of all data sets stands, between two blocks.

    Attributes:
        block: number of the next one, from 0 over the whole run.
        first_row: the first of its rows, from 0 over the whole run.
        epoch: of the last sample taken.
        draws: data sets drawn in this epoch, by mix_strategy interleave_*.
        sets: in the order of `dataset`.
        epoch_first_row: where the epoch began.
        epoch_rows: rows of the epoch before it, None in the first.
        reports: of the rows read so far, by data set.
    """

    sets: tuple[SetState, ...]
    block: int = 0
    first_row: int = 0
    epoch: int = 0
    draws: int = 0
    epoch_first_row: int = 0
    epoch_rows: int | None = None
    reports: tuple[DatasetReport, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(replace(self, reports=())), "reports": [report_to_json(report) for report in self.reports]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamState:
        """What `to_json` made, also after its way through a file."""
        sets = tuple(SetState.from_json(entry) for entry in raw["sets"])
        return cls(**{**raw, "sets": sets, "reports": reports_from_json(raw["reports"])})


def report_to_json(report: DatasetReport) -> dict[str, Any]:
    """For a file; `asdict` cannot copy a Counter."""
    values = {entry.name: copy(getattr(report, entry.name)) for entry in fields(report)}
    return {**values, "dropped": dict(report.dropped)}


def reports_from_json(raw: Sequence[Mapping[str, Any]]) -> tuple[DatasetReport, ...]:
    """Reports of data sets that went through a file."""
    return tuple(DatasetReport(**{**entry, "dropped": Counter(entry["dropped"])}) for entry in raw)
