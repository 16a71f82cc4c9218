"""A model in a layout, ready to train: built, loaded from a Hugging Face checkpoint, with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatune.architecture import Architecture
from megatune.bridge.load import load_weights
from megatune.bridge.parameters import LocalParameter, local_parameters
from megatune.config.settings import Settings
from megatune.engine.groups import Place, build
from megatune.engine.model import Chunk, build_model
from megatune.engine.optimizer import Optimizer, build_optimizer
from megatune.families import load_architecture


@dataclass(slots=True)
class Assembly:
    """What this rank holds.

    Attributes:
        model: its pipeline chunks, in order.
        parameters: each parameter of theirs, and each buffer that checkpoints hold, with its place in the family's
            weight map.
    """

    architecture: Architecture
    place: Place
    model: list[Chunk]
    optimizer: Optimizer
    parameters: list[LocalParameter]


def assemble(model_dir: str | Path, settings: Settings) -> Assembly:
    """Build the layout of `settings` and load the checkpoint into it. `engine.groups.join` comes first.

    Raises:
        MegatuneError: INPUT, when the checkpoint cannot be used.
    """
    architecture = load_architecture(model_dir)
    place = build(settings.parallel, seed=settings.run.seed, timeout=settings.run.ddp_timeout)
    model = build_model(architecture, settings)
    parameters = local_parameters(model, architecture, place)
    load_weights(model_dir, parameters, architecture)
    # After the weights: master weights are made from them.
    optimizer = build_optimizer(model, settings.optimizer, settings.parallel, settings.precision)
    return Assembly(architecture, place, model, optimizer, parameters)
