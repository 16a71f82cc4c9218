"""Checks a run before any process is started."""

from __future__ import annotations

from megatune.config.load import Loaded
from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture


def preflight(loaded: Loaded, world_size: int | None, extra: tuple[Finding, ...] = ()) -> Settings:
    """Hold the settings against the model and the world.

    Args:
        world_size: processes of the whole run; None where they could not be decided.
        extra: what was found wrong on the way here, reported along.

    Raises:
        MegatuneError: SETTINGS with everything that is wrong, or INPUT where only the model cannot be used.
    """
    architecture, refusal = None, None
    path = loaded.settings.model.model_name_or_path
    if path is not None:
        try:
            architecture = load_architecture(path)
        except MegatuneError as error:
            refusal = error
    findings = [*loaded.check(architecture, world_size), *extra]
    if findings:
        raise MegatuneError([*findings, *(refusal.findings if refusal else ())], ExitCode.SETTINGS)
    if refusal is not None:
        raise refusal
    return loaded.settings
