"""Labels of classified rows, as numbers that a loss compares scores with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatune.config.groups.run import RunSettings
from megatune.data.bad_rows import RowError
from megatune.data.formats.fields import listed, short


class Labels(NamedTuple):
    """How the rows of a run are labelled.

    Attributes:
        kind: the problem type.
        size: classes, or numbers of a regression.
    """

    kind: str
    size: int

    @classmethod
    def of(cls, run: RunSettings) -> Labels | None:
        """Return what settings ask for; None where rows have no labels."""
        return None if run.label_kind is None else cls(run.label_kind, run.num_labels or 1)

    def read(self, row: Mapping[str, Any], column: str | None) -> tuple[float, ...]:
        """Read the label of a row.

        Returns:
            `size` numbers of a regression; the number of the class; or, of several classes, 1.0 for each that holds
            and 0.0 for each other one.

        Raises:
            RowError: there is none, or it is not of this kind.
        """
        if column is None or row.get(column) is None:
            name = f"field {column!r} is missing" if column is not None else "no column has labels"
            raise RowError("missing-field", name, f"the row has {listed(row)}")
        value = row[column]
        if self.kind == "regression":
            return self._numbers(value, column)
        if self.kind == "single_label_classification":
            return (float(self._class(value, column)),)
        if not isinstance(value, list):
            raise RowError("bad-label", f"field {column!r}: expected a list of classes", f"got {short(value)}")
        found = {self._class(each, column) for each in value}
        return tuple(float(number in found) for number in range(self.size))

    def _numbers(self, value: Any, column: str) -> tuple[float, ...]:
        values = value if isinstance(value, list) else [value]
        if len(values) != self.size or not all(_is_finite(each) for each in values):
            wanted = "a number" if self.size == 1 else f"a list of {self.size} numbers"
            raise RowError("bad-label", f"field {column!r}: expected {wanted}", f"got {short(value)}")
        return tuple(map(float, values))

    def _class(self, value: Any, column: str) -> int:
        """Read the number of a class: whole, as text, too, as ms-swift reads it."""
        try:
            number = int(value) if isinstance(value, str) else value
            if _is_finite(number) and number == int(number) and 0 <= number < self.size:
                return int(number)
        except ValueError:
            pass
        expected = f"field {column!r}: expected a class from 0 to {self.size - 1}"
        raise RowError("bad-label", expected, f"got {short(value)}")


def _is_finite(value: Any) -> bool:
    # True and false are 1 and 0.
    return isinstance(value, int | float) and abs(value) < 2**127 and math.isfinite(value)
