"""The model of a run before its processes start: a folder, the checkpoint that it resumes from, or an id on a hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatune.config.model import changed, is_changed, lines_of
from megatune.config.settings import Settings, with_settings
from megatune.errors import MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import CONFIG, HubModel, MegatronModel, Model, is_hub_id, open_model
from megatune.training.storage.manifest import read_manifest
from megatune.training.train_state import checkpoints_to_try


class RunModel:
    """The model that a run starts from, as one process of each machine resolves it.

    Args:
        asks: whether this process sends requests to a hub; one of each machine does.

    Attributes:
        settings: with the commit as model_revision, after `config_dir`.
        origins: of the settings that were changed here.
        lines: notes on the model for the user, after `config_dir`.
    """

    def __init__(self, settings: Settings, *, asks: bool) -> None:
        self.settings = settings
        self.origins: dict[str, str] = {}
        self.lines: list[str] = []
        self._asks = asks
        self._model: Model | None = None

    def config_dir(self, name: str) -> Path | None:
        """Return the folder with the model's config.json; None if another process requests it from the hub.

        Raises:
            MegatuneError: as `hub.models.open_model`.
        """
        model = self.settings.model
        if is_hub_id(name) and model.mcore_model is None:
            if (checkpoint := _resumed_checkpoint(self.settings)) is not None:
                with suppress(MegatuneError):  # reported when the checkpoint is verified
                    metadata = read_manifest(checkpoint).metadata
                    if metadata.get("model_name_or_path") == name:  # the commit that the run started with
                        self._pin(metadata["model_revision"], checkpoint.name)
                if (checkpoint / CONFIG).is_file():
                    return checkpoint  # else it has adapters only
            if not self._asks:
                return None
        if not self._asks and is_torch_dist(name):  # it may name a model on a hub
            return None
        found = open_model(name, model.model_revision, model.cache_dir, model.mcore_model)
        described = found.described if isinstance(found, MegatronModel) else found
        if isinstance(described, HubModel):
            if described is found:
                found.check_weights()
            self._pin(described.commit, f"{model.model_revision} on {described.host}")
        if found is not described or isinstance(found, HubModel):
            self._model = found
        if is_changed(self.settings):
            self.lines = lines_of(found, self.settings)
            self._model = found = changed(found, self.settings)
        return found.config_dir()

    def fetch(self) -> str | None:
        """Download a model on a hub, or convert a Megatron model, and return the folder; None if neither is needed."""
        return str(self._model.fetch()) if self._model is not None else None

    def _pin(self, commit: str, origin: str) -> None:
        self.settings = with_settings(self.settings, {"model.model_revision": commit})
        self.origins = {"model.model_revision": origin}


def _resumed_checkpoint(settings: Settings) -> Path | None:
    """Return the checkpoint that the run probably resumes from, before it is verified. A missing one is reported by
    `training.checks`."""
    found = checkpoints_to_try(settings)
    return next((path for path in found if any((path / name).is_file() for name in (CONFIG, ADAPTER_CONFIG))), None)
