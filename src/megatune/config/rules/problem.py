"""What a rule returns, and the arithmetic of nearest valid values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt

from megatune.architecture import Architecture
from megatune.config.entry import SettingEntry
from megatune.config.settings import Settings, setting_paths


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may look at. Without an architecture or a world, the rules that need one find nothing.

    Attributes:
        written: "group.name" of what a user gave a value -> how it was written, in the order of writing.
    """

    settings: Settings
    architecture: Architecture | None
    world_size: int | None
    written: Mapping[str, SettingEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """Settings that are valid alone and wrong together.

    Attributes:
        names: of the settings in it, the one to change first.
        what, why, fix: as in `megatune.errors.Finding`; settings are named as `megatune.config.names` says.
    """

    names: tuple[str, ...]
    what: str
    why: str = ""
    fix: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """ "group.name" of the settings."""
        return tuple(setting_paths()[name] for name in self.names)


Rule = Callable[[Context], Iterator[Problem]]


def nearest(value: int, candidates: Iterable[int]) -> int:
    """Return the candidate nearest to `value`, the smaller of two equally near."""
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate))


def divisors(number: int) -> list[int]:
    """List all divisors of a positive number, ascending."""
    small = [each for each in range(1, isqrt(max(number, 0)) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each < number]


def multiples_around(value: int, base: int) -> tuple[int, ...]:
    """Return the multiples of `base` next below and next above `value`, leaving out 0."""
    below = value // base * base
    return (below, below + base) if below else (base,)


def either(values: Iterable[int]) -> str:
    """Write `4 or 8`."""
    return " or ".join(map(str, values))
