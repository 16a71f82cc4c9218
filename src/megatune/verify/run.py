"""Compares a layout with Transformers, or with another layout, on one checkpoint: starts the ranks of each, compares
what they wrote and, where it differs, lets them compute once more to find where that begins."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatune.config.settings import PrecisionSettings, Settings
from megatune.errors import ExitCode
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.compare import Difference, compare, judge, judge_alike
from megatune.verify.localize import Location, locate
from megatune.verify.numbers import Numbers, Trace
from megatune.verify.samples import Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a verification ended.

    Attributes:
        exit_code: of the processes; DONE where all numbers could be computed.
        differences: logits, loss, then each parameter; empty where processes failed, which they have reported.
        location: where the difference arises; None where nothing differs by more than its tolerance.
    """

    exit_code: int
    differences: list[Difference]
    location: Location | None = None


class _RanksFailed(Exception):  # noqa: N818  (the ranks have reported their error)
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Side:
    """Something that computes, in processes of its own: its memory is given back, and nothing of it stays here."""

    name: str
    target: str
    payload: dict[str, Any]
    world: World

    def numbers(self, folder: Path) -> Numbers:
        """Logits, loss and gradients."""
        return Numbers(self._run(folder / self.name, trace=False))

    def trace(self, folder: Path) -> Trace:
        """Return what every place puts out."""
        return Trace(self._run(folder / f"{self.name}-trace", trace=True))

    def _run(self, folder: Path, *, trace: bool) -> Path:
        folder.mkdir()
        world = replace(self.world, master_port=find_free_port())
        # Not inside the folder, which goes in the end: what is said of a failure names the ranks' logs.
        run_dir = Path(tempfile.mkdtemp(prefix="megatune-verify-logs-"))
        code = run_ranks(self.target, {**self.payload, "folder": str(folder), "trace": trace}, world, run_dir)
        if code in (ExitCode.DONE, ExitCode.INPUT):  # a finding says all there is to say
            shutil.rmtree(run_dir)
        if code != ExitCode.DONE:
            raise _RanksFailed(code)
        return folder


def verify_layout(
    model_dir: str | Path,
    settings: Settings,
    samples: list[Sample],
    world: World,
    *,
    reference_dir: str | Path | None = None,
) -> Verdict:
    """Compute logits, loss and gradients in the layout of `settings` and with Transformers, and compare.

    The numbers lie in a temporary folder meanwhile: about 8 bytes a parameter in fp32, 12 in 16 bits.

    Args:
        world: of this machine only.
        reference_dir: what Transformers loads; `model_dir` by default.
    """
    dtype = settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    truth = _reference("truth", reference_dir or model_dir, samples, dtype, "float32")
    stock = None if dtype == "float32" else _reference("stock", reference_dir or model_dir, samples, dtype, dtype)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        try:
            # The layout first: it names what is wrong with a checkpoint better than Transformers does.
            computed, expected = layout.numbers(folder), truth.numbers(folder)
            if stock is None:
                return _verdict(folder, judge(compare(computed, expected)), layout, truth)
            sides = (computed, stock.numbers(folder))
            errors, stock_errors = (compare(side, expected, experts_together=True) for side in sides)
            return _verdict(folder, judge(errors, stock_errors), layout, truth, stock)
        except _RanksFailed as failed:
            return Verdict(failed.code, [])


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
    """
    other_dir, dtype = against_dir or model_dir, settings.precision.params_dtype
    layout = _layout("layout", model_dir, settings, samples, world)
    other = _layout("other", other_dir, against, samples, against_world)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        try:
            computed, expected = layout.numbers(folder), other.numbers(folder)
            differences = judge(compare(computed, expected))
            if dtype == "float32" or all(one.error == 0 for one in differences):
                return _verdict(folder, differences, layout, other)
            wide = against.model_copy(update={"precision": PrecisionSettings()})
            truth = _layout("truth", other_dir, wide, samples, against_world, weights_dtype=dtype)
            fp32 = truth.numbers(folder)
            sides = (computed, expected)
            differences = judge_alike(*(compare(side, fp32, experts_together=True) for side in sides))
            return _verdict(folder, differences, layout, truth, other, alike=True)
        except _RanksFailed as failed:
            return Verdict(failed.code, [])


def _verdict(
    folder: Path,
    differences: list[Difference],
    computed: _Side,
    truth: _Side,
    stock: _Side | None = None,
    *,
    alike: bool = False,
) -> Verdict:
    """Say where the difference arises, if there is one."""
    if all(one.passes for one in differences):
        return Verdict(ExitCode.DONE, differences)
    rounded = stock.trace(folder) if stock else None
    location = locate(differences, computed.trace(folder), truth.trace(folder), rounded, alike=alike)
    return Verdict(ExitCode.DONE, differences, location)


def _layout(
    name: str,
    model_dir: str | Path,
    settings: Settings,
    samples: list[Sample],
    world: World,
    *,
    weights_dtype: str = "float32",
) -> _Side:
    payload = {
        "model_dir": str(model_dir),
        "settings": settings,
        "samples": samples,
        "weights_dtype": weights_dtype,
    }
    return _Side(name, "megatune.verify.measure:run_rank", payload, world)


def _reference(name: str, model_dir: str | Path, samples: list[Sample], weights_dtype: str, dtype: str) -> _Side:
    payload = {
        "model_dir": str(model_dir),
        "samples": samples,
        "weights_dtype": weights_dtype,
        "dtype": dtype,
    }
    alone = World(nnodes=1, node_rank=0, nproc_per_node=1, master_addr=LOOPBACK, master_port=find_free_port())
    return _Side(name, "megatune.verify.reference:run_rank", payload, alone)
