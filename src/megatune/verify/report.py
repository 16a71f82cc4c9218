"""What a user sees of a comparison: the table, where the difference arises, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from megatune.errors import ExitCode
from megatune.verify.compare import WHOLE_GRADIENT, Difference
from megatune.verify.localize import Location, PlaceError
from megatune.verify.places import LOGITS, LOSS
from megatune.verify.run import Verdict

_NUM_WORST = 10
_NUM_BEFORE = 3


def show(verdict: Verdict, *, verbose: bool = False) -> int:
    """Print the comparison.

    Args:
        verbose: show every parameter and every place, not only the worst and those around the first difference.

    Returns:
        DONE, or DIFFERENT.
    """
    differences = verdict.differences
    totals = [one for one in differences if one.name in (LOGITS, LOSS, WHOLE_GRADIENT)]
    parameters = sorted((one for one in differences if one not in totals), key=_severity, reverse=True)
    shown = parameters if verbose else parameters[:_NUM_WORST]
    console = Console()
    console.print(_table(totals, shown))
    if len(shown) < len(parameters):
        console.print(f"{len(parameters) - len(shown)} more parameters are closer than these; --verbose shows all")
    if verdict.location is not None:
        console.print(*_location(verdict.location, verbose), sep="\n", highlight=False, soft_wrap=True)
    failed = [one for one in differences if not one.passes]
    if failed:
        console.print(f"FAIL: {len(failed)} of {len(differences)} differ by more than their tolerance")
        return ExitCode.DIFFERENT
    equal = all(one.error == 0 for one in differences)
    console.print(f"PASS: all {len(differences)} are {'exactly equal' if equal else 'within their tolerance'}")
    return ExitCode.DONE


def _severity(difference: Difference) -> float:
    if difference.error == 0:
        return 0.0
    return difference.error / difference.tolerance if difference.tolerance else float("inf")


def _table(totals: Iterable[Difference], parameters: Iterable[Difference]) -> Table:
    table = Table("compared", "error", "tolerance", "")
    for index, rows in enumerate((totals, parameters)):
        for one in rows:
            table.add_row(
                one.name if index == 0 else f"gradient of {one.name}",
                _number(one.error),
                _number(one.tolerance),
                "PASS" if one.passes else "FAIL",
                style=None if one.passes else "red",
            )
        table.add_section()
    return table


def _number(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.1e}"


def _location(location: Location, verbose: bool) -> list[str]:
    """Return the first place that differs, between what comes before it and what comes next."""
    first = location.first
    if first is None:
        return ["no single place differs by more than its tolerance: the difference is spread over all of them"]
    places: Sequence[PlaceError] = location.places
    at = places.index(first)
    if not verbose:
        places = places[max(at - _NUM_BEFORE, 0) : at + 2]
    if location.in_gradients:
        heading = f"all outputs agree; going backward, gradients first differ at: {first.place}{_detail(first)}"
    else:
        heading = f"the first difference arises at: {first.place}{_detail(first)}"
    width = max(len(place.place) for place in places)
    return [
        heading,
        *(f"    {place.place:<{width}}  {_number(place.error):>7}{_mark(place, first)}" for place in places),
    ]


def _mark(place: PlaceError, first: PlaceError) -> str:
    return f"  <- more than {_number(place.tolerance)}" if place is first else ""


def _detail(place: PlaceError) -> str:
    """Return tokens that it concerns, where that is known."""
    parts = [f"most of it in row {place.worst[0]}, token {place.worst[1]}"] if place.worst else []
    if place.moved:
        parts.append(f"{place.moved} tokens go to other experts")
    return f" ({'; '.join(parts)})" if parts else ""
