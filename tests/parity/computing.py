"""Computes a checkpoint in a layout, on the ranks of the pool, and compares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from layouts import Layout
from pool import RankPool

from megatune.bridge.assemble import assemble
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.verify.measure import measure
from megatune.verify.results import Difference, Errors, Results, check_errors, compare
from megatune.verify.samples import Sample

# Uneven: micro-batches and data-parallel ranks hold different numbers of trained tokens, and rows hold padding.
LENGTHS = (17, 5, 30, 12)
MORE_LENGTHS = (*LENGTHS, 9, 25, 21, 8)  # where roundings are compared, which takes many


def measure_in_layout(
    model: Path, settings: Settings, samples: list[Sample], folder: Path, micro_batch_size: int = 1
) -> None:
    """On every rank."""
    assembly = assemble(model, settings)
    packed = settings.data.packing
    measure(assembly, samples, settings.parallel, folder, micro_batch_size=micro_batch_size, packed=packed)


def differences(
    pool: RankPool,
    model: Path,
    layout: Layout,
    samples: list[Sample],
    truth: Results,
    folder: Path,
    micro_batch_size: int = 1,
) -> list[Difference]:
    """The layout's errors in fp32: logits, loss, the whole gradient, then each parameter's."""
    pool.run(layout.world_size, measure_in_layout, model, layout.settings(), samples, folder, micro_batch_size)
    return check_errors(compare(Results(folder), truth))


def failures(found: list[Difference]) -> list[str]:
    return [f"{one.name}: {one.error:.1e} > {one.tolerance:.1e}" for one in found if not one.passes]


def parameter_names(model: Path) -> list[str]:
    """Every tensor of the checkpoint that is trained: all but the bias by which experts are chosen, and what scales a
    layer. Of experts that are
    in one tensor each has a name."""
    biases = ("e_score_correction_bias", ".mlp.expert_bias", ".layer_scalar")
    folder = SafetensorsFolder(model)
    names = [name for name in folder.names() if not name.endswith(biases)]
    fused = {name: folder.file_shape(name)[0] for name in names if re.search(r"\.experts\.\D", name)}
    return [f"{name} {expert}" for name in names for expert in range(fused.get(name, 1))]


def together(errors: Sequence[Errors]) -> Errors:
    """Root mean squares of errors in several batches: those of a tensor of four elements are by chance twice as large
    in one of ten."""

    def mean(values: Iterable[float]) -> float:
        return (sum(value**2 for value in values) / len(errors)) ** 0.5

    names = errors[0].gradients
    whole = {name: mean([getattr(each, name) for each in errors]) for name in ("logits", "loss", "gradient")}
    gradients = {name: mean([each.gradients[name] for each in errors]) for name in names}
    return Errors(**whole, gradients=gradients, loss_reach=mean([each.loss_reach for each in errors]))
