"""A run of reinforcement learning, from its settings to the final model, and the lines that it prints at the start."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megatune.config.rl.rollout import PromptData
from megatune.config.rl.settings import REWARD_MODEL, UNSCORED, ModelRole, RewardRole, RLSettings
from megatune.config.values import ranges
from megatune.data.encode import load_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.generation.inputs import has_tokenizer
from megatune.launch.torchrun import handle_stop_signals
from megatune.progress import say
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.media import check_images, vision_of
from megatune.rl.pipeline.driver import Driver
from megatune.rl.pipeline.files import Progress, fixed_settings, read_progress
from megatune.rl.pipeline.report import Reports
from megatune.rl.pipeline.scores import check_scored
from megatune.rl.pipeline.startup import Roles, check_resume, load_roles, start_roles, with_folders
from megatune.rl.problems import Problems, read_problems
from megatune.rl.rewards.code.sandbox import best_isolation
from megatune.rl.rewards.judge_client import judge_clients
from megatune.rl.rewards.pool import RewardPool
from megatune.training.callbacks.base import TrainSummary
from megatune.training.conversion import merge_run
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import OutputLock, write_atomically, writing
from megatune.training.storage.store import clean_partials, finalize_model
from megatune.training.trackers import check_installed

_BYTES_PER_TOKEN = 64  # in transfer: id, log-probabilities, advantage, return, value, masks and weights


def start(settings: RLSettings, run_yaml: str) -> int:
    """Run to the end, or until a stop is requested.

    Args:
        run_yaml: the text of OUTPUT/run.yaml.

    Returns:
        DONE, or STOPPED.

    Raises:
        MegatuneError: the run cannot start or continue, with its exit code.
    """
    output_dir = Path(settings.run.output_dir)
    check_installed(settings.actor_train.settings)
    stop_file = output_dir / "STOP"
    with OutputLock(output_dir), watch_for_stop(stop_file) as stop:
        with writing(output_dir):
            clean_partials(output_dir)
            write_atomically(output_dir / "run.yaml", run_yaml)
            stop_file.unlink(missing_ok=True)
        check_resume(settings)
        settings, source = with_folders(settings)
        problems, validation = _read_all_problems(settings, source)
        say("\n".join([*start_lines(settings), *problems.notes]))
        run = settings.run
        with Cluster(
            output_dir / "launch",
            {device for role in (*settings.models, *settings.samplers) for device in role.devices},
            devices_per_node=run.num_gpus_per_node,
            bytes_in_flight=settings.samples_per_step * settings.rollout.max_sequence_length * _BYTES_PER_TOKEN,
            call_limit=run.rpc_timeout,
            timeline=output_dir / "profile" / "timeline.json" if run.profiler_timeline else None,
        ) as cluster:
            pool, roles = cluster.reward_pool(settings.rewards), start_roles(cluster, settings)
            return drive(settings, source, problems, validation, roles, pool, stop, cluster.note)


def drive(
    settings: RLSettings,
    source: Path,
    problems: Problems,
    validation: Problems | None,
    roles: Roles,
    pool: RewardPool,
    stop_requested: Callable[[], bool] = lambda: False,
    note: Callable[[str, int], None] = lambda phase, step: None,
) -> int:
    """Load the models of roles that have started, and run all steps; see `start`.

    Args:
        source: the folder of the initial policy.
        stop_requested, note: see `Driver`.
    """
    output_dir = Path(settings.run.output_dir)
    pool.clients |= judge_clients(settings, roles.judges)
    scheduler = roles.scheduler
    checkpoint, notes = load_roles(roles, scheduler, settings)
    fixed = fixed_settings(settings, problems.by_domain)
    progress = Progress(fixed=fixed) if checkpoint is None else read_progress(checkpoint, fixed)
    print("\n".join(notes), end="\n" if notes else "", flush=True)
    reports = Reports(settings, load_architecture(source), output_dir / "launch" / "logs", progress.step)
    driver = Driver(
        settings, source, problems, validation, roles, scheduler, pool, reports, progress, stop_requested, note
    )
    outcome = _run_with_callbacks(driver, reports, settings)
    roles.close()
    if outcome == "stopped":
        how = "" if settings.run.resume_from_checkpoint is True else " with resume_from_checkpoint=true"
        print(f"stopped on request after step {progress.step}; the same command{how} resumes from there", flush=True)
        return ExitCode.STOPPED
    finalize_model(output_dir / f"checkpoint-{progress.step}", output_dir)
    trained = settings.actor_train.settings
    what = "adapter" if trained.finetuning.finetuning_type == "lora" else "model"
    print(f"the {what} is in {output_dir}", flush=True)
    if trained.checkpoint.merge_lora:
        print(merge_run(trained, source, output_dir), flush=True)
    return ExitCode.DONE


def _run_with_callbacks(driver: Driver, reports: Reports, settings: RLSettings) -> str:
    """Run the steps, and call the callbacks at the beginning and at any end."""
    run, began = settings.run, time.monotonic()
    schedule = RunSchedule(settings.samples_per_step, None, run.max_steps, run.save_steps, run.eval_steps)
    reports.callbacks.on_train_begin(schedule)
    outcome: Any = "failed"
    try:
        outcome = driver.run()
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        step, seconds = driver.progress.step, time.monotonic() - began
        summary = TrainSummary(outcome=outcome, step=step, total_steps=run.max_steps, seconds=seconds)
        reports.callbacks.on_train_end(summary)
    return str(outcome)


def _read_all_problems(settings: RLSettings, source: Path) -> tuple[Problems, Problems | None]:
    """Read the problems of training and validation, with prompts for the model of a folder."""
    rollout, algorithm = settings.rollout, settings.algorithm
    found = _problems(
        settings,
        source,
        settings.data,
        rollout.prompt_length,
        dataset_filter=rollout.dataset_filter,
        needs_difficulty=algorithm.difficulty_loss_weight,
        needs_answers=algorithm.distils and algorithm.opd_lmbda < 1,
    )
    _check_teachers(settings, source)
    return found, read_validation(settings, source)


def _check_teachers(settings: RLSettings, source: Path) -> None:
    """Refuse teachers with another vocabulary than the policy's.

    Raises:
        MegatuneError: INPUT, naming a token that differs.
    """
    taught, own = settings.actor_train.teacher, load_tokenizer(source).get_vocab()
    inside = {} if taught is None else {"teacher": taught}
    for name, engine in {**inside, **{each.name: each.settings for each in settings.teachers.values()}}.items():
        folder = Path(engine.model.model_name_or_path or "")
        known = load_tokenizer(folder).get_vocab() if has_tokenizer(folder) else own
        theirs = {number: token for token, number in known.items()}
        for number, token in sorted((number, token) for token, number in own.items()):
            if (other := theirs.get(number, token)) != token:
                what, fix = f"{name} has another tokenizer than the policy", "take a teacher of the policy's family"
                why = f"token {number:,} of the policy is {token!r}, and of the teacher {other!r}"
                raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)


def read_validation(settings: RLSettings, source: Path) -> Problems | None:
    """Read the problems of validation; return None if the settings have none.

    Args:
        source: the folder of the model that gets the prompts.

    Raises:
        MegatuneError: as `read_problems` and `check_images`.
    """
    rollout, validation = settings.rollout, settings.validation
    if validation is None:
        return None
    return _problems(settings, source, validation.data_args, rollout.val_prompt_length or rollout.prompt_length)


def _problems(settings: RLSettings, source: Path, data: PromptData, length: int, **rows: Any) -> Problems:
    """Read problems whose prompts have at most `length` tokens; `rows` is passed to `read_problems`."""
    tokenizer, rollout = load_tokenizer(source), settings.rollout
    rows |= {"template": rollout.global_template, "tag_to_template": rollout.tag_to_template}
    vision = vision_of(source, tokenizer, data)
    found = read_problems(data, settings.rewards, tokenizer, length, vision=vision, **rows)
    check_images(settings, found.all())
    check_scored(settings, found.all(), tokenizer)
    return found


@contextmanager
def watch_for_stop(stop_file: Path) -> Iterator[Any]:
    """Yield a function that returns whether a stop was requested: by SIGTERM, by SIGHUP (a closed terminal without
    `nohup`), or by the file. A second SIGTERM ends the run at once, as Ctrl-C does; a second SIGHUP does not, because a
    terminal that is closed may send several."""
    requested = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested and number == signal.SIGTERM:
            raise KeyboardInterrupt
        requested = True

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handle_stop_signals(note)
    try:
        yield lambda: requested or stop_file.exists()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_lines(settings: RLSettings) -> list[str]:
    """Return the lines about a step, the roles, and the sampling that a run prints at its start."""
    generating, rollout, infer = settings.actor_infer.generating_args, settings.rollout, settings.actor_infer
    ahead = rollout.async_generation_ratio
    phases = f"rollouts run up to {ahead:g} steps ahead" if ahead else "one phase after the other"
    step = f"{rollout.rollout_batch_size} prompts x {rollout.num_return_sequences_in_group} responses"
    return [
        f"run        {settings.run.exp_name}: {settings.run.max_steps} steps of {step}, {phases}",
        *(_line(role) for role in settings.models),
        f"role       actor_infer: {infer.engine}, {infer.num_engines} engines on devices {ranges(infer.devices)}",
        *(
            f"role       rewards.{name}: {reward_line(role)}"
            for name, role in settings.rewards.items()
            if role.kind not in (UNSCORED, REWARD_MODEL)
        ),
        f"sampling   temperature {generating.temperature:g}, top_p {generating.top_p:g}, top_k {generating.top_k}"
        + _truncation(settings),
    ]


def reward_line(role: RewardRole) -> str:
    """Describe the reward of a domain, and the isolation of a model's programs on this machine."""
    name = f"{role.kind} {role.function}" if role.function else role.kind
    said = f"{name}, {role.workers} processes"
    if role.kind != "code_sandbox" or role.arguments.get("use_local") is False:
        return said
    return f"{said}; programs run here: {best_isolation().text} (docs/rl-rewards.md: no security boundary)"


def _truncation(settings: RLSettings) -> str:
    """Describe how log-probabilities treat tokens that top_p and top_k exclude."""
    generating, algorithm = settings.actor_infer.generating_args, settings.algorithm
    said = "; log-probabilities are at this temperature"
    if generating.top_p >= 1 and generating.top_k <= 0:
        return said
    corrected = algorithm.train_infer_correction.corrects
    bounded = "train_infer_correction bounds" if corrected else "nothing bounds (train_infer_correction would)"
    return f"{said}, before top_p and top_k on both sides; {bounded} what sampling leaves out"


def _line(role: ModelRole) -> str:
    parallel = role.settings.parallel
    layout = f"tp {parallel.tensor_model_parallel_size}, pp {parallel.pipeline_model_parallel_size}"
    said = f"role       {role.name}: megatron, {layout}, on devices {ranges(role.devices)}"
    return said if role.teacher is None else f"{said}, with its teacher {role.teacher.model.model_name_or_path}"
