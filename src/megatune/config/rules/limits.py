"""Upper bounds of numbers that would hurt a machine, or mean nothing: each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatune.config.rules.problem import Context, Problem
from megatune.config.settings import setting_paths, setting_value


class Limit(NamedTuple):
    """The largest value, and what a larger one would do."""

    most: int
    why: str


_PROCESSES = Limit(1024, "each is a process; no more are started than the machine has cores and memory for")
_STEPS = Limit(10**9, "at ten steps a second a billion takes three years")
LIMITS: dict[str, Limit] = {
    "preprocessing_num_workers": _PROCESSES,
    "dataloader_num_workers": _PROCESSES,
    "max_steps": _STEPS,
    "warmup_steps": _STEPS,
    "save_steps": _STEPS,
    "eval_steps": _STEPS,
    "logging_steps": _STEPS,
    "num_train_epochs": Limit(10**6, "nobody sees a million epochs"),
    "per_device_train_batch_size": Limit(10**6, "a micro-batch is in memory as a whole"),
    "per_device_eval_batch_size": Limit(10**6, "a micro-batch is in memory as a whole"),
    "gradient_accumulation_steps": Limit(10**6, "a step is computed micro-batch by micro-batch before it learns"),
    "buffer_size": Limit(10**8, "a block of samples is on disk, and its order in memory, as a whole"),
    "video_maxlen": Limit(10**5, "every frame is decoded"),
    "ddp_timeout": Limit(10**9, "a billion seconds are 31 years, and clocks that count nanoseconds end at 292"),
}


def limits(context: Context) -> Iterator[Problem]:
    """A number is one that some machine could use."""
    for name, (most, why) in LIMITS.items():
        value = setting_value(context.settings, setting_paths()[name])
        if value is not None and value > most:
            said = f"{value:,}" if value < 10**12 else f"{value:.3g}"
            yield Problem((name,), f"{name} {said} is more than {most:,}", why, f"write {name}: {most}, or less")


RULES = (limits,)
