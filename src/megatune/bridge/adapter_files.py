"""Adapters in files, as peft has them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorSource
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG, adapter_weights, alpha_of, scaling
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_tensors import Adapter, read_adapter
from megatune.families.selection import Selection
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, Segment, all_shapes, hf_shapes

ADAPTER = WEIGHTS_FILE.removesuffix(".safetensors")
_KEPT = 4  # A and B of gate and up, and of down: experts are often read one after the other


class AdapterFolder(TensorSource):
    """An adapter's tensors, under the base's names: model.layers.0.self_attn.q_proj.lora_A.weight.

    Experts are one by one, whether the file stacks them or not; some of its stacked tensors are kept in memory.

    Attributes:
        adapter: what is in the folder, and what it means.
    """

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        self.folder, self.adapter = folder, adapter
        self.shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
        self._files = SafetensorsFolder(folder, ADAPTER)
        self._kept: dict[str, Tensor] = {}

    def read(self, segment: Segment) -> Tensor:
        name = segment.name
        place = self.adapter.tensors[name]
        if not place.num_experts:
            return self._files.read(Segment(place.name, segment.dim, segment.start, segment.stop))
        return place.part(self._stacked(place.name)).narrow(segment.dim, segment.start, segment.stop - segment.start)

    def _stacked(self, name: str) -> Tensor:
        """Read a stacked tensor: of B experts have columns far apart."""
        if name not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = self._files.read(Segment(name, 0, 0, self._files.file_shape(name)[0]))
        return self._kept[name]

    def is_halved(self, name: str) -> bool:
        """Return whether each of the two matrices that a stacked B [out, r · experts] belongs to has ranks of its own:
        the upper rows have zeros in the second half, the lower ones in the first."""
        tensor = self._stacked(name)
        places = [place for place in self.adapter.tensors.values() if place.name == name and place.expert == 0]
        rank = tensor.shape[1] // places[0].num_experts
        ranked = tensor.view(tensor.shape[0], rank, -1)
        rows = max(place.first_row for place in places)
        return not ranked[:rows, rank // 2 :].any() and not ranked[rows:, : rank // 2].any()


def open_adapter(folder: Path, architecture: Architecture, selection: Selection | None = None) -> AdapterFolder:
    """Open an adapter of a model.

    Args:
        selection: what is trained, all of which it must have, and nothing else; modules that are trained whole may be
            the base's. None for an adapter that is to be merged.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with it, or is not what is trained.
    """
    found = AdapterFolder(folder, read_adapter(folder, architecture, halve=selection is not None))
    if selection is not None and (findings := list(_differences(found, architecture, selection))):
        raise MegatuneError(findings, ExitCode.INPUT)
    return found


def _differences(found: AdapterFolder, architecture: Architecture, selection: Selection) -> Iterator[Finding]:
    """Compare an adapter with what is trained."""
    expected = all_shapes(adapter_weights(architecture, selection), architecture)
    whole = {
        name
        for weight, layer in trained_weights(architecture, selection)
        if weight.role is Role.BASE
        for name in hf_shapes(weight, architecture, layer)
    }
    where, tensors = str(found.folder), found.adapter.tensors
    why = "training continues with the modules, ranks and alpha of the adapter"
    for names, what, fix in (
        (expected.keys() - tensors.keys(), "it lacks {} that are to be trained", "write its own lora_target"),
        (
            tensors.keys() - expected.keys() - whole,
            "it has {} that would not be trained",
            "write its own lora_target and additional_target",
        ),
    ):
        if names:
            yield Finding(what.format(f"{len(names)} tensors, such as {min(names)},"), where, why, fix)
    other = [name for name, shape in expected.items() if name in tensors and tensors[name].shape != shape]
    if other:
        shapes = f"{list(tensors[other[0]].shape)} instead of {list(expected[other[0]])}"
        what = f"{len(other)} tensors have other shapes, such as {other[0]}: {shapes}"
        yield Finding(what, where, why, "write its own lora_rank")
    elif any(abs(value / scaling(selection) - 1) > 1e-6 for value in found.adapter.scalings.values()):
        yield from _scaled_otherwise(found, selection)
    if wrong := [name for name in found.adapter.halved if not found.is_halved(name)]:
        what = f"{wrong[0]} is one adapter of gate and up together"
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding(what, where, "those of this run are of one matrix each", fix)


def _scaled_otherwise(found: AdapterFolder, selection: Selection) -> Iterator[Finding]:
    """Say what makes the factor of an adapter's products another than this run's."""
    config, where = found.adapter.config, str(found.folder / ADAPTER_CONFIG)
    alpha = alpha_of(selection)
    why, changed = "it scales what adapters add to the base", False
    for name, was, now in (
        ("lora_alpha", config.alpha, alpha),
        ("use_rslora", config.use_rslora, selection.use_rslora),
    ):
        if was != now:
            changed = True
            yield Finding(
                f"{name} was {shown(was)}, and is {shown(now)} in this run", where, why, f"write {name}: {shown(was)}"
            )
    if not changed:
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding("alpha_pattern gives modules other alphas than lora_alpha", where, why, fix)
