"""References to settings and options inside messages.

A text names a setting by a reference: `Text` reads as our own names, and `spell` writes those of a dialect. References
are marked by characters that neither files of settings nor command lines can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

_MARK, _PART = "\0", "\x1f"
Form = Literal["named", "assigned", "removed"]


class Reference(NamedTuple):
    """A setting, with alternative values if there are any.

    Attributes:
        form: "assigned" is written as in a file; "removed" is the key that was written, even if others follow from it.
    """

    form: Form
    name: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The setting by our own name: "max_steps", "max_steps 5", or assigned "max_steps: 5 or 6"."""
        joint = ": " if self.form == "assigned" else " "
        return self.name + (joint + either(self.values) if self.values else "")


def ref(name: str, *values: Any) -> str:
    """Refer to a setting: "max_steps", or with its value "max_steps 5"."""
    return _encoded("named", name, values)


def assign(name: str, *values: Any) -> str:
    """Refer to a setting as it is written in a file, with alternatives if there are any: "max_steps: 5 or 6"."""
    return _encoded("assigned", name, values)


def write(name: str, *values: Any) -> str:
    """Refer to a setting that should be written: "write max_steps: 5"."""
    return "write " + assign(name, *values)


def remove(*names: str) -> str:
    """Refer to a setting, or one of several, that should be removed: "remove max_steps"."""
    return "remove " + either(_encoded("removed", name, ()) for name in names)


def either(values: Iterable[Any]) -> str:
    """Format alternatives: "4 or 8", "a, b or c"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


class Text(str):
    """A text with references, which reads as our own names.

    Attributes:
        marked: the text with marks.
    """

    marked: str

    def __new__(cls, text: str) -> Text:
        """Read a text with marks."""
        found = super().__new__(cls, spell(text))
        found.marked = getattr(text, "marked", text)
        return found

    def __reduce__(self) -> tuple[type[Text], tuple[str]]:
        return Text, (self.marked,)


def spell(text: str, say: Callable[[Reference], str] = str) -> str:
    """Replace the references of a text by what `say` returns for them, by default our own names."""
    parts = getattr(text, "marked", text).split(_MARK)
    return "".join(say(_decoded(part)) if part.startswith(_PART) else part for part in parts)


def _encoded(form: Form, name: str, values: tuple[Any, ...]) -> str:
    return f"{_MARK}{_PART.join(('', form, name, *map(_said, values)))}{_MARK}"


def _decoded(part: str) -> Reference:
    _, form, name, *values = part.split(_PART)
    return Reference(form, name, tuple(values))  # type: ignore[arg-type]


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
