"""Compares a layout with Transformers on one checkpoint: starts its ranks, then the reference, then compares."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatune.config.settings import Settings
from megatune.errors import ExitCode
from megatune.launch.supervisor import run_ranks
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.compare import Difference, compare, judge
from megatune.verify.numbers import Numbers
from megatune.verify.samples import FP16_LOSS_SCALE, Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a verification ended.

    Attributes:
        exit_code: of the processes; DONE where all numbers could be computed.
        differences: logits, loss, then each parameter; empty where processes failed, which they have reported.
    """

    exit_code: int
    differences: list[Difference]


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
    params_dtype = settings.precision.params_dtype
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        layout, truth, stock = folder / "layout", folder / "truth", folder / "stock"
        layout.mkdir()
        measured = {"model_dir": str(model_dir), "settings": settings, "samples": samples, "folder": str(layout)}
        # The layout first: it names what is wrong with a checkpoint better than Transformers does.
        code = run_ranks("megatune.verify.measure:run_rank", measured, world, folder / "ranks")
        if code != ExitCode.DONE:
            return Verdict(code, [])
        folders: dict[str, dict[str, str]] = {str(truth): {"weights_dtype": params_dtype, "dtype": "float32"}}
        if params_dtype != "float32":
            folders[str(stock)] = {"weights_dtype": params_dtype, "dtype": params_dtype}
        code = _run_reference(str(reference_dir or model_dir), samples, folders, folder / "reference")
        if code != ExitCode.DONE:
            return Verdict(code, [])
        expected = Numbers(truth)
        stock_errors = compare(Numbers(stock), expected) if stock.exists() else None
        return Verdict(code, judge(compare(Numbers(layout), expected), stock_errors))


def _run_reference(model_dir: str, samples: list[Sample], folders: dict[str, dict[str, str]], run_dir: Path) -> int:
    """In a process of its own: its memory is given back, and nothing of the engine is loaded there."""
    fp16 = any("float16" in dtypes.values() for dtypes in folders.values())
    payload = {
        "model_dir": model_dir,
        "samples": samples,
        "folders": folders,
        "loss_scale": FP16_LOSS_SCALE if fp16 else 1.0,
    }
    alone = World(nnodes=1, node_rank=0, nproc_per_node=1, master_addr=LOOPBACK, master_port=find_free_port())
    return run_ranks("megatune.verify.reference:run_rank", payload, alone, run_dir)
