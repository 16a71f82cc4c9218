"""How checkpoint files name and arrange the tensors of a weight map, where it is not as the map has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.families.weights import Weight, experts_of, hf_shape, hf_shapes, layers_of

Shape = tuple[int, ...]


class FileTensor(NamedTuple):
    """Where a Hugging Face tensor of the weight map is in files.

    Attributes:
        name: of the tensor in the file.
        expert: its index in dimension 0 of a tensor that holds the matrices of all experts; None where it is by itself.
        first_row: with `expert`, where its rows begin among those of the expert's matrix.
        rows: with `expert`, how many there are.
        transposed: with `expert`, the file has the matrix transposed.
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
        prefixes: how a name begins in the map, and how it begins in files instead.
        fused: engine names of experts' weights, and the one tensor [experts, rows, columns] that has all of a layer's,
            of biases [experts, rows].
        transposed: those are [experts, columns, rows].
        copies: names of tensors in the map, and another name by which files have each of them once more.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, str], ...] = ()
    transposed: bool = False
    copies: tuple[tuple[str, str], ...] = ()

    def written_names(self, name: str) -> tuple[str, ...]:
        """Return under which names a tensor that is by itself is written."""
        return self.file_name(name), *(copy for copied, copy in self.copies if copied == name)

    def file_name(self, name: str) -> str:
        """Return what files call a tensor that is by itself."""
        for prefix, in_files in self.prefixes:
            if name.startswith(prefix):
                return in_files + name.removeprefix(prefix)
        return name

    def fused_name(self, weight: Weight, layer: int) -> str | None:
        """Return the tensor that has this weight of all experts; None where each tensor is by itself."""
        name = dict(self.fused).get(weight.engine)
        return None if name is None else name.format(layer=layer)

    def file_shapes(self, weight: Weight, architecture: Architecture, layer: int) -> dict[str, Shape]:
        """Return the shapes of a weight's tensors of a layer in files, by name."""
        return {place.name: place.shape for place in self.locate(weight, architecture, layer).values()}

    def locate(self, weight: Weight, architecture: Architecture, layer: int) -> dict[str, FileTensor]:
        """Return where each Hugging Face tensor of a weight's layer is."""
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
        """Return where each Hugging Face tensor of a model is."""
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
    """Return the form that most of a checkpoint's tensors have, by name and shape.

    Square matrices are the same transposed: then the version of Transformers that saved the checkpoint decides, which
    before 5 had experts' matrices transposed.

    Args:
        forms: of the family, at least one; of those that fit equally well the first.
        shape_of: of one of `names`.
        transformers_version: as config.json says, "" where it does not.
    """

    def fit(form: CheckpointForm) -> tuple[int, bool]:
        shapes = form.all_shapes(weights, architecture)
        found = sum(name in names and shape_of(name) == shape for name, shape in shapes.items())
        older = transformers_version.partition(".")[0] in ("", "0", "1", "2", "3", "4")
        return found, form.transposed == older

    return max(forms, key=fit) if len(forms) > 1 else forms[0]
