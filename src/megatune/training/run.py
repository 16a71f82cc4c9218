"""The target function of every rank of a training run, from the rendezvous to the final model."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatune.bridge.assemble import LoadedModel, attach_optimizer, load_model
from megatune.config.derived import resolve_finetuning, with_model_defaults
from megatune.config.load import Loaded
from megatune.config.settings import Settings, counted_steps, with_settings
from megatune.data.encode import load_tokenizer, padding_token
from megatune.data.vision import load_vision_input
from megatune.engine import device, groups
from megatune.engine.collectives import recent_operations, remember_groups
from megatune.engine.groups import RankCoordinates, build
from megatune.errors import ExitCode, Finding
from megatune.families import load_architecture
from megatune.launch.context import RankContext
from megatune.objectives.choose import make_objective
from megatune.plan.case import Case
from megatune.plan.run.preflight import Preflight
from megatune.plan.run.record import PLAN_NAME
from megatune.progress import say
from megatune.training.agreement import check_same_settings, model_on_node, on_rank_0
from megatune.training.answers import Answerer
from megatune.training.bad_steps import BadSteps
from megatune.training.banner import Start, banner, summary
from megatune.training.callbacks import CallbackList, build_callbacks
from megatune.training.callbacks.console import DETAILS_NAME
from megatune.training.callbacks.metrics import begin_record
from megatune.training.checkpoint import DamagedCheckpointError, check_continues, load_checkpoint
from megatune.training.checks import check_disk_space
from megatune.training.conversion import merge_run
from megatune.training.feed import Feed, ModelLimits, RunData, opened_data, with_template_date
from megatune.training.loaders import Loaders, loader_workers
from megatune.training.loop import Trainer
from megatune.training.measurements import MemoryLog, check_profiled_steps, memory_snapshot
from megatune.training.model_files import chat_template_notes
from megatune.training.planning import plan_rows
from megatune.training.reference import Reference, open_reference
from megatune.training.resume import choose_checkpoint, digest_base
from megatune.training.run_schedule import RunSchedule, TimeBudget
from megatune.training.storage.files import write_atomically, writing
from megatune.training.storage.store import CheckpointStore, clean_partials, finalize_model, remove_checkpoints
from megatune.training.train_state import TrainState, changes_of, later_checkpoints, read_state
from megatune.training.train_step import LearningRateSchedule

_JOIN_GRACE = 60.0  # seconds


def train(context: RankContext, payload: dict[str, Any]) -> int:
    """Run the target that `launch` starts in every rank.

    Args:
        payload: "settings", valid ones; "run_yaml", the text of OUTPUT/run.yaml; "case", the planned case, or None;
            "plan", lines on the plan; "num_gpus", visible GPUs of this machine; "asked", the user's settings without
            secrets; "model_dir", the folder into which the launcher downloaded the model, if it did; "began", the start
            of the run by `time.monotonic`.

    Returns:
        DONE or STOPPED.

    Raises:
        MegatuneError: any problem that prevents the run from starting or continuing, with its exit code.
    """
    settings: Settings = payload["settings"]
    # The rendezvous times out first and names what it waits for.
    context.beat("join", 0, limit=settings.run.ddp_timeout + _JOIN_GRACE)
    _silence_libraries()
    device.require_gpus(payload.get("num_gpus", 0))
    ranks, address = (context.rank, context.world_size, context.local_rank), (context.master_addr, context.master_port)
    local, announce = context.local_world_size, context.announce
    groups.join(*ranks, *address, timeout=settings.run.ddp_timeout, announce=announce, local_world_size=local)
    context.operations = recent_operations
    with groups.leaving():
        try:
            asked: Loaded = payload["asked"]
            check_same_settings(asked.settings)
            budget = TimeBudget(settings.run.exit_duration_in_mins if context.rank == 0 else None, payload["began"])
            given = payload["run_yaml"], payload["case"], asked, payload.get("model_dir")
            return _train(context, settings, *given, budget=budget, plan=payload["plan"])
        finally:
            remember_groups()


def _train(context: RankContext, settings: Settings, run_yaml: str, *args: Any, **options: Any) -> int:
    """Run `_train_from` the newest checkpoint; if loading shows that it is damaged, from the one before it."""
    damaged: dict[Path, Sequence[Finding]] = {}
    while True:
        try:
            return _train_from(damaged, context, settings, run_yaml, *args, **options)
        except DamagedCheckpointError as error:
            damaged[Path(error.findings[0].where)] = error.findings
        groups.destroy_model_parallel()
        groups.forget_keys()  # such as that of a stream, which is opened again


def _train_from(
    damaged: Mapping[Path, Sequence[Finding]],
    context: RankContext,
    settings: Settings,
    run_yaml: str,
    case: Case | None = None,
    asked: Loaded | None = None,
    model_dir: str | None = None,
    budget: TimeBudget | None = None,
    plan: Sequence[str] = (),
) -> int:
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    memory = MemoryLog(context.run_dir, context.rank)
    context.beat("tidy", 0, limit=float("inf"))
    on_rank_0(lambda: _open_output(output_dir), is_long=True)
    resumed, notes = choose_checkpoint(context, settings, output_dir, damaged)
    source = model_on_node(context, settings, model_dir, resumed)
    architecture = load_architecture(source, *settings.task)
    experts = settings.experts if asked is None else with_model_defaults(asked, architecture)[0].settings.experts
    finetuning = resolve_finetuning(settings.finetuning, architecture)
    updates = {"finetuning": finetuning, "experts": experts}
    settings = with_template_date(settings.model_copy(update=updates), resumed)
    try:
        with memory_snapshot(settings, context.rank), opened_data(context, settings, source, resumed) as data:
            planned: list[Preflight] = []

            def begin(schedule: RunSchedule) -> None:
                on_rank_0(lambda: check_disk_space(settings, architecture, schedule.total_steps))
                on_rank_0(lambda: planned.extend(_begin_output(settings, run_yaml, case, data, asked, resumed)))

            trainer = _build_trainer(context, settings, source, data, resumed, memory, begin)
            trainer.budget = budget or trainer.budget
            lines = [*plan, *(line for each in planned for line in each.lines), *notes]
            return _run(trainer, resumed, Start(asked, planned[0].planned if planned else None, lines))
    finally:
        memory.note()


def _open_output(output_dir: Path) -> None:
    """Create the output folder, and remove partial files that a killed run left in it."""
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        clean_partials(output_dir)


def _begin_output(
    settings: Settings, run_yaml: str, case: Case | None, data: RunData, asked: Loaded | None, resumed: Path | None
) -> list[Preflight]:
    """Write run.yaml and the plan, after all other checks, so that a refused run changes nothing.

    Returns:
        The plan for the actual rows, if there is one.

    Raises:
        MegatuneError: SETTINGS, if the run does not fit into memory with these rows; CANNOT_WRITE.
    """
    assert settings.run.output_dir is not None
    output_dir, state = Path(settings.run.output_dir), read_state(resumed) if resumed is not None else None
    later_checkpoints(settings, resumed, state.step if state is not None else 0)
    planned = []
    if case is not None and data.lengths is not None and data.media is not None:  # not streamed
        planned = [plan_rows(case, data.lengths, data.media, asked)]
        case = planned[0].planned.case if planned[0].planned is not None else case
    with writing(output_dir):
        write_atomically(output_dir / "run.yaml", run_yaml)
        if case is None:  # remove the plan of an earlier run
            (output_dir / PLAN_NAME).unlink(missing_ok=True)
        else:
            begin_record(output_dir, case, state.step if state is not None else 0)
    return planned


def _build_trainer(
    context: RankContext,
    settings: Settings,
    source: Path,
    data: RunData,
    resumed: Path | None,
    memory: MemoryLog,
    begin: Callable[[RunSchedule], None],
) -> Trainer:
    """Load model, optimizer and training state.

    Args:
        begin: called after all checks have passed, before anything is loaded.
    """
    assert settings.run.output_dir is not None
    store = CheckpointStore(Path(settings.run.output_dir))
    has_adapters = settings.finetuning.finetuning_type == "lora"
    base = digest_base(context, source, settings) if has_adapters else ""
    reference = open_reference(context, settings, source, base, resumed)
    coords = build(settings.parallel, seed=settings.run.seed, timeout=settings.run.ddp_timeout)
    schedule = RunSchedule.plan(settings, data.num_rows, coords.dp_size)
    check_profiled_steps(settings, schedule.total_steps)
    settings = with_settings(settings, counted_steps(settings, schedule.total_steps))
    digest = "" if reference is None else reference.digest
    state = TrainState(0, data.key, schedule.global_batch_size, settings.run.seed, base=base, reference=digest)
    state.rows_parts, (state.rope_scaling, state.new_tokens) = data.key_parts, changes_of(settings)
    if resumed is not None:
        check_continues(resumed, load_architecture(source, *settings.task), settings, state)
    feed, loaders, answerer = _open_rows(context, settings, source, data, schedule, coords, reference)
    begin(schedule)

    def load() -> LoadedModel:
        context.beat("load", 0, limit=settings.run.ddp_timeout)
        return load_model(source if has_adapters else resumed or source, settings, coords, adapter=resumed)

    feed, loaded = (feed, load()) if reference is None else reference.added(feed, loaders, load)
    assembly = attach_optimizer(loaded, settings)
    if resumed is not None:
        state = load_checkpoint(resumed, assembly, settings)
    return Trainer(
        settings=settings,
        assembly=assembly,
        objective=make_objective(settings),
        reference=reference,
        feed=feed,
        loaders=loaders,
        schedule=schedule,
        state=state,
        learning_rate=LearningRateSchedule.of(settings.optimizer, schedule.total_steps),
        bad_steps=BadSteps.begin(settings, state, feed.rows, store, source, resumed is not None),
        callbacks=_callbacks(context, settings, store.output_dir, state.step, feed, source),
        store=store,
        context=context,
        source=source,
        memory=memory,
        answerer=answerer,
    )


def _open_rows(
    context: RankContext,
    settings: Settings,
    source: Path,
    data: RunData,
    schedule: RunSchedule,
    coords: RankCoordinates,
    reference: Reference | None,
) -> tuple[Feed, Loaders, Answerer | None]:
    """Return the rows with their report, the data loaders, and the answerer if there is one."""
    models = [load_architecture(source), *([reference.architecture] if reference is not None else [])]
    limits = ModelLimits(*map(min, zip(*((m.vocab_size, m.max_position_embeddings) for m in models), strict=True)))
    feed, tokenizer = data.feed(schedule, limits), load_tokenizer(source)
    vision = load_vision_input(source, tokenizer, settings.data)
    num_workers, note = loader_workers(settings, context, vision is not None and feed.has_media)
    loaders = Loaders(settings, coords, padding_token(tokenizer), vision, num_workers)
    lines, warned, answerer = [] if note is None else [note], [], None
    if settings.generates:
        answerer = Answerer.open(settings, source, tokenizer, feed.evaluation, loaders, limits.positions)
        lines, warned = [*lines, answerer.line], answerer.left_out()
    if context.rank == 0:
        of_template = chat_template_notes(settings, tokenizer)
        lines, warned = [*lines, *of_template[0]], [*warned, *of_template[1]]
    feed = replace(feed, lines=[*feed.lines, *lines], warnings=[*feed.warnings, *warned])
    return feed, loaders, answerer


def _callbacks(
    context: RankContext, settings: Settings, output_dir: Path, step: int, feed: Feed, source: Path
) -> CallbackList:
    """Create the callbacks on rank 0; other ranks have none."""
    if context.rank != 0:
        return CallbackList()
    logs = context.run_dir / "logs"
    return build_callbacks(settings, output_dir, step, feed.quarantine, logs, source, context.stop_requested)


def _run(trainer: Trainer, resumed: Path | None, start: Start) -> int:
    settings, state, output_dir = trainer.settings, trainer.state, trainer.store.output_dir
    if trainer.context.rank == 0:
        say("\n".join(summary(trainer, resumed, start)))
        with writing(output_dir):
            write_atomically(output_dir / DETAILS_NAME, "\n".join([*start.lines, *banner(trainer, resumed), ""]))
    trainer.context.beat("tidy", state.step, limit=float("inf"))
    on_rank_0(lambda: remove_checkpoints(later_checkpoints(settings, resumed, state.step)), is_long=True)
    gc.collect()
    gc.freeze()  # objects of the start-up live to the end: exclude them from later collections
    device.synchronize()
    trainer.memory.note(stage=trainer.assembly.coords.pp_rank, loaded=device.memory_bytes())
    outcome = trainer.run()
    if trainer.context.rank == 0 and trainer.feed.follower is not None:
        say("\n".join(trainer.feed.follower.summary()))
    if outcome == "stopped":
        if trainer.context.rank == 0:
            minutes = settings.run.exit_duration_in_mins
            why = f"before exit_duration_in_mins ({minutes:g}) is over" if trainer.budget.spent else "on request"
            kept = trainer.store.checkpoint(state.step).name
            print(f"stopped {why}: {kept} is kept; the same command resumes from there", flush=True)
        return ExitCode.STOPPED
    trainer.context.beat("finish", state.step, limit=float("inf"))  # copies files if they cannot be linked
    chosen = on_rank_0(lambda: _finish(trainer, output_dir), is_long=True)
    if trainer.context.rank == 0:
        # No other rank waits for a push or a merge, so that they may take any time.
        trainer.context.beat("push", state.step, limit=float("inf"))
        trainer.callbacks.on_final_model(chosen)
    if settings.checkpoint.merge_lora and trainer.context.rank == 0:
        trainer.context.beat("merge", state.step, limit=float("inf"))
        print(merge_run(settings, trainer.source, output_dir), flush=True)
    return ExitCode.DONE


def _finish(trainer: Trainer, output_dir: Path) -> Path:
    """Link the last or best checkpoint's model into the output folder, and return that checkpoint."""
    last = trainer.store.checkpoint(trainer.state.step)
    best = trainer.best_checkpoint if trainer.settings.evaluation.load_best_model_at_end else None
    finalize_model(best or last, output_dir)
    chosen = f" (step {trainer.state.best_step}, the lowest evaluation loss)" if best else ""
    what = "adapter" if trainer.settings.finetuning.finetuning_type == "lora" else "model"
    print(f"the {what} is in {output_dir}{chosen}", flush=True)
    return best or last


def _silence_libraries() -> None:
    """Silence Transformers' progress bars and advice on generation, and torch's advice on data workers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
