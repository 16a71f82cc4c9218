"""Compares a layout with Transformers, or with another layout, on one checkpoint: starts the ranks of each, compares
what they wrote and, where it differs, finds where that begins."""

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
from megatune.verify.numbers import WHOLE_GRADIENT, Difference, Numbers, Trace, compare, judge, judge_alike
from megatune.verify.samples import Sample

_NUM_WORST = 10  # parameters
_NUM_BEFORE = 3  # places


class Verdict(NamedTuple):
    """The errors of logits, loss, then each parameter, and where a difference arises, if any is above its tolerance."""

    differences: list[Difference]
    location: Location | None = None


class RanksFailed(Exception):  # noqa: N818  (the ranks have reported their error)
    """Processes could not compute the numbers. Its argument is their exit code."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Something that computes, in processes of its own: its memory is given back, and nothing of it stays here."""

    name: str
    target: str
    payload: dict[str, Any]
    world: World

    def numbers(self, folder: Path, look: OnPoll | None = None) -> Numbers:
        """Compute logits, loss, gradients and what every place puts out, in a folder of that one."""
        folder = folder / self.name
        folder.mkdir()
        world = replace(self.world, master_port=find_free_port())
        # Not inside the folder, which goes in the end: what is said of a failure names the ranks' logs.
        run_dir = Path(tempfile.mkdtemp(prefix="megatune-verify-logs-"))
        code = run_ranks(self.target, {**self.payload, "folder": str(folder)}, world, run_dir, on_poll=look)
        if code in (ExitCode.DONE, ExitCode.INPUT):  # a finding says all there is to say
            shutil.rmtree(run_dir)
        if code != ExitCode.DONE:
            raise RanksFailed(code)
        return Numbers(folder)


def verify_layout(
    model_dir: str | Path,
    settings: Settings,
    samples: list[Sample],
    world: World,
    *,
    reference_dir: str | Path | None = None,
    look: OnPoll | None = None,
) -> Verdict:
    """Compute logits, loss and gradients in the layout of `settings` and with Transformers, and compare.

    The numbers lie in a temporary folder meanwhile: about 8 bytes a parameter in fp32, 12 in 16 bits.

    Args:
        world: of this machine only.
        reference_dir: what Transformers loads; `model_dir` by default.
        look: watches the processes, see `run_ranks`.

    Raises:
        RanksFailed: the numbers could not be computed.
    """
    dtype = settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    reference = partial(_reference, reference_dir or model_dir, samples, settings.finetuning.adapter_name_or_path)
    truth = reference("truth", dtype, "float32")
    stock = None if dtype == "float32" else reference("stock", dtype, dtype)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        # The layout first: it names what is wrong with a checkpoint better than Transformers does.
        computed, expected = layout.numbers(folder, look), truth.numbers(folder, look)
        if stock is None:
            return _verdict(judge(compare(computed, expected)), computed, expected)
        rounded = stock.numbers(folder, look)
        errors, stock_errors = (compare(side, expected, experts_together=True) for side in (computed, rounded))
        return _verdict(judge(errors, stock_errors), computed, expected, rounded)


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

    In 16 bits two ways of rounding cannot be judged by their distance, only by whether one is further from the truth
    than the other. So, unless they are equal, both are measured against the second layout in fp32 with the same,
    rounded, weights.

    Args:
        world, against_world: of this machine only.
        against: the other layout, of the same precision.
        against_dir: the checkpoint that it loads; `model_dir` by default.

    Raises:
        RanksFailed: the numbers could not be computed.
    """
    other_dir, dtype = against_dir or model_dir, settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    other = _layout("other", other_dir, against, samples, against_world)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        sides = (layout.numbers(folder), other.numbers(folder))
        differences = judge(compare(*sides))
        if dtype == "float32" or all(one.error == 0 for one in differences):
            return _verdict(differences, *sides)
        wide = against.model_copy(update={"precision": PrecisionSettings()})
        truth = _layout("truth", other_dir, wide, samples, against_world, dtype)
        fp32 = truth.numbers(folder)
        differences = judge_alike(*(compare(side, fp32, experts_together=True) for side in sides))
        return _verdict(differences, sides[0], fp32, sides[1], alike=True)


def _verdict(
    differences: list[Difference],
    computed: Numbers,
    truth: Numbers,
    stock: Numbers | None = None,
    *,
    alike: bool = False,
) -> Verdict:
    """Say where the difference arises, if there is one."""
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
    """Return tokens that it concerns, where that is known."""
    parts = [f"most of it in row {place.worst[0]}, token {place.worst[1]}"] if place.worst else []
    if place.moved:
        parts.append(f"{place.moved} tokens go to other experts")
    return f" ({'; '.join(parts)})" if parts else ""
