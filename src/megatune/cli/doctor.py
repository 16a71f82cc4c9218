"""`megatune doctor`: checks machines before a run: software, memory, GPUs, disks, network, and all ranks together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatune.cli.command import Command
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.launch.world import World

_ALONE = ("run.num_processes", "run.ddp_timeout")  # what has an effect without a settings file


class DoctorOptions(Group):
    """The options of `megatune doctor`."""

    json_: bool = False
    """print JSON"""


COMMAND = Command(
    name="doctor",
    usage="[FILE.yaml] [key=value ...] [--json]",
    about="Checks what a run needs of its machines, and says of each fault what it leads to and how to fix it: "
    "versions, memory and limits, GPUs, disks, names and ports, variables; then starts the ranks, which measure "
    "clocks, a shared output_dir, the speed of each rank and of each link. Ends with 0, or with 69 if a check fails.",
    epilog="""With a settings file it checks that run's ranks, checkpoints, data workers and hub. On several machines,
start it on each of them as you start the run: with NNODES, NODE_RANK and MASTER_ADDR, or with
torchrun --no-python ... megatune doctor FILE.yaml. num_processes=N starts N ranks.""",
    options=DoctorOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Check the machines and print what was found.

    Returns:
        DONE, or UNAVAILABLE where a check failed.

    Raises:
        MegatuneError: SETTINGS, where ranks cannot be decided; UNAVAILABLE, where they do not meet.
    """
    from megatune.doctor.check import as_json, has_failed, lines
    from megatune.doctor.run import check_joined, check_started, needs_of
    from megatune.launch.world import World, torchrun_env

    given = COMMAND.read(words)
    given.stop()
    loaded, is_run = given.load(), given.settings.source is not None
    if not is_run and (findings := [*loaded.findings, *_without_part(loaded)]):
        raise MegatuneError(findings, ExitCode.SETTINGS)
    here = torchrun_env(os.environ) or _world(loaded)
    loaded = loaded.for_world(here.world_size)
    needs = needs_of(loaded, here.world_size, whole=is_run)
    checks = check_started(needs, here) if isinstance(here, World) else check_joined(needs, here)
    if isinstance(here, World) or here.rank == 0:
        print(as_json(checks) if given.options.json_ else "\n".join(lines(checks)), flush=True)
    return int(ExitCode.UNAVAILABLE if has_failed(checks) else ExitCode.DONE)


def _without_part(loaded: Loaded) -> Iterator[Finding]:
    """Yield settings that have no effect without the others of their run."""
    for path, entry in loaded.written.items():
        if path not in _ALONE:
            why = "without a settings file there is no run to check"
            yield Finding(f"{entry.key} has no part here", entry.where, why, "name the file of the run first")


def _world(loaded: Loaded) -> World:
    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    processes, size = loaded.settings.run.num_processes, loaded.settings.parallel.smallest_world
    try:
        return decide_world(size, num_processes=processes, num_devices=count_gpus(), env=os.environ)
    except MegatuneError as error:
        raise MegatuneError([*loaded.findings, *error.findings], error.exit_code) from None
