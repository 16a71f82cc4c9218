"""Time of a step by part, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.estimate import Estimate
from megatune.plan.pages.units import amount, columns, duration, seconds_unit
from megatune.plan.pages.words import TIME_WORDS
from megatune.plan.time import StepTime
from megatune.plan.time.estimate import TIME_PARTS

_BAR = 30


def time_lines(estimate: Estimate, dataset_tokens: float | None = None, max_steps: int | None = None) -> Iterator[str]:
    """A row for each part, then tokens/s, the share of the devices' peak, and how long the data takes.

    Args:
        dataset_tokens: of the whole run; None where unknown.
        max_steps: of the run, where the settings say so; used where the tokens are not known.
    """
    time = estimate.time
    unit = seconds_unit(time.total)
    yield f"Time of a step, {unit.name}, of the slowest stage; exchanges as far as nothing hides them"
    rows = []
    for part in TIME_PARTS:
        if seconds := getattr(time, part):
            share = seconds / time.total
            rows.append([TIME_WORDS[part], unit.of(seconds), f"{share:.1%}", "█" * round(share * _BAR)])
    low, high = (unit.of(seconds) for seconds in likely(time.total, time))
    rows.append(["total", unit.of(time.total), "", f"likely {low} to {high}"])
    yield from ("  " + line for line in columns(rows, left=(0, 3)))
    yield from speed_lines(time)
    yield from days_lines(time, dataset_tokens, max_steps)


def likely(seconds: float, time: StepTime) -> tuple[float, float]:
    """Between what two of three published measurements of such cases lay: an uncertainty of 0.25 is a factor 1.25."""
    return seconds / (1 + time.uncertainty), seconds * (1 + time.uncertainty)


def speed_lines(time: StepTime) -> Iterator[str]:
    """Tokens/s and utilization."""
    yield (
        f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second_per_gpu:,.0f} a device; "
        f"{time.model_tflops:,.4g} TFLOP/s a device, MFU {time.mfu:.1%}"
    )


def days_lines(time: StepTime, dataset_tokens: float | None, max_steps: int | None) -> Iterator[str]:
    """How long the run takes, where its length is known."""
    if dataset_tokens is not None:
        seconds, what = dataset_tokens / time.tokens_per_second, f"{amount(dataset_tokens)} tokens"
    elif max_steps is not None and max_steps > 0:
        seconds, what = max_steps * time.total, f"{max_steps:,} steps"
    else:
        return
    low, high = map(duration, likely(seconds, time))
    yield f"{what} take {duration(seconds)} ({low} to {high})"
