"""Declaration of settings: type, unit, default, range, requirements, and the texts that `explain` prints."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

_ENGLISH = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list, or values separated by commas",
    "dict": "a mapping of names to values",
    "one of": "one of: {}",
    "any of": "a list of any of: {}",
    "numbers": "a list of numbers, or numbers separated by commas",
    "texts": "text, or a list of texts",
    "whole numbers": "a list of whole numbers, or numbers separated by commas",
    "or": " or ",
    "and": ", ",
    "comma": ", ",
    "null": "or null",
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
}
_KINDS = (bool, int, float, str, list, dict)
_RANGE = ("ge", "gt", "le", "lt")
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# `Needs.path` of a setting that needs a mixture-of-experts model, in place of the path of another setting.
EXPERTS = "a model with experts"


class Mark(Enum):
    """Properties of a setting that the program acts on."""

    SECRET = "it is never written; loaded settings do not contain it (`config.load.Loaded.secrets`)"
    NAME = "it may be the name of a file or folder"
    ROWS = "its value determines the token rows"
    CONTENT = "the files that it names, or what it decides, determine the token rows"
    MEDIA = "it determines the rows of a vision-language model"
    MACHINE = "the machines of one run may have different values"
    START = "it sets where a run starts, not how it trains"


class Limit(NamedTuple):
    """The largest useful value, and why a larger one is not."""

    most: int
    why: str


STEPS = Limit(10**9, "at ten steps a second a billion takes three years")
OR_SHARE = "steps, or a share below 1"
Interval = Annotated[int | float, Field(gt=0), OR_SHARE, STEPS]


@dataclass(frozen=True, slots=True)
class Needs:
    """A requirement of a setting: the value of another setting without which it has no effect.

    Attributes:
        path: "group.name" of the other setting, or `EXPERTS`.
        values: the accepted values, for a list any item; () is every value that is set.
        why: the reason to refuse the setting without it; if "", a run and `explain FILE` only report that it has no
            effect.
        fix: how to fix it, with {name} for the setting; if "", to write the first of `values`, or to remove the
            setting.
        least: the smallest accepted number.
        of: the values of the setting that have the requirement, for a list any item; () is all but the default and
            `off`.
        off: values without the requirement, in addition to the default.
        is_method: the other setting chooses the method that this one belongs to. If it is not met, further requirements
            are not checked, and even the setting's default is refused if the method is not written.
        is_lenient: the setting is accepted if the other setting is written.
        otherwise: an alternative requirement.
    """

    path: str
    values: tuple[Any, ...] = ()
    why: str = ""
    fix: str = ""
    least: int | None = None
    of: tuple[Any, ...] = ()
    off: tuple[Any, ...] = ()
    is_method: bool = False
    is_lenient: bool = False
    otherwise: Needs | None = None


class Group(BaseModel):
    """Settings of one concern. Frozen and strict: values must have the right type.

    A setting is a field with a docstring below it. Its annotation has the type, choices as a Literal, and in Annotated
    a number's range (a Field), its unit ("tokens", "seconds", "steps"), a `Limit`, each `Mark`, and each `Needs`. The
    docstring says what it is, and after "How: " and "When: " how it works, and when to change it and to what, in one to
    three plain sentences each. "- CHOICE: " is followed by what a choice does. The planner computes what a setting
    costs, so the docstring does not state it.
    """

    needed_by_all: ClassVar[tuple[Needs, ...]] = ()  # requirements of every setting of the group
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


G = TypeVar("G", bound=Group)


def validate_group(group: type[G], values: Mapping[str, Any]) -> tuple[G, dict[str, list[Any]]]:
    """Build a group from the valid values; return it with the names of invalid ones, each with a list's invalid
    items."""
    try:
        return group(**values), {}
    except ValidationError as error:
        wrong: dict[str, list[Any]] = {}  # a list has a problem for each wrong item
        for problem in error.errors(include_url=False, include_context=False):
            name, index = (*problem["loc"], None)[:2]
            items = wrong.setdefault(str(name), [])
            items += [values[str(name)][index]] if isinstance(index, int) else []
    return group(**{name: value for name, value in values.items() if name not in wrong}), wrong


class SettingTexts(NamedTuple):
    """What a setting is, how it works, when to change it, and what each choice does."""

    what: str
    how: str
    when: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """The description of one setting, for `explain`, error messages and tests.

    Attributes:
        path: "group.name", its unique name in the project.
        kinds: its types, of bool, int, float, str, list, dict; `optional` says whether None is valid, too.
        items: the type of a list's items: str, int or float.
        choices: the values of a Literal, () without one.
        bounds: the range of a number, by "ge", "gt", "le" and "lt".
        model: the group that declares it.
        marks, limit, needs: of its annotation.
    """

    path: str
    kinds: frozenset[type]
    items: type
    optional: bool
    choices: tuple[Any, ...]
    bounds: Mapping[str, float]
    default: Any
    unit: str
    model: type[Group]
    marks: frozenset[Mark] = frozenset()
    limit: Limit | None = None
    needs: tuple[Needs, ...] = ()

    @property
    def group(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def expected(self) -> str:
        """Type and range as text: "a whole number, at least 1"."""
        return self.expected_in(_ENGLISH)

    def expected_in(self, words: Mapping[str, str]) -> str:
        """Return type and range as text in a language, whose words have the keys of `_ENGLISH`."""
        if self.choices:
            listed = (str(each).lower() if isinstance(each, bool) else str(each) for each in self.choices)
            said = words["any of" if list in self.kinds else "one of"].format(words["and"].join(listed))
            said += words["or"] + words["dict"] if dict in self.kinds else ""
        elif {str, list} <= self.kinds:
            said = words["texts"]
        elif list in self.kinds and self.items is not str:
            said = words["numbers" if self.items is float else "whole numbers"]
        else:
            kinds = self.kinds - {int} if float in self.kinds else self.kinds
            said = words["or"].join(words[kind.__name__] for kind in _KINDS if kind in kinds)
        limits = (f"{words[name]} {limit}" for name, limit in self.bounds.items())
        return words["comma"].join((said, *limits, *([words["null"]] if self.optional else ())))

    @property
    def texts(self) -> SettingTexts:
        what, how, when, *values = docstrings(self.model)[self.name].split("\n")
        return SettingTexts(what, how[5:], when[6:], dict(value.removeprefix("- ").split(": ", 1) for value in values))

    @property
    def digest(self) -> str:
        """Digest of all texts, 8 hex digits: a translation records it, so that outdated ones are found."""
        texts = (*self.texts[:3], *(part for value in self.texts.values.items() for part in value))
        return hashlib.blake2b("\0".join(texts).encode(), digest_size=4).hexdigest()


def describe(group: str, model: type[Group]) -> Iterator[SettingInfo]:
    """Describe every setting of one group, in the order of declaration."""
    for name, field in model.model_fields.items():
        kinds: set[type] = set()
        items: type = str
        choices: list[Any] = []
        notes = list(field.metadata)  # of Annotated, and of its Field
        members: list[Any] = [field.annotation]
        for member in members:  # grows: types inside of a member are appended
            origin = get_origin(member) or member
            if origin is Annotated:
                inner, *more = get_args(member)
                notes += [note for each in more for note in (each.metadata if isinstance(each, FieldInfo) else [each])]
                members.append(inner)
                continue
            if origin in (Union, types.UnionType):
                members += get_args(member)
                continue
            literal = get_args(member)[0] if origin is list else member
            if get_origin(literal) is Literal:
                choices.extend(get_args(literal))
                kinds.update([list] if origin is list else map(type, get_args(literal)))
            elif member is not type(None):
                kinds.add(origin)
                items = literal if origin is list else items
        yield SettingInfo(
            path=f"{group}.{name}",
            kinds=frozenset(kinds),
            items=items,
            optional=type(None) in members,
            choices=tuple(choices),
            bounds={name: getattr(note, name) for note in notes for name in _RANGE if hasattr(note, name)},
            default=field.get_default(call_default_factory=False),
            unit=next((note for note in notes if isinstance(note, str)), ""),
            model=model,
            marks=frozenset(note for note in notes if isinstance(note, Mark)),
            limit=next((note for note in notes if isinstance(note, Limit)), None),
            needs=(*(note for note in notes if isinstance(note, Needs)), *model.needed_by_all),
        )


@cache
def docstrings(model: type[Group]) -> dict[str, str]:
    """Read the docstrings of the fields of a group from its source, by name; only when needed, as it takes
    milliseconds."""
    (declared,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(declared, ast.ClassDef)
    return {
        ast.unparse(field.target): re.sub(
            r"\n(?!How: |When: |- )", " ", inspect.cleandoc(ast.literal_eval(below.value))
        )
        for field, below in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
