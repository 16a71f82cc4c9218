"""Labels of classification and regression rows, as numbers for the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatune.config.groups.run import RunSettings
from megatune.data.bad_rows import RowError
from megatune.data.formats.fields import field_names, short


class Labels(NamedTuple):
    """The labels of a run's rows.

    Attributes:
        kind: the problem type.
        size: number of classes, or of values in a regression.
    """

    kind: str
    size: int

    @classmethod
    def of(cls, run: RunSettings) -> Labels | None:
        """Return the labels for these settings; None if rows have no labels."""
        return None if run.label_kind is None else cls(run.label_kind, run.num_labels or 1)

    def read(self, row: Mapping[str, Any], column: str | None) -> tuple[float, ...]:
        """Read the label of a row.

        Returns:
            `size` numbers for a regression; the class index; or, for multi-label classification, 1.0 for each class
            of the row and 0.0 for each other.

        Raises:
            RowError: the label is missing or not of this kind.
        """
        if column is None or row.get(column) is None:
            name = f"field {column!r} is missing" if column is not None else "no column has labels"
            raise RowError("missing-field", name, f"the row has {field_names(row)}")
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
        """Read a class index: a whole number, or one as text, as in ms-swift."""
        try:
            number = int(value) if isinstance(value, str) else value
            if _is_finite(number) and number == int(number) and 0 <= number < self.size:
                return int(number)
        except ValueError:
            pass
        expected = f"field {column!r}: expected a class from 0 to {self.size - 1}"
        raise RowError("bad-label", expected, f"got {short(value)}")


def _is_finite(value: Any) -> bool:
    # Booleans count as 1 and 0.
    return isinstance(value, int | float) and abs(value) < 2**127 and math.isfinite(value)
