"""What a dialect is: the rows of a system's keys, and how its users write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatune.config.dialects.table import Row, same, table
from megatune.config.names import replace_names
from megatune.config.settings import all_settings, setting_paths
from megatune.config.values import parse, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One vocabulary. Our own names of settings are understood beside its keys.

    Attributes:
        name: what its users call it, for messages.
        rows: its keys. Of several for one setting the first is preferred.
        prefix, separator: how its users write a key and its value, for messages: `--key value`.
    """

    name: str
    rows: Mapping[str, Row]
    prefix: str = ""
    separator: str = ": "

    def knows(self, key: str) -> bool:
        return key in self.rows or key in setting_paths()

    @property
    def names(self) -> list[str]:
        """Every key that it knows."""
        return list(dict.fromkeys((*self.rows, *setting_paths())))

    def row_of(self, key: str) -> Row | None:
        """Return what is known about a key, of its own or our name of a setting; None of one that nobody knows."""
        row, own = self.rows.get(key), setting_paths().get(key)
        if own is None or (row is not None and row.paths):
            return row
        return Row(target=own) if row is None else replace(row, target=own)

    def names_of(self, path: str) -> list[str]:
        """List the keys that set a setting, the preferred one first, our own name among them."""
        found = [key for key in self.rows if (row := self.row_of(key)) is not None and path in row.paths]
        return list(dict.fromkeys((*found, all_settings()[path].name)))

    def key_of(self, path: str) -> str:
        """Return the preferred key of a setting."""
        return self.names_of(path)[0]

    def written(self, key: str, value: Any) -> str:
        """Write a key and its value as users do."""
        return f"{self.prefix}{key}{self.separator}{shown(value)}"

    def phrased(self, text: str, own: Collection[str] = (), rows: int | None = None, *, is_fix: bool = False) -> str:
        """Write the settings that a text names, as `config.names` says, and their values in the dialect's words.

        Args:
            own: "group.name" of settings that keep our names: the user wrote them so.
            rows: of a micro-batch on all replicas; None where the world is not known.
            is_fix: whether it says what to write: elsewhere what follows from a global batch is only explained.
        """

        def say(name: str, between: str, value: str, before: str) -> str:
            path = setting_paths()[name]
            key = name if path in own else self.key_of(path)
            row = self.row_of(key)
            if row is None or self.written(key, "") == f"{name}: ":
                return name + between + value
            is_removed = before.endswith("remove ")
            if row.global_batch and (not is_fix or rows is None) and not is_removed:
                return f"{name}{between}{value} (from {self.prefix}{key})"
            if is_removed or not between:
                return self.prefix + key + between + value
            if row.global_batch:
                value = re.sub(r"\d+", lambda number: str(int(number[0]) * (rows or 1)), value)
            else:
                parts = {part: row.write(path, parse(part).data) for part in value.split(" or ")}
                value = " or ".join(
                    part if same(said, parse(part).data) else shown(said) for part, said in parts.items()
                )
            return self.prefix + key + (self.separator if between == ": " else between) + value

        return replace_names(text, say)


# LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter).
# Messages name a setting by its own name: it comes first.
_OWN = {path.partition(".")[2]: Row(target=path) for row in table("llamafactory").values() for path in row.paths}
LLAMAFACTORY = Dialect(name="LLaMA-Factory", rows={**_OWN, **table("llamafactory")})
