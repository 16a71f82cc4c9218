"""The evaluation rows of streamed training: made once, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from megatune.data.pipeline import SetState
from megatune.data.report import DatasetReport, TokenReport
from megatune.data.streaming.blocks import MixedStream

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
        """Read what `write_held_out` wrote."""
        content = json.loads((folder / _META_FILE).read_text(encoding="utf-8"))
        return TypeAdapter(HeldOut).validate_python({**content, "folder": folder})

    def lines(self) -> list[str]:
        """Return the report in words."""
        lines = [f"evaluation: {self.tokens.line()}"]
        for report in self.reports:
            for reason, count in report.dropped.most_common():
                lines.append(f"{report.name}: dropped {count}: {reason}")
        return lines


def write_held_out(stream: MixedStream, count: int | None, folder: Path, progress: Callable[[int], None]) -> None:
    """Write the first samples of a stream, which training then leaves out; or all samples of eval_dataset.

    Args:
        stream: at its start.
        count: samples; None for all.
        folder: exists and is empty.
        progress: gets the number of samples so far.

    Raises:
        MegatuneError: val_size leaves nothing to train on (exit code 64); whatever reading raises.
    """
    samples = islice(iter(stream.next, None), count)
    tokens = stream.write_part(folder, PART, samples, progress, lambda size: np.arange(size, dtype=np.int64))
    if count is not None and tokens.samples < count:
        raise stream.nothing_left()
    reports = tuple(replace(one.report, trained=0, evaluation=one.report.trained) for one in stream.sets)
    reports = deepcopy(reports)  # before `_starts` reads on
    held_out = HeldOut(folder, tokens, reports, None if count is None else _starts(stream))
    (folder / _META_FILE).write_bytes(TypeAdapter(HeldOut).dump_json(held_out, exclude={"folder"}))


def _starts(stream: MixedStream) -> tuple[SetState, ...]:
    """Where training begins behind the samples taken so far."""
    repeated = [entry for entry in stream.sets if entry.state.passes]
    starts = tuple(SetState(entry.state.position, entry.state.rows) for entry in stream.sets)
    for entry in stream.sets:  # rows behind those held out are training's to report
        entry.on_bad_row = lambda sample, error: None
    used_up = [entry for entry in stream.sets if not entry.has_next()]
    # By mix_strategy concat a data set may be held out whole.
    if repeated or (used_up and stream.strategy != "concat") or len(used_up) == len(stream.sets):
        raise stream.nothing_left(repeated or used_up)
    return starts
