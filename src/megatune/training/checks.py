"""The list of checks that a run passes before any of its processes starts; what all of them find is reported at once.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatune.config.derived import of_device
from megatune.config.load import Loaded
from megatune.data.check import Checked
from megatune.errors import Finding, MegatuneError
from megatune.launch.devices import count_gpus
from megatune.launch.world import RankEnv, World, decide_world, joined
from megatune.plan.run.preflight import Preflight, preflight
from megatune.training.before import check_before
from megatune.training.restarts import check_restarts
from megatune.training.source import RunModel
from megatune.training.this_machine import this_gpu, this_machine
from megatune.training.trackers import check_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What this process knows of a run that it is to start.

    Attributes:
        loaded: the settings, in their world where it could be decided.
        place: this process's among those of torchrun; None where it starts the ranks itself.
        world: of the ranks to start; None under torchrun, and where `problems` say why there is none.
        num_gpus: of this machine.
        first: whether this process writes output_dir: the first machine's, or rank 0 under torchrun.
        lines: on what its GPUs decide where it is not written.
    """

    loaded: Loaded
    place: RankEnv | None
    world: World | None
    problems: tuple[Finding, ...]
    num_gpus: int
    model: RunModel
    first: bool
    lines: Sequence[str] = ()

    @staticmethod
    def of(loaded: Loaded, env: Mapping[str, str] = os.environ) -> Launch:
        """Decide the world of settings, or find what contradicts."""
        place, num_gpus, settings = joined(env), count_gpus(env), loaded.settings
        world, problems = None, tuple[Finding, ...]()
        if place is None:
            asked = settings.run.num_processes
            # What num_processes must be a multiple of is a rule of settings, which names the sizes.
            smallest = settings.parallel.smallest_world if asked is None else 1
            try:
                world = decide_world(smallest, num_processes=asked, num_devices=num_gpus, env=env)
            except MegatuneError as error:
                problems = error.findings
        here = place or world
        world_size = here.world_size if here else None
        loaded, lines = loaded.for_world(world_size), list[str]()
        if num_gpus:
            loaded, lines = of_device(loaded, this_gpu(env), world_size)
        return Launch(
            loaded=loaded,
            place=place,
            world=world,
            problems=problems,
            num_gpus=num_gpus,
            model=RunModel(loaded.settings, asks=place is None or place.local_rank == 0),
            first=place.rank == 0 if place else world is None or world.node_rank == 0,
            lines=lines,
        )

    @property
    def world_size(self) -> int | None:
        here = self.place or self.world
        return here.world_size if here else None


@dataclass(slots=True)
class Outcome(Checked):
    """What the checks found: errors, lines for the user, and the plan."""

    plan: Preflight = field(kw_only=True)


def _check_plan(launch: Launch, found: Outcome) -> None:
    """Check the settings with the model, the world and this machine; then the disk, for checkpoints of that model."""
    loaded, here = launch.loaded, launch.place or launch.world
    directory = launch.model.config_dir
    if here is None or loaded.settings.run.memory_check == "off":
        checked = preflight(loaded, launch.world_size, launch.problems, model_dir=directory)
    else:
        local = here.nproc_per_node if isinstance(here, World) else here.local_world_size
        machine, unknown = this_machine(local, launch.num_gpus)
        idle = max(0, launch.num_gpus - local)
        size = here.world_size
        checked = preflight(
            loaded, size, launch.problems, machine, idle_gpus=idle, rows_follow=True, model_dir=directory
        )
        if unknown:
            checked = replace(checked, lines=(*checked.lines, f"plan       none: {unknown}"))
    found.plan = checked
    if launch.first and checked.architecture is not None:
        from megatune.training.room import check_room  # imports numpy, which a refused file does without

        check_room(checked.settings, checked.architecture)


def _check_files(launch: Launch, found: Outcome) -> None:
    """Check data, template, weights, folders and an earlier run."""
    loaded = launch.loaded
    checked = check_before(loaded.settings, loaded.invalid, first=launch.first, world_size=launch.world_size)
    found.errors += checked.errors
    found.lines += checked.lines


def _check_trackers(launch: Launch, found: Outcome) -> None:
    check_installed(launch.loaded.settings)


def _check_restarts(launch: Launch, found: Outcome) -> None:
    nnodes = launch.world.nnodes if launch.world else 1
    check_restarts(launch.loaded.settings, is_joined=launch.place is not None, nnodes=nnodes)


CHECKS: tuple[Callable[[Launch, Outcome], None], ...] = (_check_plan, _check_files, _check_trackers, _check_restarts)


def check_all(launch: Launch) -> Outcome:
    """Run every check.

    Raises:
        MegatuneError: with the findings of all of them, and the least of their exit codes.
    """
    found = Outcome(plan=Preflight(settings=launch.loaded.settings))
    for check in CHECKS:
        found.run(partial(check, launch, found))
    if found.errors:
        findings = dict.fromkeys(finding for error in found.errors for finding in error.findings)
        raise MegatuneError(findings, min(error.exit_code for error in found.errors))
    return found
