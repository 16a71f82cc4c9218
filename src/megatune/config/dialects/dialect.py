"""What a dialect is: a table of its keys, and a table of what it knows that is not built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A key, or some of its values, that the dialect's users know and this project does not do.

    Attributes:
        why: the reason, a sentence or two.
        values: the values refused; None refuses every value that is not in `off`. In a list, each item is judged.
        off: the values that ask for nothing and pass, beside null, which always does. The first is named as the fix.
        fix: what to do instead; "" offers to remove the line.
    """

    why: str
    values: tuple[Any, ...] | None = None
    off: tuple[Any, ...] = ()
    fix: str = ""

    def refuses(self, value: Any) -> bool:
        """Whether `value`, as it was read from YAML, is refused."""
        if isinstance(value, list) and self.values is not None:
            return any(self.refuses(item) for item in value)
        if value is None or _among(value, self.off):
            return False
        return self.values is None or _among(value, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One vocabulary.

    Attributes:
        name: what its users call it, for messages.
        keys: its key -> our "group.name". Several keys may name one setting: generations of one name.
        not_built: keys refused by name, all values or some of them. A key of `keys` too still sets what passes.
    """

    name: str
    keys: Mapping[str, str]
    not_built: Mapping[str, Refused]

    def knows(self, key: str) -> bool:
        return key in self.keys or key in self.not_built

    def key_of(self, path: str) -> str:
        """The dialect's preferred (first) key for our "group.name".

        Raises:
            KeyError: the dialect has no key for it.
        """
        for key, target in self.keys.items():
            if target == path:
                return key
        raise KeyError(path)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Membership that keeps 1 and true apart."""
    return any(type(value) is type(other) and value == other for other in values)
