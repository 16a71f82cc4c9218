"""An update of a model's weights, tensor by tensor, which is whole or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.forms import find_form

_SHOWN = 3


@dataclass(slots=True)
class Update:
    """What has come of an update.

    Attributes:
        num_tensors: how many are to come.
        expected: shapes by name.
    """

    version: int
    num_tensors: int
    expected: Mapping[str, tuple[int, ...]]
    _received: set[str] = field(default_factory=set)
    _problems: list[str] = field(default_factory=list)

    def accept(self, name: str, shape: Iterable[int]) -> bool:
        """Note a tensor; return whether it belongs to the model."""
        expected = self.expected.get(name)
        if expected is None:
            self._problems.append(f"{name} is not of this model")
        elif tuple(shape) != expected:
            self._problems.append(f"{name} is {list(shape)}, and {list(expected)} in this model")
        elif name in self._received:
            self._problems.append(f"{name} arrived twice")
        else:
            self._received.add(name)
            return True
        return False

    def problem(self, version: int) -> MegatuneError | None:
        """Return what is wrong with an update that is not complete (INTERNAL)."""
        problems = list(self._problems)
        if version != self.version:
            problems.append(f"version {version} is to be used, and version {self.version} arrived")
        if missing := [name for name in self.expected if name not in self._received]:
            problems.append(f"{len(missing)} of {len(self.expected)} tensors did not arrive: {_named(missing)}")
        if len(self._received) != self.num_tensors:
            problems.append(
                f"{self.num_tensors} tensors were announced, and {len(self._received)} of the model's arrived"
            )
        if not problems:
            return None
        what = f"the update to version {self.version} of the weights is incomplete"
        why = "; ".join([*problems[:_SHOWN], *(["…"] if len(problems) > _SHOWN else [])])
        fix = "the engine's weights have no version now: resume the run from its last checkpoint"
        return MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.INTERNAL)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by name, as `bridge.export` streams them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    architecture = load_architecture(folder)
    family = FAMILIES[architecture.model_type]
    weights = family.weight_map(architecture)
    version = str(read_config(folder).get("transformers_version") or "")
    form = find_form(family.forms, weights, architecture, shapes.keys(), shapes.__getitem__, version)
    return form.all_shapes(weights, architecture)


def _named(names: list[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
