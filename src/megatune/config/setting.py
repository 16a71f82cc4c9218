"""How one setting is declared: once, with its type, unit, default, range and the texts that `explain` prints."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Group(BaseModel):
    """Settings of one concern. Frozen and strict: values arrive with the right type, or not at all."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def setting(
    default: Any,
    *,
    advice: str,
    how: str,
    when: str,
    values: Mapping[str, str] | None = None,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a setting of a `Group`; its type, and its choices as a Literal, are the annotation.

    Args:
        default: the value when the user says nothing.
        advice: one to three plain sentences: what it is.
        how: one to three more: how it works.
        when: one to three more: when to change it, and to what. What it costs is planned, not written.
        values: what each choice of a Literal does, without a full stop.
        unit: what a number counts ("tokens", "seconds", "steps"), "" where it has no unit.
        ge, gt, le, lt: the range of a number.
    """
    texts: Any = {"unit": unit, "how": how, "when": when, "values": dict(values or {})}
    return Field(default, description=advice, json_schema_extra=texts, ge=ge, gt=gt, le=le, lt=lt)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """All that is known of one setting, for `explain`, error messages and tests.

    Attributes:
        path: "group.name", its one name inside the project.
        kinds: the types it takes, of bool, int, float, str, list, dict; `optional` says whether None is one too.
        items: the type of a list's items: str, int or float.
        choices: the values of a Literal, () for an open type.
        bounds: the range of a number, by "ge", "gt", "le" and "lt".
        expected: type and range in words: "a whole number, at least 1".
        advice, how, when: what it is, how it works, when to change it.
        values: what each choice does, by the choice as YAML writes it.
    """

    path: str
    kinds: frozenset[type]
    items: type
    optional: bool
    choices: tuple[Any, ...]
    bounds: Mapping[str, float]
    default: Any
    unit: str
    expected: str
    advice: str
    how: str
    when: str
    values: Mapping[str, str]

    @property
    def group(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def digest(self) -> str:
        """Of all texts, 8 hex digits: a translation names it, and shows so that it is of these very texts."""
        texts = (self.advice, self.how, self.when, *(part for value in self.values.items() for part in value))
        return hashlib.blake2b("\0".join(texts).encode(), digest_size=4).hexdigest()


def describe(group: str, model: type[Group]) -> Iterator[SettingInfo]:
    """Every setting of one group, in the order of declaration."""
    for name, field in model.model_fields.items():
        kinds, items, choices, optional = _kinds(field.annotation)
        bounds = _bounds(field)
        extra: Any = field.json_schema_extra
        yield SettingInfo(
            path=f"{group}.{name}",
            kinds=kinds,
            items=items,
            optional=optional,
            choices=choices,
            bounds=bounds,
            default=field.get_default(call_default_factory=False),
            unit=extra["unit"],
            expected=_expected(kinds, items, choices, bounds, optional),
            advice=field.description or "",
            how=extra["how"],
            when=extra["when"],
            values=extra["values"],
        )


def _kinds(annotation: Any) -> tuple[frozenset[type], type, tuple[Any, ...], bool]:
    """Split an annotation into its types, that of a list's items, its Literal values, and whether None is allowed."""
    kinds: set[type] = set()
    items: type = str
    choices: list[Any] = []
    optional = False
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for member in members:
        if member is type(None):
            optional = True
            continue
        origin = get_origin(member) or member
        if origin is Literal:
            choices.extend(get_args(member))
            kinds.update(type(value) for value in get_args(member))
        elif origin is list and get_origin(get_args(member)[0]) is Literal:
            choices.extend(get_args(get_args(member)[0]))
            kinds.add(list)
        else:
            kinds.add(origin)
            if origin is list:
                (items,) = get_args(member)
    return frozenset(kinds), items, tuple(choices), optional


_WORDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "text"),
    (list, "a list, or values separated by commas"),
    (dict, "a mapping of names to values"),
)


_RANGE = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(field: FieldInfo) -> dict[str, float]:
    return {name: getattr(limit, name) for limit in field.metadata for name in _RANGE if hasattr(limit, name)}


def _expected(
    kinds: frozenset[type], items: type, choices: tuple[Any, ...], bounds: Mapping[str, float], optional: bool
) -> str:
    if choices:
        listed = ", ".join("true" if value is True else "false" if value is False else str(value) for value in choices)
        words = f"a list of any of: {listed}" if list in kinds else f"one of: {listed}"
    elif list in kinds and items is not str:
        whole = "whole " if items is int else ""
        words = f"a list of {whole}numbers, or numbers separated by commas"
    else:
        words = " or ".join(word for kind, word in _WORDS if kind in kinds)
    words += "".join(f", {_RANGE[name]} {limit}" for name, limit in bounds.items())
    return f"{words}, or null" if optional else words
