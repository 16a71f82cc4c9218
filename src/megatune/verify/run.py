"""Compare a layout with Transformers, or with another layout, on one checkpoint: start the ranks of each, compare their
results, and locate the first difference."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from megatune.config.settings import PrecisionSettings, Settings
from megatune.errors import ExitCode
from megatune.launch.supervisor import OnPoll, run_ranks
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.localize import LOGITS, LOSS, Location, locate
from megatune.verify.results import WHOLE_GRADIENT, Difference, Results, Trace, check_errors, check_layouts, compare
from megatune.verify.samples import Sample

_NUM_WORST = 10  # parameters
_NUM_BEFORE = 3  # places


class Verdict(NamedTuple):
    """The errors of logits, loss and each parameter, and the location of the difference if any is above its
    tolerance."""

    differences: list[Difference]
    location: Location | None = None


class RanksFailed(Exception):  # noqa: N818  (the ranks have reported their error)
    """The processes of a computation have failed; the argument is their exit code."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a comparison, computed in separate processes, which release its memory."""

    name: str
    target: str
    payload: dict[str, Any]
    world: World

    def compute(self, folder: Path, look: OnPoll | None = None) -> Results:
        """Compute logits, loss, gradients and the outputs of every place, in a subfolder."""
        folder = folder / self.name
        folder.mkdir()
        world = replace(self.world, master_port=find_free_port())
        # Not inside the temporary folder, since error messages refer to the ranks' logs.
        run_dir = Path(tempfile.mkdtemp(prefix="megatune-verify-logs-"))
        code = run_ranks(self.target, {**self.payload, "folder": str(folder)}, world, run_dir, on_poll=look)
        if code in (ExitCode.DONE, ExitCode.INPUT):  # the finding is complete without the logs
            shutil.rmtree(run_dir)
        if code != ExitCode.DONE:
            raise RanksFailed(code)
        return Results(folder)


def verify_layout(
    model_dir: str | Path,
    settings: Settings,
    samples: list[Sample],
    world: World,
    *,
    reference_dir: str | Path | None = None,
    look: OnPoll | None = None,
) -> Verdict:
    """Compute logits, loss and gradients in the layout of `settings` and with Transformers, and compare them.

    Results are stored in a temporary folder: about 8 bytes per parameter in fp32, 12 in 16 bits.

    Args:
        world: a world on this machine.
        reference_dir: the checkpoint for Transformers; `model_dir` by default.
        look: monitors the processes, see `run_ranks`.

    Raises:
        RanksFailed: the computation has failed.
    """
    dtype = settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    reference = partial(_reference, reference_dir or model_dir, samples, settings.finetuning.adapter_name_or_path)
    truth = reference("truth", dtype, "float32")
    stock = None if dtype == "float32" else reference("stock", dtype, dtype)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        # The layout first: its errors about checkpoints are clearer than those of Transformers.
        computed, expected = layout.compute(folder, look), truth.compute(folder, look)
        if stock is None:
            return _verdict(check_errors(compare(computed, expected)), computed, expected)
        rounded = stock.compute(folder, look)
        errors, stock_errors = (compare(side, expected, experts_together=True) for side in (computed, rounded))
        return _verdict(check_errors(errors, stock_errors), computed, expected, rounded)


def verify_layouts(
    model_dir: str | Path,
    settings: Settings,
    world: World,
    against: Settings,
    against_world: World,
    samples: list[Sample],
    *,
    against_dir: str | Path | None = None,
) -> Verdict:
    """Compute logits, loss and gradients in two layouts and compare them with each other, without Transformers.

    In 16 bits the difference between two layouts has no tolerance of its own; one of them must not be further from
    the truth than the other. So, unless they are equal, both are compared with the second layout in fp32 with the same
    rounded weights.

    Args:
        world, against_world: worlds on this machine.
        against: the other layout, with the same precision.
        against_dir: its checkpoint; `model_dir` by default.

    Raises:
        RanksFailed: the computation has failed.
    """
    other_dir, dtype = against_dir or model_dir, settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    other = _layout("other", other_dir, against, samples, against_world)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        sides = (layout.compute(folder), other.compute(folder))
        differences = check_errors(compare(*sides))
        if dtype == "float32" or all(one.error == 0 for one in differences):
            return _verdict(differences, *sides)
        wide = against.model_copy(update={"precision": PrecisionSettings()})
        truth = _layout("truth", other_dir, wide, samples, against_world, dtype)
        fp32 = truth.compute(folder)
        differences = check_layouts(*(compare(side, fp32, experts_together=True) for side in sides))
        return _verdict(differences, sides[0], fp32, sides[1], alike=True)


def _verdict(
    differences: list[Difference],
    computed: Results,
    truth: Results,
    stock: Results | None = None,
    *,
    alike: bool = False,
) -> Verdict:
    """Return the verdict, with the location of the difference if there is one."""
    if all(one.passes for one in differences):
        return Verdict(differences)
    rounded = None if stock is None else Trace(stock.folder)
    return Verdict(differences, locate(differences, Trace(computed.folder), Trace(truth.folder), rounded, alike=alike))


def _layout(
    name: str, model_dir: str | Path, settings: Settings, samples: list[Sample], world: World, dtype: str = "float32"
) -> _Side:
    payload = {"model_dir": str(model_dir), "settings": settings, "samples": samples, "weights_dtype": dtype}
    return _Side(name, "megatune.verify.measure:run_rank", payload, world)


def _reference(
    model_dir: str | Path, samples: list[Sample], adapters: list[str], name: str, weights_dtype: str, dtype: str
) -> _Side:
    payload = {"model_dir": str(model_dir), "samples": samples, "adapters": adapters}
    payload |= {"weights_dtype": weights_dtype, "dtype": dtype}
    alone = World(nnodes=1, node_rank=0, nproc_per_node=1, master_addr=LOOPBACK, master_port=find_free_port())
    return _Side(name, "megatune.verify.reference:run_rank", payload, alone)


def show(verdict: Verdict, *, verbose: bool = False) -> int:
    """Print the comparison.

    Args:
        verbose: show every parameter and place, not only the worst parameters and the places near the first difference.

    Returns:
        The exit code: DONE or DIFFERENT.
    """
    differences = verdict.differences
    totals = [one for one in differences if one.name in (LOGITS, LOSS, WHOLE_GRADIENT)]
    parameters = sorted((one for one in differences if one not in totals), key=_severity, reverse=True)
    shown = parameters if verbose else parameters[:_NUM_WORST]
    console = Console()
    console.print(_table(totals, shown))
    if len(shown) < len(parameters):
        console.print(f"{len(parameters) - len(shown)} more parameters have smaller errors; --verbose shows all")
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
    """Return lines with the first place that differs, and with the places before and after it."""
    first = location.first
    if first is None:
        return ["no single place differs by more than its tolerance: the difference is spread over all of them"]
    places: Sequence[Difference] = location.places
    at = places.index(first)
    if not verbose:
        places = places[max(at - _NUM_BEFORE, 0) : at + 2]
    if location.in_gradients:
        heading = f"all outputs agree; going backward, gradients first differ at: {first.name}{_detail(first)}"
    else:
        heading = f"the first difference arises at: {first.name}{_detail(first)}"
    width = max(len(place.name) for place in places)
    lines = (f"    {place.name:<{width}}  {_number(place.error):>7}" for place in places)
    mark = f"  <- more than {_number(first.tolerance)}"
    return [heading, *(line + (mark if place is first else "") for place, line in zip(places, lines, strict=True))]


def _detail(place: Difference) -> str:
    """Return the affected tokens, if known."""
    parts = [f"most of it in row {place.worst[0]}, token {place.worst[1]}"] if place.worst else []
    if place.moved:
        parts.append(f"{place.moved} tokens go to other experts")
    return f" ({'; '.join(parts)})" if parts else ""
