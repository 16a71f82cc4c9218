"""How a run came out beside its plan, in a line or two."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.pages.wording import seconds, size
from megatune.plan.run.record import RunRecord, comparable


def verdict(record: RunRecord) -> Iterator[str]:
    """`planned 1.9 s a step, was 2.1 s; planned 23.4 GiB, was 22.9 GiB`, for the rows as they were."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None:
        return
    longest, mean = trained
    said = []
    if measured.step_seconds is not None:
        said.append(f"planned {seconds(mean.time.total)} a step, was {seconds(measured.step_seconds)}")
    if (memory := memory_of(record)) is not None:
        planned, was = memory
        said.append(f"planned {size(planned)}, was {size(was)}")
    rows = ""
    if longest.case.sequence_length != record.case.sequence_length:
        rows = f" (rows of {measured.row_tokens:,.0f} tokens, {measured.longest_row:,} the longest;"
        rows += f" {record.case.sequence_length:,} were allowed)"
    if said:
        yield f"plan       {'; '.join(said)}{rows}"


def memory_of(record: RunRecord) -> tuple[int, int] | None:
    """Planned and measured bytes of the fullest rank, as far as the measurement counts them."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None or not measured.stages:
        return None
    planned = max(comparable(stage, measured.counted) for stage in trained[0].stages)
    return planned, max(stage.peak for stage in measured.stages)
