"""Plans in single sentences: sizes, times and changes of them."""

from __future__ import annotations

from megatune.plan.estimate import Estimate
from megatune.plan.memory import StageMemory
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.pages.units import bytes_unit
from megatune.plan.pages.words import MEMORY_WORDS

# Parts below this share of the whole are not worth a word in a sentence.
_LEAST_SHARE = 0.01


def size(num_bytes: float) -> str:
    """23.4 GiB, 512 MiB."""
    return bytes_unit(abs(num_bytes)).with_name(num_bytes)


def seconds(value: float) -> str:
    """A time with its unit, two digits: 85 ms, 1.9 s, 132 s."""
    if value < 0.0995:
        return f"{value * 1000:.2g} ms"
    return f"{value:#.2g} s" if value < 9.95 else f"{value:,.0f} s"


def percent(share: float) -> str:
    """A share, 0 to 1: 12 %."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.0095 else f"{share * 100:.1g} %"


def change(ratio: float, more: str, less: str, same: str) -> str:
    """A ratio in words: `26 % slower`; beyond the double `2.6 times slower`."""
    if 0.995 < ratio < 1.005:
        return same
    if ratio >= 2:
        return f"{ratio:.1f} times {more}"
    return f"{percent(abs(ratio - 1))} {more if ratio > 1 else less}"


def fullest(planned: Estimate) -> str:
    """The fullest stage against the device: `23.4 of 79.2 GiB`, with its number where there are several."""
    stage, memory = planned.fullest, planned.case.machine.device.memory
    unit = bytes_unit(stage.total)
    which = f" {stage.stage} of {len(planned.stages)}" if len(planned.stages) > 1 else ""
    return f"{'fullest stage' if which else 'memory'}{which}: {unit.of(stage.total)} of {unit.of(memory)} {unit.name}"


def parts(stage: StageMemory) -> str:
    """What a stage holds, without what is hardly anything: `weights 3.8, gradients 7.6, …`, in the total's unit."""
    unit = bytes_unit(stage.total)
    sizes = {part: getattr(stage, part) for part in MEMORY_PARTS}
    return ", ".join(
        f"{MEMORY_WORDS[part]} {unit.of(held)}" for part, held in sizes.items() if held >= _LEAST_SHARE * stage.total
    )


def largest_part(stage: StageMemory) -> tuple[str, int]:
    """The part that takes most, in words, and its bytes."""
    part = max(MEMORY_PARTS, key=lambda part: getattr(stage, part))
    return MEMORY_WORDS[part], getattr(stage, part)
