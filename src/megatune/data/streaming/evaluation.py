"""The evaluation rows of streamed training: made once, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.bad_rows import BadRows
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.report import DatasetReport, TokenReport
from megatune.data.streaming.blocks import MixedStream, nothing_left
from megatune.data.streaming.sets import StreamedSet
from megatune.data.streaming.state import SetState, report_to_json, reports_from_json

PART = "evaluation"
_META_FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is evaluated on.

    Attributes:
        folder: holds the part PART.
        tokens: of its rows.
        reports: of the data sets they come from; those trained on where val_size takes them from there.
        starts: where training on each data set begins; None where that is their starts.
    """

    folder: Path
    tokens: TokenReport
    reports: tuple[DatasetReport, ...]
    starts: tuple[SetState, ...] | None

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        """Read what `hold_out` or `take_all` wrote."""
        raw = json.loads((folder / _META_FILE).read_text(encoding="utf-8"))
        starts = raw["starts"]
        return cls(
            folder,
            TokenReport(**raw["tokens"]),
            reports_from_json(raw["reports"]),
            None if starts is None else tuple(map(SetState.from_json, starts)),
        )

    def lines(self) -> list[str]:
        """The report in words."""
        lines = [f"evaluation: {self.tokens.line()}"]
        for report in self.reports:
            for reason, count in report.dropped.most_common():
                lines.append(f"{report.name}: dropped {count}: {reason}")
        return lines


def hold_out(stream: MixedStream, count: int, *, concatenated: bool, **writing: Any) -> None:
    """Write the first samples of a stream, which training then leaves out.

    Args:
        stream: at its start.
        count: samples.
        concatenated: by mix_strategy; then a data set may be held out whole.
        writing: see `_write`.

    Raises:
        MegatuneError: val_size leaves nothing to train on (exit code 64); whatever reading raises.
    """
    _write(stream, count, **writing, starts=lambda: _starts(stream.sets, concatenated=concatenated))


def take_all(stream: MixedStream, **writing: Any) -> None:
    """Write all samples of eval_dataset.

    Args:
        stream: at its start.
        writing: see `_write`.
    """
    _write(stream, None, **writing, starts=lambda: None)


def _write(
    stream: MixedStream,
    count: int | None,
    *,
    folder: Path,
    shape: RowShape,
    bad_rows: BadRows,
    progress: Callable[[int], None],
    starts: Callable[[], list[SetState] | None],
) -> None:
    """Write samples of a stream as evaluation rows.

    Args:
        count: of samples, None for an epoch.
        folder: exists and is empty.
        progress: is told how many samples there are so far.
        starts: where training begins behind them.
    """
    with RowsBuilder(folder, shape) as builder, bad_rows:
        for entry in stream.sets:
            entry.on_bad_row = bad_rows.add
        while count is None or len(builder) < count:
            taken = stream.next()
            if taken is None and count is None:
                break
            if taken is None:
                raise nothing_left(", ".join(entry.report.name for entry in stream.sets))
            builder.add(taken.documents)
            progress(len(builder))
        tokens = builder.write_part(PART, np.arange(len(builder), dtype=np.int64))
    counted = [deepcopy(entry.report) for entry in stream.sets]
    reports = [replace(report, trained=0, evaluation=report.trained) for report in counted]
    bad_rows.check(sum(report.read for report in reports))
    begins = starts()
    content = {
        "tokens": asdict(tokens),
        "reports": [report_to_json(report) for report in reports],
        "starts": None if begins is None else [asdict(begin) for begin in begins],
    }
    (folder / _META_FILE).write_text(json.dumps(content), encoding="utf-8")


def _starts(sets: Sequence[StreamedSet], *, concatenated: bool) -> list[SetState]:
    repeated = [entry for entry in sets if entry.state.passes]
    starts = [SetState(entry.state.position, entry.state.rows) for entry in sets]
    for entry in sets:  # rows behind those held out are training's to report
        entry.on_bad_row = lambda sample, error: None
    used_up = [entry for entry in sets if not entry.has_next()]
    if repeated or (used_up and not concatenated) or len(used_up) == len(sets):
        raise nothing_left(", ".join(entry.report.name for entry in repeated or used_up))
    return starts
