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

_STANDALONE = ("run.num_processes", "run.ddp_timeout")  # settings that have an effect without a settings file


class DoctorOptions(Group):
    """The options of `megatune doctor`."""

    json_: bool = False
    """print JSON"""


COMMAND = Command(
    name="doctor",
    usage="[FILE.yaml] [key=value ...] [--json]",
    about="Checks whether machines are ready for a run, and reports the consequence and the fix of each problem: "
    "versions, memory and limits, GPUs, disks, host names and ports, environment variables; then starts the ranks, "
    "which measure clocks, a shared output_dir, and the speed of each rank and link. Exits with 0, or with 69 if a "
    "check fails.",
    epilog="""With a settings file it checks the ranks, checkpoints, data workers and hub of the run. On several
machines, start it on each of them like the run: with NNODES, NODE_RANK and MASTER_ADDR, or with
torchrun --no-python ... megatune doctor FILE.yaml. num_processes=N starts N ranks.""",
    options=DoctorOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Check the machines and print the results.

    Returns:
        DONE, or UNAVAILABLE if a check failed.

    Raises:
        MegatuneError: SETTINGS if the number of ranks cannot be decided; UNAVAILABLE if the rendezvous fails.
    """
    from megatune.doctor.check import as_json, has_failed, pages
    from megatune.doctor.run import check_joined, check_started, needs_of
    from megatune.launch.world import World, torchrun_env
    from megatune.pages import show_pages

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
        print(as_json(checks), flush=True) if given.options.json_ else show_pages(pages(checks))
    return int(ExitCode.UNAVAILABLE if has_failed(checks) else ExitCode.DONE)


def _without_part(loaded: Loaded) -> Iterator[Finding]:
    """Yield findings for settings that have no effect without a settings file."""
    for path, entry in loaded.written.items():
        if path not in _STANDALONE:
            why = "without a settings file there is no run to check"
            yield Finding(f"{entry.key} has no effect here", entry.where, why, "name the file of the run first")


def _world(loaded: Loaded) -> World:
    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    processes, size = loaded.settings.run.num_processes, loaded.settings.parallel.smallest_world
    try:
        return decide_world(size, num_processes=processes, num_devices=count_gpus(), env=os.environ)
    except MegatuneError as error:
        raise MegatuneError([*loaded.findings, *map(loaded.phrased, error.findings)], error.exit_code) from None
