"""Checkpoint forms: how files name and arrange the tensors of a weight map, if they differ from the map."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.families.weights import Weight, experts_of, hf_shape, hf_shapes, layers_of

Shape = tuple[int, ...]


class FileTensor(NamedTuple):
    """The location of a Hugging Face tensor of the weight map in files.

    Attributes:
        name: of the tensor in the file.
        expert: its index in dimension 0 of a tensor that stacks all experts; None if it is a separate tensor.
        first_row: with `expert`, its first row in the expert's matrix.
        rows: with `expert`, its number of rows.
        transposed: with `expert`, whether the file's matrix is transposed.
        shape: of the tensor in the file.
    """

    name: str
    expert: int | None = None
    first_row: int = 0
    rows: int = 0
    transposed: bool = False
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """Names and arrangement of a checkpoint's tensors.

    Attributes:
        prefixes: prefixes of names in the map, with their replacements in files.
        fused: engine names of experts' weights, and the tensor [experts, rows, columns] that stacks those of a layer;
            for biases [experts, rows].
        transposed: whether these tensors are [experts, columns, rows].
        copies: names of tensors in the map, and another name under which files duplicate them.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, str], ...] = ()
    transposed: bool = False
    copies: tuple[tuple[str, str], ...] = ()

    def written_names(self, name: str) -> tuple[str, ...]:
        """Return the names under which a separate tensor is written."""
        return self.file_name(name), *(copy for copied, copy in self.copies if copied == name)

    def file_name(self, name: str) -> str:
        """Return the name of a separate tensor in files."""
        for prefix, in_files in self.prefixes:
            if name.startswith(prefix):
                return in_files + name.removeprefix(prefix)
        return name

    def fused_name(self, weight: Weight, layer: int) -> str | None:
        """Return the tensor that stacks this weight of all experts; None if tensors are separate."""
        name = dict(self.fused).get(weight.engine)
        return None if name is None else name.format(layer=layer)

    def file_shapes(self, weight: Weight, architecture: Architecture, layer: int) -> dict[str, Shape]:
        """Return the shapes in files of the tensors of a weight's layer, by name."""
        return {place.name: place.shape for place in self.locate(weight, architecture, layer).values()}

    def locate(self, weight: Weight, architecture: Architecture, layer: int) -> dict[str, FileTensor]:
        """Return the location of each Hugging Face tensor of a weight's layer."""
        fused = self.fused_name(weight, layer)
        if fused is None:
            whole = hf_shapes(weight, architecture, layer).items()
            return {name: FileTensor(self.file_name(name), shape=shape) for name, shape in whole}
        shapes, experts = [hf_shape(tensor, architecture) for tensor in weight.hf], experts_of(weight, architecture)
        matrix = sum(shape[0] for shape in shapes), *shapes[0][1:]
        stack = len(experts), *(matrix[::-1] if self.transposed else matrix)
        places, first = {}, 0
        for tensor, (rows, *columns) in zip(weight.hf, shapes, strict=True):
            for expert in experts:
                name = tensor.name.format(layer=layer, expert=expert)
                places[name] = FileTensor(fused, expert, first, rows, self.transposed and bool(columns), stack)
            first += rows
        return places

    def locate_all(self, weights: Sequence[Weight], architecture: Architecture) -> dict[str, FileTensor]:
        """Return the location of each Hugging Face tensor of a model."""
        return {
            name: place
            for weight in weights
            for layer in layers_of(weight, architecture)
            for name, place in self.locate(weight, architecture, layer).items()
        }

    def all_shapes(self, weights: Sequence[Weight], architecture: Architecture) -> dict[str, Shape]:
        """Return the shapes of a model's tensors in files, by name."""
        return {place.name: place.shape for place in self.locate_all(weights, architecture).values()}


AS_MAPPED = CheckpointForm()


def find_form(
    forms: Sequence[CheckpointForm],
    weights: Sequence[Weight],
    architecture: Architecture,
    names: Collection[str],
    shape_of: Callable[[str], Shape],
    transformers_version: str,
) -> CheckpointForm:
    """Return the form that matches most of a checkpoint's tensors, by name and shape.

    Transposed square matrices have the same shape: then the version of Transformers that saved the checkpoint decides;
    before version 5 experts' matrices were transposed.

    Args:
        forms: of the family, at least one; of several that match equally well the first is returned.
        shape_of: returns the shape of one of `names`.
        transformers_version: from config.json, or "" if it has none.
    """

    def fit(form: CheckpointForm) -> tuple[int, bool]:
        shapes = form.all_shapes(weights, architecture)
        found = sum(name in names and shape_of(name) == shape for name, shape in shapes.items())
        older = transformers_version.partition(".")[0] in ("", "0", "1", "2", "3", "4")
        return found, form.transposed == older

    return max(forms, key=fit) if len(forms) > 1 else forms[0]
