"""Starts a run: runs all checks, then starts its ranks, or joins those of torchrun.

All findings are reported together. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatune.config.derived import with_device_defaults
from megatune.config.load import Loaded, dump
from megatune.config.settings import Settings, with_settings
from megatune.data.check import Checked
from megatune.errors import ExitCode, Finding, MegatuneError, in_order
from megatune.launch.devices import count_gpus
from megatune.launch.world import RankEnv, World, decide_world, torchrun_env
from megatune.plan.run.preflight import PLAN, Preflight, preflight
from megatune.progress import say
from megatune.training.checks import check_disk_space, check_files
from megatune.training.planning import this_gpu, this_machine
from megatune.training.restarts import check_restarts, run_restarting
from megatune.training.source import RunModel
from megatune.training.storage.files import OutputLock
from megatune.training.trackers import check_installed
from megatune.training.train_state import rerun_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run that this process is about to start.

    Attributes:
        loaded: the settings, resolved for the world size if it is known.
        rank_env: this process's rank if torchrun started it, else None.
        world: the ranks to start; None under torchrun, and if `problems` prevent one.
        num_gpus: GPUs of this machine.
        first: whether this process writes output_dir (on the first machine, or rank 0 under torchrun).
        lines: notes on defaults that depend on the GPUs.
    """

    loaded: Loaded
    rank_env: RankEnv | None
    world: World | None
    problems: tuple[Finding, ...]
    num_gpus: int
    model: RunModel
    first: bool
    lines: Sequence[str] = ()

    @staticmethod
    def of(loaded: Loaded, env: Mapping[str, str] = os.environ) -> Launch:
        """Decide the world of a run; contradictions become `problems`."""
        rank_env, num_gpus, settings = torchrun_env(env), count_gpus(env), loaded.settings
        world, problems = None, tuple[Finding, ...]()
        if rank_env is None:
            asked = settings.run.num_processes
            # If num_processes is set, a rule of the settings checks what it must be a multiple of, and names the sizes.
            smallest = settings.parallel.smallest_world if asked is None else 1
            try:
                world = decide_world(smallest, num_processes=asked, num_devices=num_gpus, env=env)
            except MegatuneError as error:
                problems = tuple(map(loaded.phrased, error.findings))
        here = rank_env or world
        world_size = here.world_size if here else None
        loaded, lines = loaded.for_world(world_size), list[str]()
        if num_gpus:
            loaded, lines = with_device_defaults(loaded, this_gpu(env), world_size)
        return Launch(
            loaded=loaded,
            rank_env=rank_env,
            world=world,
            problems=problems,
            num_gpus=num_gpus,
            model=RunModel(loaded.settings, asks=rank_env is None or rank_env.local_rank == 0),
            first=rank_env.rank == 0 if rank_env else world is None or world.node_rank == 0,
            lines=lines,
        )

    @property
    def world_size(self) -> int | None:
        here = self.rank_env or self.world
        return here.world_size if here else None


@dataclass(slots=True)
class Outcome(Checked):
    """Results of the checks: errors, lines for the user, and the plan."""

    plan: Preflight = field(kw_only=True)


def _check_plan(launch: Launch, found: Outcome) -> None:
    """Check the settings against the model, the world and this machine, and the disk space for its checkpoints."""
    loaded, here = launch.loaded, launch.rank_env or launch.world
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
        check_disk_space(checked.settings, checked.architecture)


def _check_files(launch: Launch, found: Outcome) -> None:
    """Check data, template, weights, folders and an earlier run."""
    loaded = launch.loaded
    checked = check_files(loaded.settings, loaded.invalid, first=launch.first, world_size=launch.world_size)
    found.errors += checked.errors
    found.lines += checked.lines


def check_all(launch: Launch) -> Outcome:
    """Run every check.

    Raises:
        MegatuneError: the findings of all checks, with the lowest of their exit codes.
    """
    settings, nnodes = launch.loaded.settings, launch.world.nnodes if launch.world else 1
    found = Outcome(plan=Preflight(settings=settings))
    found.run(lambda: _check_plan(launch, found))
    found.run(lambda: _check_files(launch, found))
    found.run(lambda: check_installed(settings))
    found.run(lambda: check_restarts(settings, is_joined=launch.rank_env is not None, nnodes=nnodes))
    if found.errors:
        loaded = launch.loaded
        findings = {loaded.phrased(loaded.placed(each)): None for error in found.errors for each in error.findings}
        raise MegatuneError(in_order(findings), min(error.exit_code for error in found.errors))
    return found


def start(loaded: Loaded, lines: Callable[[Loaded], list[str]] = lambda loaded: []) -> int:
    """Check a run, start its ranks or join torchrun's, and return the exit code.

    Args:
        lines: returns the lines to print first, given valid settings.

    Raises:
        MegatuneError: all findings, before any process starts.
    """
    from megatune.launch.context import log_path
    from megatune.launch.output import divert_lost_output
    from megatune.launch.rank_main import run_under_torchrun
    from megatune.launch.supervisor import HANG_SECONDS, run_ranks

    began = time.monotonic()
    use_secrets(loaded.secrets)
    prepare_devices(os.environ, use_cpu=loaded.settings.run.use_cpu)
    launch = Launch.of(loaded)
    found = check_all(launch)
    loaded, rank_env, world, model, plan = launch.loaded, launch.rank_env, launch.world, launch.model, found.plan
    of_model = {"finetuning": plan.settings.finetuning, "experts": plan.settings.experts}
    settings = model.settings.model_copy(update=of_model)
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    if settings.checkpoint.push_to_hub and launch.first:
        settings = _with_repository(settings)
    run_yaml = dump(settings, {**plan.origins, **model.origins})
    payload = {
        "settings": settings,
        "run_yaml": run_yaml,
        "case": plan.planned.case if plan.planned else None,
        "asked": loaded.without_secrets,
        "began": began,
        "num_gpus": launch.num_gpus,
        "plan": [line for line in plan.lines if line.startswith(PLAN)],
    }
    target, run_dir, stop = "megatune.training.run:train", output_dir / "launch", output_dir / "STOP"
    divert_lost_output(log_path(run_dir.absolute(), f"rank-{rank_env.rank if rank_env else 0}"))
    noted = [*model.lines, *(f"device     {line}" for line in launch.lines)]
    noted += [line for line in plan.lines if not line.startswith(PLAN)]  # ranks report the plan for the rows
    if launch.first and (said := [*lines(loaded), *noted, *found.lines, *rerun_lines(settings, run_yaml)]):
        say("\n".join(said))
    why = "says which part was larger than planned, and what helps" if plan.planned else "says what it held"
    advice = f"megatune: `megatune explain {output_dir}` {why}"
    with OutputLock(output_dir) if launch.first else contextlib.nullcontext():
        if launch.first:  # the report of an earlier run
            (run_dir / "report.json").unlink(missing_ok=True)
        if rank_env is not None:
            return run_under_torchrun(target, payload, rank_env, run_dir, stop_file=stop, out_of_memory_advice=advice)
        assert world is not None, "its findings ended the checks"
        if world.nnodes == 1:  # with several machines, ranks download the model, so that no machine waits for another
            payload["model_dir"] = model.fetch()
        # Some published files set ddp_timeout to years; a rank without progress for half an hour hangs all the same.
        hang_timeout = min(settings.run.ddp_timeout, HANG_SECONDS)

        def run_once(now: Settings) -> int:
            started = {**payload, "settings": now}
            return run_ranks(target, started, world, run_dir, hang_timeout=hang_timeout, stop_file=stop)

        code = run_restarting(run_once, settings, run_dir, stop)
    if code == ExitCode.OUT_OF_MEMORY and launch.first and (diagnosis := _diagnosis(output_dir, advice)):
        print(diagnosis, file=sys.stderr)
    return code


def prepare_devices(env: MutableMapping[str, str], *, use_cpu: bool) -> None:
    """Set variables that CUDA and torch read when they start. Variables that the user set keep their values."""
    if use_cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & env.keys():
        # Rows of many lengths would fragment the GPU's memory.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _diagnosis(output_dir: Path, advice: str) -> str:
    """Return the report of `megatune explain OUTPUT` on memory: the advice if there was no plan, "" if memory was not
    the cause."""
    from megatune.plan.run.trouble import diagnose, ran_out_of_memory

    if not ran_out_of_memory(output_dir):
        return ""
    with contextlib.suppress(MegatuneError):
        _, *lines = diagnose(output_dir)
        return "\n".join([f"megatune: `megatune explain {output_dir}`:", *lines])
    return advice


def _with_repository(settings: Settings) -> Settings:
    """Create the repository to push to if needed, and return the settings with its id.

    Raises:
        MegatuneError: INPUT, if the hub refuses.
    """
    from megatune.hub.repository import use_modelscope
    from megatune.hub.upload import prepare_repository

    checkpoint, output_dir = settings.checkpoint, settings.run.output_dir
    name = checkpoint.hub_model_id or Path(output_dir or "").absolute().name
    repo_id, note = prepare_repository("ms" if use_modelscope() else "hf", name, checkpoint.hub_private_repo)
    if note:
        print(f"warning: {note}", file=sys.stderr)
    return with_settings(settings, {"checkpoint.hub_model_id": repo_id})


def use_secrets(secrets: Mapping[str, str]) -> None:
    """Move secrets, by "group.name", from this process's arguments into its environment, overriding variables."""
    from megatune.hub.repository import use_modelscope
    from megatune.hub.upload import TOKEN_VARIABLES

    variables = {
        "checkpoint.hub_token": TOKEN_VARIABLES["ms" if use_modelscope() else "hf"],
        "logging.swanlab_api_key": "SWANLAB_API_KEY",
    }
    for path, secret in secrets.items():
        os.environ[variables[path]] = secret
        # Libraries that record the command line would record the secret.
        sys.argv = [word.replace(secret, "***") for word in sys.argv]
