"""Inputs and results of rules, nearest valid values, and the rules of requirements and limits that settings declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from typing import Any

from megatune.architecture import Architecture
from megatune.config.entry import SettingEntry
from megatune.config.setting import EXPERTS, Limit, Needs, SettingInfo
from megatune.config.settings import Settings, all_settings, setting_paths, setting_value
from megatune.config.values import shown
from megatune.errors import with_article
from megatune.references import Text, assign, ref, remove, write


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a rule. Rules that need an architecture or a world size find nothing without it.

    Attributes:
        written: "group.name" of the settings that a user wrote -> how they were written, in their order.
    """

    settings: Settings
    architecture: Architecture | None
    world_size: int | None
    written: Mapping[str, SettingEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """Settings that are valid alone but not together.

    Attributes:
        names: of these settings, first the one to change.
        what, why, fix: as in `megatune.errors.Finding`; settings are references.
    """

    names: tuple[str, ...]
    what: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "why", "fix"):
            object.__setattr__(self, name, Text(getattr(self, name)))

    @property
    def paths(self) -> tuple[str, ...]:
        """ "group.name" of the settings."""
        return tuple(setting_paths()[name] for name in self.names)


Rule = Callable[[Context], Iterator[Problem]]


def nearest(value: int, candidates: Iterable[int]) -> int:
    """Return the candidate nearest to `value`, the smaller one of two equally near."""
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate))


def divisors(number: int) -> list[int]:
    """List all divisors of a positive number, ascending."""
    small = [each for each in range(1, isqrt(max(number, 0)) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each < number]


def multiples_around(value: int, base: int) -> tuple[int, ...]:
    """Return the nearest multiples of `base` below and above `value`, without 0."""
    below = value // base * base
    return (below, below + base) if below else (base,)


def needs_of(*groups: str) -> Rule:
    """Return the rule that checks the requirements of the settings of these groups."""

    def needs(context: Context) -> Iterator[Problem]:
        for info in _refused(groups):
            value = setting_value(context.settings, info.path)
            for need in info.needs:
                if not need.why or not _is_explicit(context, info, need, value):
                    continue
                if is_met(need, context.settings, context.architecture):
                    continue
                if not (need.is_lenient and {need.path, info.path} <= context.written.keys()):
                    yield _problem(context, info, need)
                if need.is_method:
                    break

    return needs


@cache
def _refused(groups: tuple[str, ...]) -> list[SettingInfo]:
    """List the settings with requirements whose violation is refused."""
    infos = all_settings().values()
    return [info for info in infos if info.group in groups and any(need.why for need in info.needs)]


def unused(
    settings: Settings, written: Mapping[str, SettingEntry], architecture: Architecture | None
) -> dict[str, list[str]]:
    """Return reason -> written keys that are accepted but have no effect; a run prints them.

    Keys of a method that is not selected are listed with any value, others only if they are not the default.
    """
    idle: dict[str, str] = {}  # path of a setting -> the reason
    for info in (each for each in all_settings().values() if each.path in written):
        value = setting_value(settings, info.path)
        for need in info.needs:
            of_method = bool(value) and need.is_method and need.is_lenient and need.path in written
            asks = of_method or (not need.why and value != info.default and value not in need.off)
            if asks and not is_met(need, settings, architecture):
                idle[info.path] = _without(settings, need)
                break
    # A key of another system may set several settings.
    active = {id(entry) for path, entry in written.items() if path not in idle}
    found: dict[str, list[str]] = {}
    for path, without in idle.items():
        if (entry := written[path]).is_given and id(entry) not in active and entry.key not in found.get(without, ()):
            found.setdefault(without, []).append(entry.key)
    return found


def _without(settings: Settings, need: Needs) -> str:
    """Return the reason why a setting has no effect: the value that it has instead of the required one."""
    name = need.path.partition(".")[2]
    if need.path == EXPERTS:
        return "in a dense model"
    value = setting_value(settings, need.path)
    return f"without {name}" if value is None else f"with {name}: {_said(value)}"


def is_met(need: Needs, settings: Settings, architecture: Architecture | None) -> bool:
    """Return whether a requirement is met; an unknown model meets all."""
    if need.path == EXPERTS:
        return architecture is None or architecture.moe is not None
    other = setting_value(settings, need.path)
    if need.least is not None:
        has = other is not None and other >= need.least
    elif need.values:
        has = any(each in need.values for each in other) if isinstance(other, list) else other in need.values
    else:
        has = bool(other)
    return has or (need.otherwise is not None and is_met(need.otherwise, settings, architecture))


def has_effect(settings: Settings, path: str) -> bool:
    """Return whether the requirements of a setting are met, whatever the model."""
    return all(is_met(need, settings, None) for need in all_settings()[path].needs)


def _is_explicit(context: Context, info: SettingInfo, need: Needs, value: Any) -> bool:
    """Return whether the value of a setting has the requirement."""
    if need.of:
        return any(each in need.of for each in (value if isinstance(value, list) else [value]))
    if value != info.default:
        return value not in need.off
    return need.is_method and bool(value) and info.path in context.written and need.path not in context.written


def _problem(context: Context, info: SettingInfo, need: Needs) -> Problem:
    asked = assign(info.name, _said(setting_value(context.settings, info.path)))
    if need.path == EXPERTS:
        assert context.architecture is not None
        why = f"{with_article(context.architecture.model_type)} has no experts"
        return Problem((info.name,), f"{asked} with a dense model", why, remove(info.name))
    name, value = need.path.partition(".")[2], setting_value(context.settings, need.path)
    has_value = bool(value) or need.path in context.written
    what = f"{asked} with {assign(name, _said(value))}" if has_value else f"{asked} without {ref(name)}"
    if need.otherwise is not None and not value and not setting_value(context.settings, need.otherwise.path):
        what += f" or {ref(need.otherwise.path.partition('.')[2])}"
    if need.fix:
        fix = need.fix.format(name=info.name)
    elif need.values and not need.values[0]:
        fix = remove(info.name, name)
    elif not need.values and need.least is None:
        fix = f"write {ref(name)}, or {remove(info.name)}"
    else:
        fix = f"{write(name, shown(need.values[0] if need.values else need.least))}, or {remove(info.name)}"
    return Problem((info.name, name), what, need.why, fix)


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)


def limits(context: Context) -> Iterator[Problem]:
    """Check that numbers are below the limits that their settings declare."""
    for path, (most, why) in _limits().items():
        value, name = setting_value(context.settings, path), path.partition(".")[2]
        if value is not None and value > most:
            said = f"{value:,}" if value < 10**12 else f"{value:.3g}"
            yield Problem((name,), f"{ref(name)} {said} is more than {most:,}", why, f"{write(name, most)}, or less")


@cache
def _limits() -> dict[str, Limit]:
    return {info.path: info.limit for info in all_settings().values() if info.limit is not None}
