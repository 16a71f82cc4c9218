"""What a settings file asks of its machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.doctor.check import Check, check, failures
from megatune.errors import MegatuneError
from megatune.training.before import check_before
from megatune.training.room import Room

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.load import Loaded
    from megatune.config.settings import Settings
    from megatune.hub.repository import Hub

MEETING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a run, or what any run needs.

    Attributes:
        output_dir: None where no file names one.
        timeout: seconds in which ranks must meet.
        workers: processes that load data, of each rank.
        room: that its checkpoints need.
        hubs: ("hf" or "ms", what lies there).
        checks: of the file itself.
    """

    output_dir: Path | None = None
    timeout: float = MEETING_SECONDS
    workers: int = 0
    bf16: bool = False
    tensor_parallel: bool = False
    room: Room = field(default_factory=Room)
    hubs: tuple[tuple[Hub, str], ...] = ()
    checks: tuple[Check, ...] = ()


def needs_of(loaded: Loaded, world_size: int, *, whole: bool) -> Needs:
    """Read what a run needs from its settings; what is wrong with them becomes checks.

    Args:
        world_size: processes of the whole run.
        whole: whether the settings are those of a run, or a few that say which ranks to start.
    """
    settings = loaded.settings
    timeout = min(settings.run.ddp_timeout, MEETING_SECONDS)
    if not whole:
        return Needs(timeout=timeout)
    architecture, hubs, checks = None, tuple(_hubs(settings)), []
    if settings.model.model_name_or_path and not hubs:
        try:
            architecture = _architecture(settings)
        except MegatuneError as error:
            checks += failures("model", error.findings)
    findings = loaded.check(architecture, world_size)
    for each in check_before(settings, loaded.invalid, world_size=world_size).errors:
        findings += each.findings
    checks = [replace(each, group="settings") for each in [*checks, *failures("settings", findings)]]
    found = "valid for this layout and model; data, weights and folders are there"
    return Needs(
        output_dir=Path(settings.run.output_dir) if settings.run.output_dir else None,
        timeout=timeout,
        workers=settings.data.dataloader_num_workers or 0,
        bf16=settings.precision.bf16,
        tensor_parallel=settings.parallel.tensor_model_parallel_size > 1,
        room=Room.of(settings, architecture),
        hubs=hubs,
        checks=tuple(checks or [check("settings", "settings", found)]),
    )


def _architecture(settings: Settings) -> Architecture:
    from megatune.families import load_architecture
    from megatune.hub.models import open_model

    model = settings.model
    assert model.model_name_or_path is not None
    found = open_model(model.model_name_or_path, model.model_revision, model.cache_dir, model.mcore_model)
    return load_architecture(found.config_dir(), settings.run.stage)


def _hubs(settings: Settings) -> Iterator[tuple[Hub, str]]:
    from megatune.hub.models import is_hub_id
    from megatune.hub.repository import use_modelscope

    name = settings.model.model_name_or_path
    if name and is_hub_id(name) and settings.model.mcore_model is None:
        yield "ms" if use_modelscope() else "hf", name
