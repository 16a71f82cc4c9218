"""A model in a layout: built, loaded from a Hugging Face checkpoint and, to be trained, given an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatune.architecture import Architecture
from megatune.bridge.load import load_weights
from megatune.bridge.parameters import LocalParameter, local_parameters
from megatune.config.settings import Settings
from megatune.engine.groups import RankCoordinates, build
from megatune.engine.model import Chunk, build_model
from megatune.engine.optimizer import Optimizer, build_optimizer
from megatune.families import load_architecture


@dataclass(slots=True)
class LoadedModel:
    """What this rank holds of a model.

    Attributes:
        model: its pipeline chunks, in order.
        parameters: each parameter of theirs, and each buffer that checkpoints hold, as entries of the family's weight
            map.
    """

    architecture: Architecture
    place: RankCoordinates
    model: list[Chunk]
    parameters: list[LocalParameter]


@dataclass(slots=True)
class Assembly(LoadedModel):
    """A model with its optimizer, ready to train."""

    optimizer: Optimizer


def assemble(model_dir: str | Path, settings: Settings) -> Assembly:
    """Build the layout of `settings`, load the checkpoint into it and attach an optimizer. `groups.join` comes first.

    Raises:
        MegatuneError: INPUT, when the checkpoint cannot be used.
    """
    place = build(settings.parallel, seed=settings.run.seed, timeout=settings.run.ddp_timeout)
    return attach_optimizer(load_model(model_dir, settings, place), settings)


def load_model(
    model_dir: str | Path, settings: Settings, place: RankCoordinates, *, trained: bool = True
) -> LoadedModel:
    """Build a model in the layout that `groups.build` made and load a checkpoint into it; any number of them fit beside
    each other.

    Args:
        place: what `groups.build` returned for `settings.parallel`.
        trained: False for a model that only runs forward: frozen, in eval mode, without gradient buffers.

    Raises:
        MegatuneError: INPUT, when the checkpoint cannot be used.
    """
    architecture = load_architecture(model_dir)
    model = build_model(architecture, settings, trained=trained)
    parameters = local_parameters(model, architecture, place)
    load_weights(model_dir, parameters, architecture)
    return LoadedModel(architecture, place, model, parameters)


def attach_optimizer(loaded: LoadedModel, settings: Settings) -> Assembly:
    """Build the optimizer of a trained model. After its weights are loaded: master weights are made from them."""
    optimizer = build_optimizer(loaded.model, settings.optimizer, settings.parallel, settings.precision)
    return Assembly(loaded.architecture, loaded.place, loaded.model, loaded.parameters, optimizer)
