"""megatune train FILE.yaml, and megatune sft | pt | dpo | kto from flags."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.config.settings import Settings
    from megatune.launch.world import RankEnv, World
    from megatune.plan.run.preflight import Preflight
    from megatune.training.source import RunModel

_EPILOG = """Settings are LLaMA-Factory's keys. From a file, with changes to it:

    megatune train run.yaml learning_rate=1e-5 output_dir=out/second

From flags:

    megatune sft --model_name_or_path Qwen3-0.6B --dataset my.jsonl --output_dir out/first

`megatune explain KEY` explains a setting, `megatune explain FILE.yaml` a whole file; docs/settings.md has all of them.
Started by torchrun, the command joins its processes; otherwise it starts its own: one for each GPU, or on a CPU as few
as the layout allows (num_processes)."""


def add_parser(subparsers: Any) -> None:
    """Add the verbs train, and sft, pt, dpo, kto and rm."""
    for verb, stage, text in (
        ("train", None, "train a model as a YAML file says"),
        ("sft", "sft", "supervised fine-tuning, from flags"),
        ("pt", "pt", "continued pretraining on plain text, from flags"),
        ("dpo", "dpo", "preference training on pairs of answers, from flags"),
        ("kto", "kto", "preference training on answers that are wanted or not, from flags"),
        ("rm", "rm", "a reward model from pairs of answers, from flags"),
    ):
        parser = subparsers.add_parser(
            verb, help=text, description=text, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE.yaml key=value --key value")
        parser.set_defaults(run=run, stage=stage)


def run(args: argparse.Namespace) -> int:
    """Read the settings, and start what they say.

    Raises:
        MegatuneError: whatever is wrong, all of it, before any process starts.
    """
    from megatune.config.dialects.roll import is_rl_file
    from megatune.config.entry import split_arguments
    from megatune.config.load import load

    words = split_arguments(args.words)
    if words.source is not None and is_rl_file(words.source):
        what = f"{words.source} describes reinforcement learning: it has roles"
        raise MegatuneError(Finding(what, fix=f"megatune rl {words.source}"), ExitCode.SETTINGS)
    return start(load(words.source, words.overrides, [*words.flags, *(("--stage", args.stage) if args.stage else ())]))


def start(loaded: Loaded, lines: Callable[[Loaded], list[str]] = lambda loaded: []) -> int:
    """Decide the world of settings that are read, start the ranks or join torchrun's.

    Args:
        lines: says of valid settings, in their world, what the user is told first.

    Raises:
        MegatuneError: whatever is wrong, all of it, before any process starts.
    """
    from megatune.cli.secrets import use_secrets
    from megatune.config.load import dump
    from megatune.launch.context import log_path
    from megatune.launch.devices import count_gpus
    from megatune.launch.output import outlive_reader
    from megatune.launch.rank_main import run_joined
    from megatune.launch.supervisor import HANG_SECONDS, run_ranks
    from megatune.launch.world import joined
    from megatune.plan.run.preflight import PLAN
    from megatune.plan.run.trouble import ran_out_of_memory
    from megatune.training.before import check_before
    from megatune.training.rerun import rerun_lines
    from megatune.training.restarts import check_restarts, run_restarting
    from megatune.training.source import RunModel
    from megatune.training.storage.files import OutputLock
    from megatune.training.trackers import check_installed

    began = time.monotonic()
    use_secrets(loaded.secrets)
    place = joined(os.environ)
    num_gpus = count_gpus()
    world, problems = (None, ()) if place else _decide_world(loaded.settings, num_gpus)
    here = place or world
    loaded = loaded.for_world(here.world_size if here else None)
    model = RunModel(loaded.settings, asks=place is None or place.local_rank == 0)
    # One process of the whole run holds the folder: the first machine's, or rank 0 under torchrun.
    first = place.rank == 0 if place else world is None or world.node_rank == 0
    before = check_before(loaded.settings, loaded.invalid, first=first, world_size=here.world_size if here else None)
    checked = _preflight(loaded, here, num_gpus, problems, model, before.errors, first=first)
    check_installed(loaded.settings)
    check_restarts(loaded.settings, is_joined=place is not None, nnodes=world.nnodes if world else 1)
    settings = model.settings.model_copy(
        update={"finetuning": checked.settings.finetuning, "experts": checked.settings.experts}
    )
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    if settings.checkpoint.push_to_hub and first:
        settings = _with_repository(settings)
    run_yaml = dump(settings, {**checked.origins, **model.origins})
    payload = {
        "settings": settings,
        "run_yaml": run_yaml,
        "case": checked.planned.case if checked.planned else None,
        "asked": loaded.without_secrets,
        "began": began,
        "plan": [line for line in checked.lines if line.startswith(PLAN)],
    }
    target, run_dir, stop_file = "megatune.training.run:train", output_dir / "launch", output_dir / "STOP"
    outlive_reader(log_path(run_dir.absolute(), f"rank-{place.rank if place else 0}"))
    noted = [line for line in checked.lines if not line.startswith(PLAN)]  # ranks report the plan for the rows
    if first and (said := [*lines(loaded), *noted, *before.lines, *rerun_lines(settings, run_yaml)]):
        print("\n".join(said), flush=True)
    why = "says which part was larger than planned, and what helps" if checked.planned else "says what it held"
    advice = f"megatune: `megatune explain {output_dir}` {why}"
    with OutputLock(output_dir) if first else contextlib.nullcontext():
        if first:  # the last run's; whoever asks how this one ended must not be told of that
            (run_dir / "report.json").unlink(missing_ok=True)
        if place is not None:
            return run_joined(target, payload, place, run_dir, stop_file=stop_file, out_of_memory_advice=advice)
        assert world is not None, "its findings ended the preflight"
        if world.nnodes == 1:  # of several machines none may wait in vain for one that fetches: their ranks fetch
            payload["model_dir"] = model.fetch()
        # Files in the wild set ddp_timeout to years; a rank that shows no step for half an hour hangs all the same.
        hang_timeout = min(settings.run.ddp_timeout, HANG_SECONDS)

        def run_once(now: Settings) -> int:
            started = {**payload, "settings": now}
            return run_ranks(target, started, world, run_dir, hang_timeout=hang_timeout, stop_file=stop_file)

        code = run_restarting(run_once, settings, run_dir, stop_file)
    if code == ExitCode.OUT_OF_MEMORY and first and ran_out_of_memory(output_dir):
        print(_diagnosis(output_dir) or advice, file=sys.stderr)
    return code


def _diagnosis(output_dir: Path) -> str:
    """Return what `megatune explain OUTPUT` says of memory beyond how the run ended; "" where nothing was planned."""
    from megatune.plan.run.trouble import diagnose

    with contextlib.suppress(MegatuneError):
        _, *lines = diagnose(output_dir)
        return "\n".join([f"megatune: `megatune explain {output_dir}`:", *lines])
    return ""


def _preflight(
    loaded: Loaded,
    place: RankEnv | World | None,
    num_gpus: int,
    problems: tuple[Finding, ...],
    model: RunModel,
    errors: Sequence[MegatuneError],
    *,
    first: bool,
) -> Preflight:
    """Return everything that can be known before a process is started.

    Args:
        place: this process's, or this machine's; None where `problems` say why there is none.
        num_gpus: of this machine.
        errors: what is wrong with data, weights and folders, reported with everything else.
        first: whether this process writes output_dir.

    Raises:
        MegatuneError: SETTINGS, what a hub refuses the model with, or else with the least code of the errors.
    """
    try:
        checked = _held_against_machine(loaded, place, num_gpus, problems, model)
        if first and checked.architecture is not None:
            from megatune.training.room import check_room

            check_room(checked.settings, checked.architecture)
    except MegatuneError as error:
        errors = [error, *errors]
    if errors:
        findings = dict.fromkeys(finding for error in errors for finding in error.findings)
        raise MegatuneError(findings, min(error.exit_code for error in errors))
    return checked


def _held_against_machine(
    loaded: Loaded, place: RankEnv | World | None, num_gpus: int, problems: tuple[Finding, ...], model: RunModel
) -> Preflight:
    from megatune.cli.this_machine import this_machine
    from megatune.launch.world import World
    from megatune.plan.run.preflight import preflight

    if place is None or loaded.settings.run.memory_check == "off":
        return preflight(loaded, place.world_size if place else None, problems, model_dir=model.config_dir)
    local = place.nproc_per_node if isinstance(place, World) else place.local_world_size
    machine, unknown = this_machine(local, num_gpus)
    idle = max(0, num_gpus - local)
    checked = preflight(
        loaded, place.world_size, problems, machine, idle_gpus=idle, rows_follow=True, model_dir=model.config_dir
    )
    return replace(checked, lines=(*checked.lines, f"plan       none: {unknown}")) if unknown else checked


def _with_repository(settings: Settings) -> Settings:
    """Return the settings with the repository to push to, which is there and may be written, as far as its hub says.

    Raises:
        MegatuneError: INPUT, where the hub refuses.
    """
    from megatune.hub.repository import use_modelscope
    from megatune.hub.upload import prepare_repository

    checkpoint, output_dir = settings.checkpoint, settings.run.output_dir
    name = checkpoint.hub_model_id or Path(output_dir or "").absolute().name
    repo_id, note = prepare_repository("ms" if use_modelscope() else "hf", name, checkpoint.hub_private_repo)
    if note:
        print(f"warning: {note}", file=sys.stderr)
    return settings.model_copy(update={"checkpoint": checkpoint.model_copy(update={"hub_model_id": repo_id})})


def _decide_world(settings: Settings, num_gpus: int) -> tuple[World | None, tuple[Finding, ...]]:
    """Return the world to start, or what contradicts."""
    from megatune.launch.world import decide_world

    size = settings.parallel.smallest_world
    try:
        world = decide_world(size, num_processes=settings.run.num_processes, num_devices=num_gpus, env=os.environ)
    except MegatuneError as error:
        return None, error.findings
    return world, ()
