"""Plans a run again once its rows are there, before its weights are loaded: they decide whether it may start."""

from __future__ import annotations

import numpy as np

from megatune.config.load import Loaded
from megatune.data.pictures import PictureCounts
from megatune.data.rows import TokenRows
from megatune.plan.case import Case
from megatune.plan.rows import RowLengths
from megatune.plan.run.preflight import Preflight, with_rows

_MOST = 100_000  # lengths that are summed up; of more, as many at equal distances


def lengths_of(rows: TokenRows, pictures: PictureCounts) -> RowLengths:
    """Sum up the lengths of rows, as the planner wants them: of answers where a row is a pair of them."""
    spans = rows.spans
    documents = np.sort(spans[:, 1] - spans[:, 0])
    per_row = 2 if rows.is_pairs else 1
    lengths = np.sort(-(-rows.row_lengths() // per_row)) if rows.is_packed else documents
    if len(lengths) > _MOST:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MOST).astype(np.int64)]
    weighted = float(np.square(documents, dtype=np.float64).sum() / max(1, documents.sum()))
    return RowLengths.of(
        lengths.tolist(), "of all rows", document=weighted, pictures=pictures.tokens / len(rows) if len(rows) else 0.0
    )


def plan_rows(case: Case, lengths: RowLengths, pictures: PictureCounts, asked: Loaded | None) -> Preflight:
    """Plan a run for these rows.

    Args:
        asked: what the user wrote, in whose words advice is given.

    Raises:
        MegatuneError: SETTINGS, where it cannot fit.
    """
    seen = (pictures.of_row, pictures.largest) if case.model.architecture.vision is not None else None
    return with_rows(case, lengths, seen, loaded=asked)
