"""What every rank of a training run does, from meeting the others to the final model."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.data.tokenizer import load_tokenizer
from megatune.engine import device, groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.plan.case import Case
from megatune.plan.run.record import PLAN_NAME
from megatune.training.agreement import on_rank_0
from megatune.training.banner import banner
from megatune.training.callbacks import CallbackList, begin_record, build_callbacks
from megatune.training.checkpoint import TrainState, load_checkpoint
from megatune.training.course import Course
from megatune.training.feed import RunData, opened_data
from megatune.training.loop import Trainer
from megatune.training.memory import MemoryLog
from megatune.training.model_files import model_on_node
from megatune.training.schedule import LearningRateSchedule, warmup_steps_of
from megatune.training.storage import (
    CheckpointStore,
    checkpoint_step,
    clean_partials,
    finalize_model,
    list_checkpoints,
    newest_verified,
    remove_checkpoints,
    verify,
    write_atomically,
    writing,
)


def train(context: RankContext, payload: dict[str, Any]) -> int:
    """The target that `launch` runs in every rank.

    Args:
        payload: "settings", valid ones; "run_yaml", the text of OUTPUT/run.yaml; "case", what was planned, or None;
            "model_dir", where the launcher put the files of a model on a hub.

    Returns:
        DONE or STOPPED.

    Raises:
        MegatuneError: whatever keeps the run from starting or going on, with its exit code.
    """
    settings: Settings = payload["settings"]
    context.beat("join", 0, limit=settings.run.ddp_timeout)
    _quiet()
    groups.join(
        context.rank,
        context.world_size,
        context.local_rank,
        context.master_addr,
        context.master_port,
        timeout=settings.run.ddp_timeout,
    )
    try:
        return _train(context, settings, payload["run_yaml"], payload.get("case"), payload.get("model_dir"))
    finally:
        groups.leave()


def _train(
    context: RankContext, settings: Settings, run_yaml: str, case: Case | None = None, model_dir: str | None = None
) -> int:
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    memory = MemoryLog(context.run_dir, context.rank)
    memory.joined()
    on_rank_0(lambda: _open_output(output_dir, run_yaml))
    resumed, notes = on_rank_0(lambda: _choose_checkpoint(settings, output_dir))
    if case is not None:
        on_rank_0(lambda: _note_plan(output_dir, case, resumed))
    else:  # an earlier run's plan is not this one's
        on_rank_0(lambda: (output_dir / PLAN_NAME).unlink(missing_ok=True))
    source = model_on_node(context, settings, model_dir, resumed)
    try:
        with opened_data(context, settings, source, resumed) as data:
            return _train_on(data, context, settings, source, resumed, notes, memory, planned=case is not None)
    finally:
        memory.note()


def _train_on(
    data: RunData,
    context: RankContext,
    settings: Settings,
    source: Path,
    resumed: Path | None,
    notes: Sequence[str],
    memory: MemoryLog,
    *,
    planned: bool,
) -> int:
    assert settings.run.output_dir is not None
    output_dir = Path(settings.run.output_dir)
    context.beat("load", 0, limit=settings.run.ddp_timeout)
    assembly = assemble(resumed or source, settings)
    course = Course.plan(settings, data.num_rows, assembly.place.dp_size)
    state = TrainState(0, data.key, course.global_batch_size, settings.run.seed)
    if resumed is not None:
        state = load_checkpoint(resumed, assembly, settings, state)
    feed = data.feed(course, assembly.architecture.vocab_size)
    trainer = Trainer(
        settings=settings,
        assembly=assembly,
        rows=feed.rows,
        evaluation=feed.evaluation,
        course=course,
        state=state,
        schedule=_schedule(settings, course.total_steps),
        callbacks=_callbacks(context, settings, output_dir, state.step, planned),
        store=CheckpointStore(output_dir),
        context=context,
        source=source,
        pad_token_id=_pad_token_id(source),
        memory=memory,
        follower=feed.follower,
    )
    if context.rank == 0:
        print("\n".join([*notes, *banner(settings, assembly, feed.lines, course, state, resumed)]), flush=True)
    on_rank_0(lambda: _clear_way(settings, output_dir, resumed, state.step))
    _settle_memory()
    memory.loaded(assembly.place.pp_rank)
    outcome = trainer.run()
    if context.rank == 0 and feed.follower is not None:
        print("\n".join(feed.follower.summary()), flush=True)
    if outcome == "stopped":
        if context.rank == 0:
            print(f"stopped on request after step {state.step}; the same command goes on from there", flush=True)
        return ExitCode.STOPPED
    on_rank_0(lambda: _finish(trainer, output_dir))
    return ExitCode.DONE


def _open_output(output_dir: Path, run_yaml: str) -> None:
    """Tidy what a killed run left in the folder, and note what this one does."""
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    clean_partials(output_dir)
    with writing(output_dir):
        write_atomically(output_dir / "run.yaml", run_yaml)


def _note_plan(output_dir: Path, case: Case, resumed: Path | None) -> None:
    with writing(output_dir):
        begin_record(output_dir, case, (checkpoint_step(resumed) or 0) if resumed is not None else 0)


def _choose_checkpoint(settings: Settings, output_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and what a user should know about the choice.

    Raises:
        MegatuneError: INPUT, when the one asked for is not whole, or none of those that are there is.
    """
    asked = settings.run.resume_from_checkpoint
    if isinstance(asked, str):
        path = Path(asked)
        if not path.is_dir():
            raise MegatuneError(Finding(f"resume_from_checkpoint: no folder {asked!r}"), ExitCode.INPUT)
        if problems := verify(path):
            raise MegatuneError(problems, ExitCode.INPUT)
        return path, []
    if asked is False or settings.run.overwrite_output_dir:
        return None, []
    newest, problems = newest_verified(output_dir)
    if newest is None and (asked or list_checkpoints(output_dir)):
        nothing = Finding(f"resume_from_checkpoint: there is no checkpoint in {output_dir}")
        fix = Finding(
            f"{output_dir} holds checkpoints and none can be resumed from",
            fix="overwrite_output_dir: true deletes them and starts anew; another output_dir keeps them",
        )
        raise MegatuneError([*problems, fix] if problems else [nothing], ExitCode.INPUT)
    return newest, [f"passed over: {problem}" for problem in problems]


def _clear_way(settings: Settings, output_dir: Path, resumed: Path | None, step: int) -> None:
    """Remove checkpoints of another course of the run, beyond the step that this one begins at: the next resume would
    take them for this run's. Only where the user said so.

    Raises:
        MegatuneError: CANNOT_WRITE, when there are some and the user did not.
    """
    beyond = [path for path in list_checkpoints(output_dir) if (checkpoint_step(path) or 0) > step]
    asked = settings.run.resume_from_checkpoint
    if not beyond or (resumed is not None and not isinstance(asked, str)):
        return  # what an automatic resume passed over is damaged, and is replaced when the run comes to it
    if not settings.run.overwrite_output_dir:
        names = ", ".join(path.name for path in beyond[-3:])
        raise MegatuneError(
            Finding(
                f"{output_dir} holds {names} of an earlier run",
                why=f"this run begins at step {step}, and the next resume could not tell them from its own",
                fix="overwrite_output_dir: true deletes them; another output_dir keeps them",
            ),
            ExitCode.CANNOT_WRITE,
        )
    remove_checkpoints(beyond)


def _schedule(settings: Settings, total_steps: int) -> LearningRateSchedule:
    optimizer = settings.optimizer
    return LearningRateSchedule(
        optimizer.learning_rate,
        optimizer.lr_scheduler_type,
        optimizer.lr_scheduler_kwargs,
        warmup_steps_of(optimizer.warmup_steps, optimizer.warmup_ratio, total_steps),
        total_steps,
    )


def _callbacks(context: RankContext, settings: Settings, output_dir: Path, step: int, planned: bool) -> CallbackList:
    return build_callbacks(settings, output_dir, step, planned=planned) if context.rank == 0 else CallbackList()


def _pad_token_id(source: Path) -> int:
    """Any token does: padding is on the right, so no real token attends to it, and it is not trained."""
    tokenizer = load_tokenizer(source)
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


def _finish(trainer: Trainer, output_dir: Path) -> None:
    """The final model lies in the output folder itself: the best one where that was asked for, else the last."""
    last = trainer.store.checkpoint(trainer.state.step)
    best = trainer.best_checkpoint if trainer.settings.evaluation.load_best_model_at_end else None
    finalize_model(best or last, output_dir)
    chosen = f" (step {trainer.state.best_step}, the lowest evaluation loss)" if best else ""
    print(f"the model is in {output_dir}{chosen}", flush=True)


def _quiet() -> None:
    """Transformers' progress bars and advice about generation say nothing about this run."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _settle_memory() -> None:
    """What start-up made stays; the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    device.synchronize()
