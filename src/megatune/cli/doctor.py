"""`megatune doctor`: looks at machines before a run: software, memory, GPUs, disks, network, and all ranks together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.launch.world import World

_ALONE = ("run.num_processes", "run.ddp_timeout")  # what is heeded without a settings file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at machines before a run: versions, GPUs, disks, network, speed of ranks",
        usage="megatune doctor [--json] [FILE.yaml] [key=value ...]",
        description="Looks at what a run needs of its machines, and says of what is wrong what it leads to and what "
        "mends it: versions, memory and limits, GPUs, disks, names and ports, variables; then starts the ranks, which "
        "measure clocks, a shared output_dir, each one's speed and each link's. Ends with 0, or 69 if a check fails.",
        epilog="With a settings file it is that run's ranks, checkpoints, data workers and hub. On several machines "
        "start it on each, as the run: with NNODES, NODE_RANK and MASTER_ADDR, or by torchrun --no-python ... megatune "
        "doctor FILE.yaml. num_processes=N asks for N ranks.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("settings", nargs="*", metavar="FILE.yaml key=value", help="settings of a run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look and print.

    Returns:
        DONE, or UNAVAILABLE where a check failed.

    Raises:
        MegatuneError: SETTINGS, where ranks cannot be decided; UNAVAILABLE, where they do not meet.
    """
    from megatune.config.entry import split_arguments
    from megatune.config.load import load
    from megatune.doctor.needs import needs_of
    from megatune.doctor.report import as_json, has_failed, lines
    from megatune.doctor.run import look_joined, look_started
    from megatune.launch.world import World, joined

    words = split_arguments(args.settings)
    loaded = load(words.source, words.overrides, words.flags)
    if words.source is None and (findings := [*loaded.findings, *_without_part(loaded)]):
        raise MegatuneError(findings, ExitCode.SETTINGS)
    here = joined(os.environ) or _world(loaded)
    loaded = loaded.for_world(here.world_size)
    needs = needs_of(loaded, here.world_size, whole=words.source is not None)
    checks = look_started(needs, here) if isinstance(here, World) else look_joined(needs, here)
    if isinstance(here, World) or here.rank == 0:
        print(as_json(checks) if args.json else "\n".join(lines(checks)), flush=True)
    return int(ExitCode.UNAVAILABLE if has_failed(checks) else ExitCode.DONE)


def _without_part(loaded: Loaded) -> Iterator[Finding]:
    """Settings that say nothing unless the others of their run are there."""
    for path, entry in loaded.written.items():
        if path not in _ALONE:
            why = "without a settings file there is no run to look at"
            yield Finding(f"{entry.key} has no part here", entry.where, why, "name the file of the run first")


def _world(loaded: Loaded) -> World:
    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    processes, size = loaded.settings.run.num_processes, loaded.settings.parallel.smallest_world
    try:
        return decide_world(size, num_processes=processes, num_devices=count_gpus(), env=os.environ)
    except MegatuneError as error:
        raise MegatuneError([*loaded.findings, *error.findings], error.exit_code) from None
