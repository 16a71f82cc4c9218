"""Makes groups of settings of what was written, and notes everything in it that is wrong or changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.config.entry import SettingEntry
from megatune.config.setting import G, SettingInfo, fitted
from megatune.config.values import coerce, nearest_valid, quoted, shown
from megatune.errors import Finding

if TYPE_CHECKING:
    from megatune.config.dialects.table import Row


class Written(NamedTuple):
    """What was written for one field of a group, and what is expected: None of a value that was built, and fits."""

    entry: SettingEntry
    value: Any
    info: SettingInfo | None
    name: str  # in `Builder.refused`
    expected: str = ""  # where `info` does not say it


@dataclass(slots=True)
class Builder:
    """Keeps what was found while groups are made.

    Attributes:
        ignored: reason -> keys that change nothing.
        refused: names of what has no valid value, so that nothing should follow from its default.
    """

    findings: list[Finding] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def add(self, finding: Finding, refused: str = "") -> None:
        """Note a finding once: a key may set several settings."""
        self.refused.add(refused)
        if finding not in self.findings:
            self.findings.append(finding)

    def passes(self, entry: SettingEntry, row: Row | None, value: Any, name: str) -> bool:
        """Tell whether an entry may set something; note one that is refused, or that changes nothing.

        Args:
            value: converted as far as there is one right way.
        """
        if row is None:
            return True
        if row.is_refused(value):
            off = f", or write {entry.written(shown(row.passes[0]))}" if row.passes else ""
            said = shown(entry.value.data) if entry.value.text is None else entry.value.text
            said = "***" if entry.key.endswith(("_token", "_secret", "_key")) else said
            what, fix = f"{entry.key}: {said} is not supported", row.fix or f"remove {entry.written()}{off}"
            self.add(Finding(what, entry.where, row.unsupported, fix), name)
            return False
        if row.ignored and not row.passes_as(value):
            self.ignored.setdefault(row.ignored, []).append(entry.key)
        return not row.ignored

    def group(self, model: type[G], written: Mapping[str, Written]) -> G:
        """Build a group of the values that fit."""
        built, wrong = fitted(model, {name: each.value for name, each in written.items()})
        for name, items in wrong.items():
            self.wrong(written[name], items)
        return built

    def wrong(self, written: Written, items: Sequence[Any] = ()) -> None:
        """Note a value that does not fit, of a list `items` that do not, and say which one would do."""
        entry, info = written.entry, written.info
        assert info is not None
        value, expected = coerce(entry.value, info), info.expected
        nearest = nearest_valid(value, info)
        if items and info.choices:
            near = [nearest_valid(item, info) if item in items else item for item in value]
            nearest = None if None in near else near
        if nearest is not None:
            fix = f"write {entry.written(shown(nearest))}" + (", or null" if info.optional else "")
        elif info.default in (None, [], {}):
            fix = f"remove {entry.written()}, or give it {expected.removesuffix(', or null')}"
        else:
            fix = f"write {entry.written(shown(info.default))}, the default"
        why = f"expected {written.expected or expected}"
        if items and len(value) > 1:
            why += f"; {', '.join(map(quoted, items))} {'does' if len(items) == 1 else 'do'} not fit"
        self.add(Finding(f"{entry.key} is {quoted(entry.value.data)}", entry.where, why, fix), written.name)
