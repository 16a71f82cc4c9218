"""megatune train FILE.yaml, and megatune sft | pt from flags."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.settings import Settings
    from megatune.launch.world import World

_EPILOG = """Settings are LLaMA-Factory's keys. From a file, with changes to it:

    megatune train run.yaml learning_rate=1e-5 output_dir=out/second

From flags:

    megatune sft --model_name_or_path Qwen3-0.6B --dataset my.jsonl --output_dir out/first

Every setting is explained in docs/settings.md. Started by torchrun, the command joins its processes; otherwise it
starts its own: one for each GPU, or on a CPU as few as the layout allows (num_processes)."""


def add_parser(subparsers: Any) -> None:
    """Add the verbs train, sft and pt."""
    for verb, stage, text in (
        ("train", None, "train a model as a YAML file says"),
        ("sft", "sft", "supervised fine-tuning, from flags"),
        ("pt", "pt", "continued pretraining on plain text, from flags"),
    ):
        parser = subparsers.add_parser(
            verb, help=text, description=text, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE.yaml key=value --key value")
        parser.set_defaults(run=run, stage=stage)


def run(args: argparse.Namespace) -> int:
    """Read the settings, decide the world, start the ranks or join torchrun's.

    Raises:
        MegatuneError: whatever is wrong, all of it, before any process starts.
    """
    from megatune.config.arguments import split_arguments
    from megatune.config.load import load
    from megatune.config.resolved import dump
    from megatune.launch.rank_main import run_joined
    from megatune.launch.supervisor import HANG_SECONDS, run_ranks
    from megatune.launch.world import joined
    from megatune.plan.preflight import preflight
    from megatune.training.storage import OutputLock

    words = split_arguments(args.words)
    loaded = load(words.source, words.overrides, [*words.flags, *(("--stage", args.stage) if args.stage else ())])
    place = joined(os.environ)
    world, problems = (None, ()) if place else _decide_world(loaded.settings)
    whole = place or world
    settings = preflight(loaded, whole.world_size if whole else None, problems)
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    payload = {"settings": settings, "run_yaml": dump(settings, loaded.origins)}
    target, run_dir, stop_file = "megatune.training.run:train", output_dir / "launch", output_dir / "STOP"
    # One process of the whole run holds the folder: the first machine's, or rank 0 under torchrun.
    first = place.rank == 0 if place else world is not None and world.node_rank == 0
    with OutputLock(output_dir) if first else contextlib.nullcontext():
        if place is not None:
            return run_joined(target, payload, place, run_dir, stop_file=stop_file)
        assert world is not None, "its findings ended the preflight"
        # Files in the wild set ddp_timeout to years; a rank that shows no step for half an hour hangs all the same.
        hang_timeout = min(settings.run.ddp_timeout, HANG_SECONDS)
        return run_ranks(target, payload, world, run_dir, hang_timeout=hang_timeout, stop_file=stop_file)


def _decide_world(settings: Settings) -> tuple[World | None, tuple[Finding, ...]]:
    """The world to start, or what contradicts."""
    from megatune.launch.devices import count_gpus
    from megatune.launch.world import decide_world

    size = settings.parallel.smallest_world
    try:
        world = decide_world(size, num_processes=settings.run.num_processes, num_devices=count_gpus(), env=os.environ)
    except MegatuneError as error:
        return None, error.findings
    return world, ()
